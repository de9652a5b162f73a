"""A run on a folder of image files that a test may change."""

from pathlib import Path

import pytest
from app.data.pictures import class_folders
from measuring.small_runs import CLASSES, trained

from largemargin.app.data import DataConfig
from largemargin.app.training import Run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "photos", CLASSES, 12)


@pytest.fixture
def of_photos(photos: Path, tmp_path: Path) -> Run:
    return trained(DataConfig("folder", path=str(photos), validation=0.3), tmp_path / "runs")

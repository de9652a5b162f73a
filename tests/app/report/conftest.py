"""One trained run for all tests of the report."""

from pathlib import Path

import pytest
from app.report.made import evaluated, renamed, trained

from largemargin.app.training import Run


@pytest.fixture(scope="session")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluated(trained(tmp_path_factory.mktemp("softmax") / "run"))


@pytest.fixture(scope="session")
def cosface(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluated(trained(tmp_path_factory.mktemp("cosface") / "run", "cosface"))


@pytest.fixture(scope="session")
def hostile(softmax: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return renamed(softmax, tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture(scope="session")
def hostile_page(hostile: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from largemargin.app.report.page import report

    path = tmp_path_factory.mktemp("page") / "report.html"
    return report(
        {"<script>alert(9)</script>": hostile, "plain": hostile.folder},
        path,
        features="pca",
        max_samples=40,
    )

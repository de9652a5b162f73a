"""The core from a built wheel, alone with torch, on every interpreter that is named.

``LARGEMARGIN_PYTHONS=old/bin/python:new/bin/python pytest tests/faults/test_wheel.py`` asks others
than this one: any that have torch, as made by ``python3.11 -m venv old`` and
``old/bin/pip install 'torch==2.9.*'``. They are left as they are.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from faults.core_alone import CHECKS
from faults.counting import Faults
from faults.extras import OPTIONAL

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ALONE = Path(__file__).with_name("core_alone.py")
OTHERS = [each for each in os.environ.get("LARGEMARGIN_PYTHONS", "").split(os.pathsep) if each]


FILES = (
    *("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"),
    *("CHANGELOG.md", "CITATION.cff", "SECURITY.md"),
)


def source_in(place: Path) -> Path:
    """What is published, without what builds have left."""
    source = place / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library as a wheel, built of the source alone, lays it out."""
    pytest.importorskip("setuptools", reason="wheels are built by setuptools")
    place = tmp_path_factory.mktemp("wheel")
    source = source_in(place)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*build, "-w", str(place), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("largemargin-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place / "packages")
    return place / "packages"


def test_the_wheel_needs_torch_alone(published: Path) -> None:
    (about,) = published.glob("largemargin-*.dist-info/METADATA")
    lines = about.read_text(encoding="utf-8").splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist: ")]
    assert [line for line in needs if "extra ==" not in line] == ["Requires-Dist: torch>=2.9"]


def test_the_wheel_holds_the_library_and_not_what_needs_a_clone(published: Path) -> None:
    (about,) = published.glob("*.dist-info")
    assert {each.name for each in published.iterdir()} == {"largemargin", about.name}
    assert (published / "largemargin" / "app" / "training" / "presets.json").is_file()
    assert "largemargin.commands" not in (about / "entry_points.txt").read_text(encoding="utf-8")


def test_the_source_archive_holds_the_library_and_no_part_of_its_tests(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="source archives are built by setuptools")
    source = source_in(tmp_path)
    (source / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_layers.py", source / "tests")  # setuptools takes these
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("largemargin-*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert set(FILES) <= names
    assert "src/largemargin/app/training/presets.json" in names
    assert not [name for name in names if name.startswith(("tests", "papers"))]


@pytest.mark.parametrize("python", [sys.executable, *OTHERS], ids=lambda python: Path(python).name)
def test_the_core_from_a_built_wheel_with_its_one_dependency(
    tmp_path: Path, published: Path, faults: Faults, python: str
) -> None:
    variables = {**os.environ, "PYTHONPATH": str(published), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(ALONE), "--hide", *OPTIONAL],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    versions, *parts = done.stdout.splitlines()
    assert [part.partition(":")[0] for part in parts] == list(CHECKS), said
    faults.attempt(f"the core from a wheel, alone: {versions}")

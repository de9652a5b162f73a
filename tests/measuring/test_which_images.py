"""The commands take the images they were asked for: the run's own, or others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from app.data.pictures import class_folders
from app.report.reading import Page
from measuring.small_runs import CLASSES, NONE, trained

from largemargin.app.cli import main
from largemargin.app.data import DataConfig, load_data
from largemargin.app.report.page import report
from largemargin.app.training import Run
from largemargin.errors import LargeMarginError
from largemargin.measuring import Evaluation, Geometry, accuracy_of


@pytest.fixture(scope="module")
def on_digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(DataConfig(fraction=0.2), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def of_digits(on_digits: Run, tmp_path: Path) -> Run:
    """A copy that may be changed."""
    shutil.copytree(on_digits.folder, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--split", "train"], "evaluation-train.json"),
        (["--which", "last"], "evaluation-test-last.json"),
        (["--flips"], "evaluation-test-flips.json"),
        (["--data", "digits", "--split", "train"], "evaluation-digits-train.json"),
    ],
)
def test_other_images_do_not_become_the_result(
    words: list[str],
    name: str,
    of_digits: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(of_digits.folder)
    assert main(["evaluate", run, *NONE]) == 0
    result = of_digits.folder / "evaluation.json"
    before = result.read_text()
    origin = Evaluation.load(result).origin
    assert origin is not None
    assert (origin.split, origin.data, origin.own, origin.which) == ("test", "digits", True, "best")
    assert origin.usual
    capsys.readouterr()
    assert main(["evaluate", run, *NONE, *words]) == 0
    said = capsys.readouterr().out
    assert f"written to {of_digits.folder / name}" in said
    assert "not the result of the run" in said
    assert result.read_text() == before
    other = Evaluation.load(of_digits.folder / name)
    assert other.origin is not None
    assert not other.origin.usual
    # Who writes it there all the same does not get it as the result of the run.
    assert main(["evaluate", run, *NONE, *words, "--out", str(result)]) == 0
    page = Page(report(of_digits, tmp_path / "report.html", features="none"))
    assert "evaluation.json is of " in page.text
    right = of_digits.result["test"]["accuracy"]
    assert page.tables["table-glance"][1][1].startswith(f"{100 * right:.2f} % ")


def test_evaluations_of_earlier_versions(of_digits: Run, tmp_path: Path) -> None:
    """They are told by how many images there were."""
    path = of_digits.folder / "evaluation.json"
    for split, note in (("train", True), ("test", False)):
        assert main(["evaluate", str(of_digits.folder), *NONE, "--split", split]) == 0
        name = "evaluation.json" if split == "test" else f"evaluation-{split}.json"
        record = json.loads((of_digits.folder / name).read_text())
        del record["origin"]
        path.write_text(json.dumps(record))
        assert Evaluation.load(path).origin is None
        page = Page(report(of_digits, tmp_path / "report.html", features="none"))
        assert ("but the run has 540 test images: it is left out" in page.text) == note


@pytest.mark.parametrize("words", [["--split", "train"], ["--which", "last"], ["--against", "RUN"]])
def test_other_geometries_do_not_become_that_of_the_run(
    words: list[str], of_digits: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(of_digits.folder)
    path = of_digits.folder / "geometry.json"
    before = path.read_text()
    words = [run if word == "RUN" else word for word in words]
    assert main(["measure", run, *words, "--out", str(path)]) == 2
    assert "Choose another file" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["measure", run, "--split", "test", "--out", str(path)]) == 0


@pytest.mark.parametrize("option", ["workers 1", "resident yes", "corrupt skip"])
def test_how_to_read_is_not_which_images(
    option: str, of_photos: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value = option.split()
    out = tmp_path / "geometry.json"
    words = ["measure", str(of_photos.folder), f"--data.{name}", value, "--out", str(out)]
    assert main(words) == 0
    assert "validation images" in capsys.readouterr().out
    validation = of_photos.data().validation
    assert validation is not None
    found = Geometry.load(out)
    assert found.samples == len(validation)
    assert found.data is not None
    assert found.data.startswith("folder, validation images, digest ")


def test_a_model_of_large_grey_images_takes_a_folder(photos: Path, tmp_path: Path) -> None:
    labels = np.arange(12) % 3
    images = np.random.default_rng(0).integers(0, 256, (12, 72, 72), dtype=np.uint8)
    np.savez(tmp_path / "grey.npz", images=images, labels=labels, classes=np.array(CLASSES))
    run = trained(DataConfig("arrays", str(tmp_path / "grey.npz")), tmp_path / "runs")
    out = tmp_path / "out.json"
    words = ["--data", str(photos), "--out", str(out)]
    assert main(["evaluate", str(run.folder), *NONE, *words]) == 0
    assert Evaluation.load(out).clean.samples == 36


def test_a_path_without_a_name(
    of_photos: Run, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LargeMarginError, match=r"data.path is 'inv', but data.name is digits"):
        load_data(DataConfig(path="inv"))
    assert main(["train", "--data.path", str(photos), "--out", str(photos / "runs")]) == 2
    assert f"Say what lies there: --data {photos}" in capsys.readouterr().err
    for command in (["evaluate", str(of_photos.folder), *NONE], ["measure", str(of_photos.folder)]):
        assert main([*command, "--data.path", str(photos)]) == 2
        said = capsys.readouterr().err
        assert f"--data.path {photos} is about other data" in said
        assert f"--data {photos}." in said


def test_data_that_is_the_default_is_still_other_data(
    of_photos: Run, of_digits: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(of_photos.folder), *NONE, "--data", "digits"]) == 2
    assert "the model does not know the classes 0, 1, 2" in capsys.readouterr().err
    out = tmp_path / "out.json"
    words = ["--data", "digits", "--split", "train", "--out", str(out)]
    assert main(["evaluate", str(of_digits.folder), *NONE, *words]) == 0
    every = load_data(DataConfig(validation=0.0)).train  # the run was trained on a fifth of it
    assert Evaluation.load(out).clean == accuracy_of(of_digits.model(), every, num_classes=10)


def test_settings_that_were_printed_take_the_data_of_the_run(
    of_photos: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(of_photos.folder), *NONE, "--print_config"]) == 0
    settings = tmp_path / "settings.yaml"
    settings.write_text(capsys.readouterr().out)
    assert main(["evaluate", str(of_photos.folder), "--config", str(settings)]) == 0
    found = Evaluation.load(of_photos.folder / "evaluation.json")
    assert found.origin is not None
    assert found.origin.own


def test_two_runs_are_measured_on_the_same_images(
    of_photos: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = class_folders(tmp_path / "others", CLASSES, 9, first=500)
    second = trained(DataConfig("folder", path=str(others), validation=0.3), tmp_path / "more")
    words = ["measure", str(of_photos.folder), "--against", str(second.folder)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "so their geometries do not compare" in said
    assert "Give both the same images: --data" in said
    assert main([*words, "--data", str(others)]) == 0
    # The images are the same at another size.
    small = trained(
        DataConfig("folder", path=str(photos), validation=0.3, size=8), tmp_path / "small"
    )
    assert main(["measure", str(of_photos.folder), "--against", str(small.folder)]) == 0


def test_a_report_of_runs_on_other_images_says_so(
    of_photos: Run, of_digits: Run, tmp_path: Path
) -> None:
    said = "Not all models were tested on the same images"
    page = Page(report([of_photos, of_digits], tmp_path / "report.html", features="none"))
    assert said in page.text
    # Neither is held against the other, or called the best.
    assert "points against the baseline" not in page.text
    assert "against baseline" not in page.tables["table-glance"][0]
    assert "the best of each column" not in page.text
    page = Page(report([of_digits, of_digits], tmp_path / "report.html", features="none"))
    assert said not in page.text


def test_images_that_are_not_square(tmp_path: Path) -> None:
    photos = class_folders(tmp_path / "photos", CLASSES, 8, height=20, width=40)
    data = DataConfig("folder", path=str(photos), size=12, width=24)
    run = str(trained(data, tmp_path / "runs").folder)
    out = tmp_path / "out.json"
    words = ["--data", str(photos), "--ood", "digits"]
    for memory in ("yes", "no"):
        read = ["--data.resident", memory, "--out", str(out)]
        assert main(["evaluate", run, *NONE, *words, *read]) == 0
        found = Evaluation.load(out)
        assert found.clean.samples == 24
        assert found.ood is not None


def test_results_name_their_classes(
    of_photos: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the run, that of the command, and the page of a file that has left its run."""
    own = of_photos.geometry()
    assert own is not None
    assert own.class_names == CLASSES
    out = tmp_path / "geometry.json"
    assert main(["measure", str(of_photos.folder), "--out", str(out)]) == 0
    found = Geometry.load(out)
    assert found.class_names == CLASSES
    first, second = (CLASSES[each] for each in found.prototypes.closest_classes)
    assert f"between classes {first} and {second}\n" in capsys.readouterr().out
    page = Page(report(out, tmp_path / "report.html"))
    assert f"closest: {first} and {second}" in page.text

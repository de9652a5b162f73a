"""``largemargin evaluate | measure | predict | export`` on a run of digits."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from measuring.alike import same
from PIL import Image
from sklearn.datasets import load_digits

from largemargin.app.cli import main
from largemargin.app.data import Batches, DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.training import Run, RunConfig, train
from largemargin.measuring import (
    Evaluation,
    Geometry,
    Predictions,
    TemperatureScaled,
    accuracy_of,
    calibrate_temperature,
    calibrate_threshold,
    measure,
)
from largemargin.measuring.geometry_result import GeometryComparison

QUICK = ["--draws", "2", "--gaussian", "[0.1]", "--uniform", "[]", "--attacks", "[fgsm]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One for all tests, in any order: a command that writes to it needs ``copied``."""
    out = tmp_path_factory.mktemp("runs")
    config = RunConfig(
        data=DataConfig(fraction=0.5), model=ModelConfig("mlp"), epochs=3, out=str(out)
    )
    trained = train(config, progress=False)
    before = sorted(out.rglob("*"))
    yield trained
    assert sorted(out.rglob("*")) == before, "a test left something in the run of all tests"


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Run:
    """A copy that may be changed."""
    shutil.copytree(run.folder, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as files in folders of their classes, and one file that is no image."""
    folder = tmp_path_factory.mktemp("photos")
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if number < 60:
            path = folder / str(label) / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.rint(image * 255 / 16).astype(np.uint8)).save(path)
    return folder


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-m", "largemargin", *map(str, words)]
    return subprocess.run(given, capture_output=True, text=True, timeout=300)


def test_evaluate(copied: Run) -> None:
    done = command("evaluate", copied.folder, *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    found = Evaluation.load(copied.folder / "evaluation.json")
    assert str(found) in done.stdout
    data = copied.data()
    assert data.test is not None
    assert found.clean == accuracy_of(copied.model(), data.test)
    assert found.clean.accuracy == copied.result["test"]["accuracy"]
    assert found.settings["draws"] == 2
    assert [each.attack for each in found.attacked] == ["fgsm linf 8/255"]
    fitted = calibrate_temperature(copied.model(), data.validation)
    assert found.temperature == fitted.value
    assert found.calibrated is not None
    again = accuracy_of(TemperatureScaled(copied.model(), fitted), data.test, num_classes=10)
    assert found.calibrated.expected_error == pytest.approx(again.ece, abs=1e-6)
    assert f"with temperature {fitted.value:.4g}" in done.stdout


def test_evaluate_other_data_and_ood(copied: Run, photos: Path, tmp_path: Path) -> None:
    """Files of digits are the digits: same pixels, labels by the names of the folders."""
    out = tmp_path / "out.json"
    words = ["evaluate", str(copied.folder), "--data", str(photos), "--ood", str(photos / "3")]
    assert main([*words, *QUICK, "--attacks", "[]", "--out", str(out)]) == 0
    found = Evaluation.load(out)
    digits = load_digits()
    images = torch.from_numpy(np.rint(digits.images[:60] * 255 / 16) / 255).float()[:, None]
    want = accuracy_of(copied.model(), [(images, torch.from_numpy(digits.target[:60]))])
    assert found.clean.samples == 60
    assert found.clean.confusion == want.confusion
    assert found.ood is not None
    assert found.ood.ood == (digits.target[:60] == 3).sum()
    assert found.temperature is None  # the run's own data may not be here
    fitted = calibrate_temperature(copied.model(), copied.data().validation)
    assert main(["predict", str(copied.folder), str(photos / "3"), "--threshold", "none"]) == 0
    assert main([*words, *QUICK, "--attacks", "[]", "--out", str(out)]) == 0
    assert Evaluation.load(out).temperature == fitted.value  # but it was, when it predicted
    assert not (copied.folder / "evaluation.json").exists()


def test_evaluate_settings_from_a_file(copied: Run, tmp_path: Path) -> None:
    settings = tmp_path / "quick.yaml"
    settings.write_text(
        "perturbations: none\ngaussian: [0.2]\nuniform: []\ndraws: 3\nattacks: []\n"
    )
    words = ["evaluate", str(copied.folder), "--config", str(settings), "--split", "validation"]
    assert main(words) == 0
    found = Evaluation.load(copied.folder / "evaluation-validation.json")
    assert list(found.perturbed) == ["gaussian 0.2"]
    assert len(found.perturbed["gaussian 0.2"].runs) == 3
    assert found.clean.accuracy == pytest.approx(copied.result["validation"]["accuracy"])


def test_measure(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", str(run.folder), "--out", str(tmp_path / "geometry.json")]) == 0
    said = capsys.readouterr()
    found = Geometry.load(tmp_path / "geometry.json")
    assert str(found) in said.out
    assert said.err == ""
    trained = run.geometry()
    assert trained is not None
    same(found, trained)


def test_measure_layer_by_layer(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of the network, or layers by name, as measure() takes them."""
    out = tmp_path / "geometry.json"
    words = ["measure", str(run.folder), "--out", str(out)]
    model, test = run.model(), run.data().test
    assert test is not None
    batches = Batches(test, 256, shuffle=False)
    assert main([*words, "--layers", "blocks"]) == 0
    found = Geometry.load(out).layers
    assert found == measure(model, batches, pairwise=True, layers="blocks").layers
    assert found is not None
    names = [each.name for each in found]
    assert f"layers, by class means ({len(names)})" in capsys.readouterr().out
    assert main([*words, "--layers", f"[{names[-1]}]", "--layer_margins", f"input,{names[0]}"]) == 0
    by_name = Geometry.load(out)
    assert by_name.layers == found[-1:]
    assert list(by_name.layer_margins or ()) == ["input", names[0]]
    assert main([*words]) == 0
    assert Geometry.load(out).layers is None


def test_measure_two_runs(run: Run, copied: Run, tmp_path: Path) -> None:
    """The other run is where the change begins: a run is held against it."""
    out = tmp_path / "both.json"
    words = ["measure", str(run.folder), "--against", str(copied.folder), "--out", str(out)]
    assert main([*words, "--pairwise", "false"]) == 0
    found = GeometryComparison.load(out)
    assert found.names == ("run", run.folder.name)
    assert found.quantities["accuracy"].change == 0


def test_predict(
    copied: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    out = tmp_path / "out.json"
    words = ["predict", copied.folder, photos, broken, "--out", out]
    assert main(list(map(str, words))) == 0
    said = capsys.readouterr()
    found = Predictions.load(out)
    assert "61 images, " in said.out
    assert "1 could not be read" in said.out
    validation = copied.data().validation
    assert found.threshold == calibrate_threshold(copied.model(), validation)
    assert found.temperature == calibrate_temperature(copied.model(), validation)
    assert str(found.temperature) in said.err
    assert str(found.threshold) in said.err
    right = [row.label == Path(row.image).parent.name for row in found.rows[:-1]]
    assert sum(right) / 60 > 0.5
    for row in found.rows[:-1]:
        assert row.margin is not None
        assert row.flag == (row.margin < found.threshold.value)
    assert "its content is none of JPEG, PNG" in found.rows[-1].error


def test_predict_again_needs_no_data(
    copied: Run, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The threshold stays in the run's folder, so that it can be taken to another machine."""
    one = str(sorted(photos.glob("*/*.png"))[0])
    assert main(["predict", str(copied.folder), one]) == 0
    first = capsys.readouterr()
    monkeypatch.setattr(Run, "data", lambda self: pytest.fail("the data was read again"))
    assert main(["predict", str(copied.folder), one]) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert re.fullmatch(r"1 image, [01] flagged, probabilities with .* \d\S*\n", second.err)
    row = next(csv.DictReader(second.out.splitlines()))
    assert row["margin_kind"] == "distance"
    assert row["flag"] in ("true", "false")


def test_predict_without_validation_images(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(
        data=DataConfig(fraction=0.2, validation=0.0),
        model=ModelConfig("mlp"),
        epochs=1,
        measure=False,
        out=str(tmp_path),
    )
    folder = str(train(config, progress=False).folder)
    assert main(["predict", folder, str(photos / "1")]) == 0
    said = capsys.readouterr()
    assert "Nothing is flagged: " in said.err
    assert "this run held none out" in said.err
    assert "Probabilities are those of the logits as they are: " in said.err
    assert {row["flag"] for row in csv.DictReader(said.out.splitlines())} == {""}
    # Who asks for a rule gets it, or an error.
    assert main(["predict", folder, str(photos / "1"), "--target", "0.9"]) == 2
    assert "this run held none out" in capsys.readouterr().err
    for threshold, flags in (("none", {""}), ("1e9", {"true"}), ("0", {"false"})):
        assert main(["predict", folder, str(photos / "1"), "--threshold", threshold]) == 0
        said = capsys.readouterr()
        rows = list(csv.DictReader(said.out.splitlines()))
        assert {row["flag"] for row in rows} == flags
        count = {"none": "", "1e9": f", {len(rows)} flagged", "0": ", 0 flagged"}[threshold]
        assert said.err.endswith(f"{len(rows)} images{count}\n")


def test_temperatures_of_probabilities(
    copied: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As fitted, as given, or as trained; in predictions and in what is exported."""
    images = sorted(photos.glob("1/*.png"))[:3]
    fitted = calibrate_temperature(copied.model(), copied.data().validation)
    pixels = torch.stack(
        [torch.from_numpy(np.array(Image.open(each))).float()[None] / 255 for each in images]
    )
    for given, value in (("auto", fitted.value), ("none", 1.0), ("0.5", 0.5)):
        words = ["predict", str(copied.folder), *map(str, images), "--temperature", given]
        assert main([*words, "--threshold", "none"]) == 0
        rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        want = (copied.model()(pixels).double() / value).softmax(1)
        got = [float(row["probability"]) for row in rows]
        assert got == pytest.approx(want.amax(1).tolist(), rel=1e-4)
        path = tmp_path / f"{given}.pt2"
        words = ["export", str(copied.folder), "--format", "program", "-o", str(path)]
        assert main([*words, "--outputs", "probabilities", "--temperature", given]) == 0
        capsys.readouterr()
        exported = torch.export.load(str(path)).module()(pixels)
        torch.testing.assert_close(exported, want.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_exported_logits_say_their_temperature(
    copied: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """Without it their softmax is not what predict says."""
    fitted = calibrate_temperature(copied.model(), copied.data().validation).value
    assert abs(fitted - 1) > 0.01
    kind = "program" if suffix == ".pt2" else "onnx"
    words = ["export", str(copied.folder), "--format", kind, "--overwrite"]
    for options, value in (([], fitted), (["--temperature", "none"], 1.0)):
        path = tmp_path / f"logits{suffix}"
        assert main([*words, "-o", str(path), *options]) == 0
        said = capsys.readouterr().out
        assert f"to logits; probabilities are softmax(logits / {value:.6g})" in said
        images, held = torch.rand(5, 1, 8, 8), {"largemargin.temperature": ""}
        if kind == "program":
            got = torch.export.load(str(path), extra_files=held).module()(images)
        else:
            onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")
            session = onnxruntime.InferenceSession(str(path))
            held = session.get_modelmeta().custom_metadata_map
            got = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        assert torch.allclose(got, copied.model()(images), atol=1e-4)
        assert json.loads(held["largemargin.temperature"]) == value
    images = tmp_path / "a.png"
    Image.new("L", (8, 8), 90).save(images)
    assert main(["predict", str(copied.folder), str(images), "--threshold", "none"]) == 0
    assert f"1 image, probabilities with temperature {fitted:.6g}" in capsys.readouterr().err


def test_nothing_readable_is_no_success(copied: Run, tmp_path: Path) -> None:
    words = ["predict", str(copied.folder), str(tmp_path / "nowhere.png"), "--threshold", "none"]
    assert main(words) == 1


@pytest.mark.slow
def test_export_to_onnx(run: Run, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")
    path = tmp_path / "new" / "model.onnx"
    words = ("--outputs", "probabilities", "--temperature", "0.5", "-o", path)
    done = command("export", run.folder, *words)
    assert done.returncode == 0, done.stderr
    assert f"written to {path}" in done.stdout
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = torch.rand(5, 1, 8, 8)
    (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    want = (run.model()(images) / 0.5).softmax(1)
    assert np.allclose(got, want.detach().numpy(), atol=1e-5)
    names = session.get_modelmeta().custom_metadata_map["largemargin.class_names"]
    assert json.loads(names) == list(run.classes)
    assert session.get_modelmeta().custom_metadata_map["largemargin.temperature"] == "0.5"


def test_export_a_program(copied: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt2"
    words = ["export", str(copied.folder), "--format", "program", "-o", str(path)]
    assert main(words) == 0
    images = torch.rand(5, 1, 8, 8)
    got = torch.export.load(str(path)).module()(images)
    assert torch.allclose(got, copied.model()(images), atol=1e-5)
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--overwrite", "true"]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {"model.pt2", "run"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "RUN", "--split", "best"], "--split must be one of"),
        (["evaluate", "RUN", "--which", "first"], "--which must be best or last"),
        (["evaluate", "RUN", "--perturbations", "road"], "at most 8"),
        (["evaluate", "RUN", "--attacks", "[square]"], "every attack must be one of"),
        (["evaluate", "RUN", "--ood", "nowhere"], "neither a folder nor a data set 'nowhere'"),
        (["evaluate", "RUN", "--draws", "many"], "draws"),
        (["evaluate", "nowhere"], "is no run"),
        (["measure", "RUN", "--against", "nowhere"], "is no run"),
        (["measure", "RUN", "--layers", "bakbone"], "no layer 'bakbone'. Closest: 'backbone'"),
        (["measure", "RUN", "--layers", "backbone,blocks"], "or blocks alone, but 'backbone,bloc"),
        (["measure", "RUN", "--layers", "backbone,,head"], "names of layers with commas between"),
        (["measure", "RUN", "--layer_margins", "nothing"], "has no layer 'nothing'"),
        (["predict", "RUN"], "images"),
        (["predict", "RUN", "a.png", "--out", "a.txt"], ".csv or .json"),
        (["predict", "RUN", "a.png", "--threshold", "low"], "a number, none or auto"),
        (["predict", "RUN", "a.png", "--target", "2"], "target must be"),
        (["predict", "RUN", "a.png", "--threshold", "nan"], "--threshold must be a finite number"),
        (
            ["predict", "RUN", "a.png", "--threshold", "0.3", "--target", "0.5"],
            "--target 0.5 is for --threshold auto, but --threshold 0.3 was given",
        ),
        (
            ["predict", "RUN", "a.png", "--threshold", "none", "--rule", "keep"],
            "--rule keep is for --threshold auto",
        ),
        (["predict", "RUN", "a.png", "--temperature", "hot"], "a number, none or auto"),
        (["predict", "RUN", "a.png", "--temperature", "0"], "temperature must be a finite number"),
        (["evaluate", "RUN", "--temperature", "-1"], "temperature must be a finite number"),
        (
            ["export", "RUN", "--outputs", "features", "--temperature", "2"],
            "is for logits and probabilities",
        ),
        (
            ["export", "RUN", "--outputs", "probabilities", "--temperature", "0"],
            "temperature must be a finite number",
        ),
        (["export", "RUN", "--format", "tflite"], "'onnx', 'program'"),
        (["export", "RUN", "-o", "RUN"], "is a folder"),
        (["export", "RUN", "-o", "m.pt2"], "Add --format program, or call it m.onnx."),
        (["export", "RUN", "-o", "m.onnx", "--format", "program"], "Add --format onnx, or call it"),
        (["evaluate", "RUN", "--out", "RUN"], "is a folder"),
        (["measure", "RUN", "--out", "/dev/null/a.json"], "cannot be written"),
    ],
)
def test_wrong_input(
    copied: Run, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(copied.folder) if word == "RUN" else word for word in words]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_other_classes_are_refused(
    run: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("1", "2"):
        shutil.copytree(photos / name, tmp_path / f"class {name}")
    assert main(["evaluate", str(run.folder), "--data", str(tmp_path)]) == 2
    assert "does not know the classes class 1, class 2" in capsys.readouterr().err


def test_people_across_cameras(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Market-1501's layout: 4 people by 3 cameras; one query each, junk and distractors."""
    shades = {1: (250, 20, 20), 2: (20, 250, 20), 3: (20, 20, 250), 4: (240, 240, 20)}
    places = {"bounding_box_train": (1, 2, 3), "query": (1,), "bounding_box_test": (1, 2)}
    for number, (folder, cameras) in enumerate(places.items()):
        (tmp_path / "people" / folder).mkdir(parents=True)
        for person, shade in shades.items():
            for camera in cameras:
                name = f"{person:04d}_c{camera}s1_{person:06d}_00.jpg"
                light = tuple(value - 5 * number for value in shade)
                Image.new("RGB", (8, 16), light).save(tmp_path / "people" / folder / name)
    for name in ("-1_c2s1_000001_00.jpg", "0000_c2s1_000002_00.jpg"):
        Image.new("RGB", (8, 16), (9, 9, 9)).save(tmp_path / "people" / "bounding_box_test" / name)
    data = DataConfig("market1501", path=str(tmp_path / "people"), size=16, validation=0.0)
    config = RunConfig(
        data=data, model=ModelConfig("mlp"), epochs=5, batch_size=4, out=str(tmp_path / "runs")
    )
    trained = train(config, progress=False)
    words = ["evaluate", str(trained.folder), "--perturbations", "none", "--gaussian", "[]"]
    assert main([*words, "--uniform", "[]", "--attacks", "[]"]) == 0
    found = Evaluation.load(trained.folder / "evaluation.json")
    assert found.cross_camera is not None
    assert (found.cross_camera.queries, found.cross_camera.gallery) == (4, 10)
    # Every person looks the same to all cameras, and the camera of the query does not count.
    assert found.cross_camera.rank1 == 1
    assert found.cross_camera.mean_average_precision == 1
    assert "across cameras (4 queries, 10 images)" in capsys.readouterr().out

"""Files of strangers never run anything: pickles are refused, archives write nowhere else."""

import ast
import gzip
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app.data.pictures import class_folders
from faults.counting import Faults
from faults.planted import (
    every_pickle,
    pickled,
    slippery_npz,
    slippery_tar,
    torch_saved,
    with_checksum,
)
from faults.small_runs import digits, trained
from PIL import Image

import largemargin
from largemargin import export
from largemargin.app.cli import main
from largemargin.app.data import DataConfig, load_data
from largemargin.app.data.image_files import UnreadableImage, read_rgb
from largemargin.app.models import ModelConfig, build_model
from largemargin.app.models.library_networks import _fetch_torchvision
from largemargin.app.predict import predict
from largemargin.app.training import Run, train
from largemargin.errors import LargeMarginError

SOURCES = sorted(Path(largemargin.__file__).parent.rglob("*.py"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("run") / "run", epochs=2)


@pytest.fixture
def mark(tmp_path: Path) -> Any:
    """The file that a planted pickle would make; there is none at the end."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


KINDS = ("protocol 0", "protocol 2", "protocol 4", "protocol 5", "torch.save", "torch.save of old")


def test_the_planted_pickles_would_run(tmp_path: Path) -> None:
    torch.load(__import__("io").BytesIO(torch_saved(tmp_path / "a")), weights_only=False)
    assert (tmp_path / "a").exists()


FILES = ("model/model.safetensors", "model/criterion.safetensors", "rest.safetensors")


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        pytest.param(kind, file, marks=() if i % 3 == j else pytest.mark.slow)
        for i, kind in enumerate(KINDS)
        for j, file in enumerate(FILES)
    ],
)
def test_checkpoints_that_are_pickles(
    tmp_path: Path, finished: Run, mark: Path, faults: Faults, kind: str, file: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    (folder / "result.json").unlink()
    (last,) = folder.glob("checkpoints/epoch-*")
    with_checksum(last, file, every_pickle(mark)[kind])
    faults.attempt("a pickle in place of a checkpoint")
    with pytest.raises(LargeMarginError) as error:
        train(Run(folder).config, folder=folder, resume=True, data=digits(), progress=False)
    if kind == "protocol 0":
        assert "is not a whole safetensors file" in str(error.value)
    else:
        assert "is a pickle" in str(error.value)
        assert "can run any code, so it is refused" in str(error.value)
    if file == "model/model.safetensors":
        assert main(["measure", str(folder), "--which", "last", "--device", "cpu"]) == 2


def test_saved_models_that_are_pickles(tmp_path: Path, mark: Path, faults: Faults) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    for kind, content in every_pickle(mark).items():
        folder = export.save(tmp_path / kind, model)
        (folder / "model.safetensors").write_bytes(content)
        faults.attempt("a pickle in place of a saved model")
        with pytest.raises(LargeMarginError, match=r"refused|not a whole safetensors file"):
            export.load(folder, torch.nn.Sequential(torch.nn.Linear(4, 3)))
        (folder / "config.json").write_bytes(content)
        with pytest.raises(LargeMarginError, match=r"is not JSON|damaged"):
            export.read_config(folder)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".pkl"])
def test_weights_that_are_pickles(tmp_path: Path, mark: Path, faults: Faults, suffix: str) -> None:
    for number, content in enumerate(every_pickle(mark).values()):
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(content)
        faults.attempt("a pickle as pretrained weights")
        with pytest.raises(LargeMarginError, match=r"run code|run any code"):
            build_model(ModelConfig("mlp", weights=str(path)), 10, size=(8, 8))


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet10t"])
def test_weights_of_other_libraries_that_are_pickles(
    tmp_path: Path, mark: Path, faults: Faults, name: str
) -> None:
    pytest.importorskip(name.partition("/")[0], reason="the library is not installed")
    for suffix in (".safetensors", ".pth"):
        path = tmp_path / f"planted{suffix}"
        path.write_bytes(torch_saved(mark))
        faults.attempt("a pickle as pretrained weights")
        with pytest.raises(LargeMarginError, match=r"run code|run any code"):
            build_model(ModelConfig(name, weights=str(path)), 10, size=(64, 64))


def test_a_pickle_among_downloaded_weights(
    tmp_path: Path, mark: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    alexnet = models.get_model_weights("alexnet")["DEFAULT"].url.rpartition("/")[2]
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    for content in (pickled(mark, 2), torch_saved(mark), torch_saved(mark, zipped=False)):
        (tmp_path / "hub" / "checkpoints" / alexnet).write_bytes(content)
        faults.attempt("a pickle in place of downloaded weights")
        with pytest.raises(LargeMarginError, match="holds more than weights"):
            _fetch_torchvision("alexnet", "default")


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg_overlay", "pretrained"])
def test_options_do_not_load_weights(
    tmp_path: Path, mark: Path, faults: Faults, option: str
) -> None:
    path = tmp_path / "planted.pth"
    path.write_bytes(torch_saved(mark))
    faults.attempt("an option that would load weights")
    value: Any = {"file": str(path)} if "overlay" in option else str(path)
    config = ModelConfig("timm/resnet18", options={option: value})
    with pytest.raises(LargeMarginError, match="would load weights past the checks"):
        build_model(config, 10, size=(64, 64))


def test_arrays_that_are_pickles(tmp_path: Path, mark: Path, faults: Faults) -> None:
    for number, content in enumerate(every_pickle(mark).values()):
        for suffix in (".npz", ".npy", ".safetensors"):
            path = tmp_path / f"{number}{suffix}"
            path.write_bytes(content)
            faults.attempt("a pickle in place of arrays")
            with pytest.raises(LargeMarginError):
                load_data(DataConfig("arrays", str(path)))
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "objects.npz", images=objects, labels=objects)
    with pytest.raises(LargeMarginError, match="images holds Python objects"):
        load_data(DataConfig("arrays", str(tmp_path / "objects.npz")))
    with pytest.raises(LargeMarginError):
        load_data(DataConfig("arrays", str(slippery_npz(tmp_path / "slippery.npz", mark))))
    assert not (tmp_path.parent / "ran.npy").exists()


POSTSCRIPT = (
    "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({mark}) (w) file closefile\nshowpage\n"
)


def test_images_are_no_programs(
    tmp_path: Path, mark: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    from PIL import EpsImagePlugin

    def started(*args: Any, **options: Any) -> None:
        raise AssertionError("an image has started a program")

    monkeypatch.setattr(EpsImagePlugin.subprocess, "check_call", started)
    monkeypatch.setattr(EpsImagePlugin, "has_ghostscript", lambda: True)
    class_folders(tmp_path / "photos", ("cat", "dog"), 2)
    path = tmp_path / "photos" / "cat" / "planted.png"
    path.write_text(POSTSCRIPT.format(mark=mark))
    faults.attempt("an image that is a program", 3)
    with pytest.raises(LargeMarginError, match=r"planted\.png .its content is none of JPEG"):
        load_data(DataConfig("folder", str(tmp_path / "photos")))
    model = build_model(ModelConfig("mlp"), 2, size=(8, 8))
    (row,) = predict(model, [path], size=(8, 8))
    assert "its content is none of JPEG" in str(row.error)
    with pytest.raises(UnreadableImage):
        read_rgb(path.read_bytes())


@pytest.mark.parametrize("kind", ["ICO", "PCX", "SGI", "DDS", "ICNS", "MSP"])
def test_only_formats_on_the_list_are_opened(tmp_path: Path, faults: Faults, kind: str) -> None:
    """The list is of what is read, not of what is known to be dangerous."""
    path = tmp_path / "image.png"
    Image.new("1" if kind == "MSP" else "RGB", (16, 16)).save(path, format=kind)
    with Image.open(path) as image:
        image.load()  # Pillow itself reads it
    faults.attempt("an image of a format that is not read")
    with pytest.raises(UnreadableImage, match="its content is none of JPEG"):
        read_rgb(str(path))


def test_cifar_that_is_not_the_published_one(
    tmp_path: Path, mark: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR's own files are pickles: only those with the published checksums are opened."""
    utils = pytest.importorskip("torchvision.datasets.utils", reason="torchvision is missing")

    def fetched(*args: Any, **options: Any) -> None:
        raise AssertionError("nobody asked for a download")

    monkeypatch.setattr(utils.urllib.request, "urlopen", fetched)
    for name, inner in (("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")):
        folder = tmp_path / name
        (folder / inner).mkdir(parents=True)
        for each in ("batches.meta", "meta", "train", "test", "test_batch", "data_batch_1"):
            (folder / inner / each).write_bytes(pickled(mark))
        faults.attempt("pickles in place of CIFAR")
        with pytest.raises(LargeMarginError, match="is not there, or not whole"):
            load_data(DataConfig(name, str(folder)))
    archive = slippery_tar(tmp_path / "cifar-10-python.tar.gz")
    before = archive.read_bytes()
    faults.attempt("an archive that writes outside its folder")
    with pytest.raises(LargeMarginError, match="is not the published archive"):
        load_data(DataConfig("cifar10", str(tmp_path)))
    assert archive.read_bytes() == before
    assert not (tmp_path.parent / "ran").exists()
    assert not Path("/tmp/largemargin-ran").exists()


def test_a_small_file_that_unpacks_to_a_large_one(tmp_path: Path, faults: Faults) -> None:
    """What an idx file says of its size is read before the rest of it."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for name in names:
        axes = int(name[-1])
        head = bytes((0, 0, 8, axes)) + (2**31).to_bytes(4) * axes
        with gzip.open(tmp_path / f"{name}-ubyte.gz", "wb", compresslevel=1) as file:
            file.write(head + bytes(1000))
    faults.attempt("a file that says it is very large")
    with pytest.raises(LargeMarginError, match="is no idx file"):
        load_data(DataConfig("mnist", str(tmp_path)))


def test_a_data_set_with_a_program_in_it(tmp_path: Path, mark: Path, faults: Faults) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "strange.py").write_text(f"open({str(mark)!r}, 'w')")
    faults.attempt("a data set that is a program")
    with pytest.raises(LargeMarginError, match=r"a program that loads the data\. It is not run"):
        load_data(DataConfig("huggingface", str(folder)))


FORBIDDEN = {
    *("pickle.load", "pickle.loads", "marshal.load", "shelve.open", "joblib.load"),
    *("yaml.load", "yaml.unsafe_load", "eval", "exec", "os.system", "os.popen", "torch.hub.load"),
    *("tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive", "extract_archive"),
}
"""Calls that could run, or unpack anywhere, what a file says."""
ENDS = "|".join(re.escape(name.rpartition(".")[2]) + r"\(" for name in sorted(FORBIDDEN))
SUSPECT = re.compile(rf"\b(load|get_state_dict|load_state_dict_from_url|shell)\b|pickle|{ENDS}")


def test_the_source_reads_nothing_that_could_run(faults: Faults) -> None:
    for path in SOURCES:
        faults.attempt("a source file searched for calls that could run what a file says")
        text = path.read_text(encoding="utf-8")
        if not SUSPECT.search(text):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call):
                check_call(call, f"{path.name}:{call.lineno}")


def check_call(call: ast.Call, where: str) -> None:
    name = ast.unparse(call.func)
    options = {each.arg: ast.unparse(each.value) for each in call.keywords}
    assert name not in FORBIDDEN, f"{where} {name}"
    if name.endswith(("torch.load", ".get_state_dict", "load_state_dict_from_url")):
        assert options.get("weights_only") == "True", f"{where} {name}"
    if name == "np.load":
        assert options.get("allow_pickle") == "False", where
    assert options.get("shell", "False") == "False", where


@pytest.mark.parametrize(
    "text", ["torch.load(f)", "np.load(f)", "eval(x)", "subprocess.run(x, shell=True)"]
)
def test_the_search_finds_such_calls(text: str) -> None:
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    with pytest.raises(AssertionError):
        check_call(call, "here")

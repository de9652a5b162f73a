"""Without its optional packages the library says which to install; the core needs torch alone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from cli.command import environment
from faults.counting import Faults

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    *("PIL", "torchvision", "sklearn", "scipy", "accelerate", "jsonargparse", "yaml"),
    *("safetensors", "tqdm", "optuna", "jinja2", "matplotlib", "plotly", "datasets"),
    *("torchmetrics", "lightning", "pytorch_lightning", "transformers", "timm", "skorch", "numpy"),
    *("onnx", "onnxscript", "onnxruntime", "pytorch_metric_learning", "threadpoolctl"),
)
CHILD = """
import importlib.machinery, json, sys, warnings
warnings.simplefilter("ignore")  # torch tells that there is no NumPy
hidden = set(json.loads(sys.argv[1]))

class Path(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            return None
        return super().find_spec(name, path, target)

at = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[at] = Path
said = {}
for label, code in json.load(sys.stdin).items():
    try:
        exec(code, {})
        said[label] = "it worked"
    except (ImportError, ValueError) as error:
        said[label] = str(error)
print("SAID " + json.dumps(said))
"""

MODEL = """
import tempfile, torch, largemargin as lm
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
images, labels = torch.randn(12, 4), torch.arange(12) % 3
place = tempfile.mkdtemp()
"""
DATA = "from largemargin.data import DataConfig, load_data\n"
NETWORK = "from largemargin.models import ModelConfig, build_model\n"
FOLDER = """
import os, tempfile
folder = tempfile.mkdtemp()
for name in "ab":
    os.mkdir(f"{folder}/{name}")
    open(f"{folder}/{name}/x.png", "w").close()
"""
EXTRAS = {
    "export.save": ("export", MODEL + "lm.export.save(place + '/a', model)"),
    "export.to_onnx": ("export", MODEL + "lm.export.to_onnx(model, images[:2], place + '/a.onnx')"),
    "LargeMarginClassifier": ("sklearn", "import largemargin\nlargemargin.LargeMarginClassifier"),
    "skorch": ("skorch", "import largemargin.integrations.skorch"),
    "lightning": ("lightning", "import largemargin.integrations.lightning"),
    "transformers": ("transformers", "import largemargin.integrations.hugging_face"),
    "timm": ("timm", "import largemargin.integrations.timm"),
    "torchmetrics": ("torchmetrics", "import largemargin.integrations.torchmetrics"),
    "digits": ("train", DATA + "load_data(DataConfig())"),
    "cifar10": ("train", DATA + "load_data(DataConfig('cifar10'))"),
    "images": ("train", FOLDER + DATA + "load_data(DataConfig('folder', folder))"),
    "huggingface": ("huggingface", DATA + "load_data(DataConfig('huggingface', 'x'))"),
    "npz": (
        "train",
        FOLDER + DATA + "open(folder + '/a.npz', 'w').close()\n"
        "load_data(DataConfig('arrays', folder + '/a.npz'))",
    ),
    "augmentation": ("train", "from largemargin.data.augment import transforms\ntransforms()"),
    "torchvision/": ("train", NETWORK + "build_model(ModelConfig('torchvision/resnet18'), 3)"),
    "timm/": ("timm", NETWORK + "build_model(ModelConfig('timm/resnet18'), 3)"),
    "settings": (
        "train",
        "from largemargin.training import RunConfig, write_config\n"
        "write_config(RunConfig(), 'not written.yaml')",
    ),
    "trackers": (
        "train",
        "from largemargin.training import RunConfig\n"
        "from largemargin.training.processes import Processes\n"
        "Processes(RunConfig(trackers=('tensorboard',)))",
    ),
    "tune": (
        "tune",
        "from largemargin.training import RunConfig\n"
        "from largemargin.training.tuning import tune\n"
        "tune(RunConfig(), folder='not made', trials=1)",
    ),
    "significance": (
        "train",
        "from largemargin.training.significance import paired_test\n"
        "paired_test([0.1, 0.2, 0.3], [0.1, 0.1, 0.2])",
    ),
    "t-SNE": ("sklearn", MODEL + "lm.embed(model, [(images, labels)])"),
    "command": ("train", "from largemargin.cli import main\nassert main(['train']) == 2"),
}
CORE = (
    MODEL
    + """
criterion = lm.attach(model, lm.CosFace())
criterion(model(images), labels).backward()
geometry = lm.measure(model, [(images, labels)], progress=False)
geometry.save(place + "/geometry.json")
assert lm.Geometry.load(place + "/geometry.json") == geometry
"""
)


def said_by(snippets: dict[str, str], hidden: tuple[str, ...], python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", CHILD, json.dumps(hidden)],
        input=json.dumps(snippets),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert "SAID " in done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout.partition("SAID ")[2])
    return {**found, "stderr": done.stderr}


def test_what_is_missing_is_named_with_its_extra(faults: Faults) -> None:
    snippets = {label: code for label, (_, code) in EXTRAS.items()}
    found = said_by({**snippets, "core": CORE}, OPTIONAL, sys.executable)
    assert found["core"] == "it worked"
    for label, (extra, _) in EXTRAS.items():
        faults.attempt("an optional package that is missing")
        text = found["stderr"] if label == "command" else found[label]
        assert f"pip install 'largemargin[{extra}]'" in text, f"{label}: {text}"


@pytest.mark.slow
def test_the_core_from_a_built_wheel_with_its_one_dependency(
    tmp_path: Path, faults: Faults
) -> None:
    """Built as it would be published, installed alone beside this interpreter's torch."""
    pytest.importorskip("setuptools", reason="wheels are built by setuptools")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*build, "-w", str(tmp_path), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("largemargin-*.whl")
    venv.create(tmp_path / "fresh", with_pip=True)
    python = str(tmp_path / "fresh" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    assert subprocess.run(install).returncode == 0
    inside = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    # Packages of this interpreter come after the wheel, and all but torch's own are hidden.
    (inside / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH",)}
    check = "import largemargin; assert 'fresh' in largemargin.__file__, largemargin.__file__\n"
    done = subprocess.run(
        [python, "-c", CHILD, json.dumps(OPTIONAL)],
        input=json.dumps({"core": check + CORE}),
        env={**variables, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "SAID " in done.stdout, done.stderr
    assert json.loads(done.stdout.partition("SAID ")[2]) == {"core": "it worked"}
    faults.attempt("the core from a wheel, with torch alone")

"""Every script of docs/how-to runs and learns, and the page that shows them is current."""

import ast
import importlib.util
import math
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from largemargin.errors import LargeMarginError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "how-to"
SCRIPTS = sorted(FOLDER.glob("*.py"))

SLOW = {"omniglot_embeddings"}
# What a script's main() calls its scores, where that is not "accuracy".
SCORES = {"scikit_learn": ("digits", "images", "wine")}
# Scripts that show a training loop also show the named terms of the loss.
LOOPS = {
    "plain_loop",
    "accelerate_loop",
    "lightning_module",
    "hugging_face_trainer",
    "timm_task",
}

OPTIONAL = {
    "accelerate",
    "lightning",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pytorch_metric_learning",
    "safetensors",
    "sklearn",
    "skorch",
    "timm",
    "torchmetrics",
    "torchvision",
    "tqdm",
    "transformers",
}

pytestmark = [
    # Lightning, inside itself, on new releases of torch; and its advice about loaders.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # The Hugging Face Trainer pins memory by default, also where there is no accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]


def load(path: Path) -> ModuleType:
    """Import a file under a name no package has."""
    spec = importlib.util.spec_from_file_location(f"how_to_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def missing(error: ImportError) -> str | None:
    """The optional package an import failed for; None: something else is wrong."""
    cause: BaseException | None = error
    while cause is not None:
        name = (getattr(cause, "name", None) or "").split(".")[0]
        if name in OPTIONAL:
            return name
        cause = cause.__cause__
    return None


@pytest.fixture(autouse=True)
def fresh_accelerate_state() -> None:
    """Accelerate keeps its settings for the whole process; each script starts without them."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_a_script_trains(path: Path) -> None:
    try:
        result = load(path).main()
    except ImportError as error:
        package = missing(error)
        if package is None:
            raise
        pytest.skip(f"{path.name} needs {package}, which is not installed")
    assert isinstance(result, dict), "main() returns a dict of what it found"
    for name in SCORES.get(path.stem, ("accuracy",)):
        assert result[name] > 0.6, name  # chance is 0.1, for wine 0.4
    if path.stem in LOOPS:
        assert result["terms"]
    for name, value in {**result, **result.get("terms", {})}.items():
        assert value is not False, name
        assert not isinstance(value, float) or math.isfinite(value), name
        assert "difference" not in name or value < 1e-4, name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_does_not_hide_a_package(path: Path) -> None:
    """Run as ``python docs/how-to/x.py`` the folder is on the path: ``import x`` is the script."""
    installed = [each for each in sys.path if Path(each).name == "site-packages"]
    assert installed
    assert PathFinder.find_spec(path.stem, installed) is None
    assert path.stem not in sys.stdlib_module_names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_has_a_heading_and_runs_as_a_program(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source))
    assert text
    title, _, rest = text.partition("\n")
    assert title.strip()
    assert rest.startswith("\n"), "a heading, an empty line, then what to know"
    assert '__name__ == "__main__"' in source


def test_the_page_is_made_from_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    maker = load(ROOT / "docs" / "make_how_to.py")
    made = maker.page()
    assert made == maker.PAGE.read_text(encoding="utf-8"), "run python docs/make_how_to.py"
    for path in SCRIPTS:
        assert path.read_text(encoding="utf-8").rstrip("\n") in made


@pytest.mark.parametrize(
    ("adapter", "package", "extra"),
    [
        ("lightning", "lightning.pytorch", "lightning"),
        ("hugging_face", "transformers", "transformers"),
        ("timm", "timm.task", "timm"),
        ("torchmetrics", "torchmetrics", "torchmetrics"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    adapter: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"largemargin.integrations.{adapter}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'largemargin\[{extra}\]'"):
        importlib.import_module(f"largemargin.integrations.{adapter}")


def test_a_prefix_that_is_no_text_is_refused() -> None:
    pytest.importorskip("lightning")
    from largemargin.integrations.lightning import MarginSchedule

    with pytest.raises(LargeMarginError, match="log must be a prefix"):
        MarginSchedule(log=True)  # type: ignore[arg-type]

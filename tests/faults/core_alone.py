"""The library as it is published, alone with torch: ``python tests/faults/core_alone.py``.

For an interpreter that has the built wheel and torch, and needs nothing else, pytest neither:

    python3.11 -m venv old && old/bin/pip install 'torch==2.9.*' largemargin-*.whl
    old/bin/python tests/faults/core_alone.py

Prints a line per part, and what failed; exit status 0 if nothing did. ``--hide`` takes names of
packages to do without where they are installed. test_wheel.py runs it.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.machinery
import io
import pkgutil
import platform
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve()
TESTS, ROOT = HERE.parents[1], HERE.parents[2]
TORCH_ONLY = ("errors", "functional", "shapes", "tracing", "version")
TORCH_ONLY_ROOMS = ("ops", "heads", "losses", "dropin", "geometry", "measuring")
OTHER_ROOMS = (
    *("integrations", "export", "app", "app.config", "app.predict"),
    *(f"app.{room}" for room in ("data", "models", "training", "report", "cli")),
)
KERNELS = ("forward", "backward", "rival_boundaries", "triton_kernels")
"""Files that import Triton, which is not on every system."""
CLASSES, DIM = 3, 8
COMPILED = ("cross_entropy", "cosface", "arcface", "sphereface", "discriminative", "compactness")


class Hidden(importlib.machinery.PathFinder):
    """Finds modules as ever, but for some."""

    names: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in cls.names:
            return None
        return super().find_spec(fullname, path, target)


def hide(names: Sequence[str]) -> None:
    Hidden.names = frozenset(names)
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hidden


def check_imports() -> str:
    """Every module of the rooms that promise to need torch alone, and every other room."""
    found = [f"largemargin.{name}" for name in (*TORCH_ONLY, *OTHER_ROOMS)]
    for name in TORCH_ONLY_ROOMS:
        room: ModuleType = importlib.import_module(f"largemargin.{name}")
        found += [each.name for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
    for module in found:
        if module.rpartition(".")[2] not in KERNELS:
            importlib.import_module(module)
    import largemargin as lm

    later = {"LargeMarginClassifier"}  # needs scikit-learn
    for name in set(lm.__all__) - later:
        getattr(lm, name)
    return f"{len(found)} modules, {len(lm.__all__)} names"


def check_losses() -> str:
    """Each loss on a network: finite gradients, and the same value after its state was saved."""
    import torch

    import largemargin as lm

    draw = torch.Generator().manual_seed(0)
    images = torch.randn(12, 4, generator=draw)
    labels = torch.arange(12) % CLASSES
    for name in lm.LOSSES:
        model = network()
        criterion = attached(model, name)
        lossy(criterion, model, images, labels, name).backward()
        for label, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name}: no gradient for {label}"
            assert parameter.grad.isfinite().all(), f"{name}: {label}"
        again = network()
        other = attached(again, name)
        for old, new in ((model, again), (criterion, other)):
            new.load_state_dict(through_a_file(old.state_dict()))
        one, two = (
            lossy(*pair, images, labels, name) for pair in ((criterion, model), (other, again))
        )
        assert torch.equal(one, two), f"{name}: {one} before it was saved, {two} after"
    return f"{len(lm.LOSSES)} losses"


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, DIM), nn.ReLU(), nn.Linear(DIM, CLASSES))


def attached(model: Any, name: str) -> Any:
    import largemargin as lm
    from largemargin.app.training import ObjectiveConfig
    from largemargin.app.training.objective import objective_of

    layers = ["1"] if name == "layer_margin" else []
    built = objective_of(ObjectiveConfig(name), [4] * CLASSES)
    return lm.attach(model, built, layers=layers)


def lossy(criterion: Any, model: Any, images: Any, labels: Any, name: str) -> Any:
    import torch

    import largemargin as lm

    needs = lm.LOSSES[name].needs
    given = images.clone().requires_grad_("inputs" in needs)
    noisy = {"noisy": model(images + 0.01)} if "noisy" in needs else {}
    torch.manual_seed(0)  # for margins that are drawn
    return criterion(model(given), labels, **noisy)


def through_a_file(state: Any) -> Any:
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_compiling() -> str:
    """Model and loss become one graph with the eager value; needs no C++ compiler."""
    import torch

    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(12, 4, generator=draw), torch.arange(12) % CLASSES
    # dynamo's own: it looks at .grad, and instantiates functions.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    warnings.filterwarnings("ignore", ".*should not be instantiated")
    for name in COMPILED:
        values = []
        for backend in (None, "eager"):
            torch.manual_seed(0)
            model = network()
            criterion = attached(model, name)

            def step(model: Any = model, criterion: Any = criterion) -> Any:
                return criterion(model(images), labels)

            run = torch.compile(step, backend=backend, fullgraph=True) if backend else step
            try:
                values.append(run())
            except RuntimeError as error:
                if "not supported on Python" not in str(error):
                    raise
                return "torch itself does not compile on this Python"
        torch.testing.assert_close(*values)
        torch.compiler.reset()
    return f"{len(COMPILED)} losses in one graph each"


def check_golden_vectors() -> str:
    """Values and gradients of every item, in float64 and float32."""
    sys.path.insert(0, str(TESTS))
    import conformance

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = conformance.main([str(TESTS / "golden")])
    assert status == 0, said.getvalue()
    return said.getvalue().strip().splitlines()[-1]


def check_training_and_measuring() -> str:
    """Heads, a bank of centroids and an optimizer of heads learn; the geometry is measured."""
    import torch

    import largemargin as lm

    labels = torch.arange(60) % CLASSES
    features = torch.eye(CLASSES, DIM)[labels] + 0.1 * torch.randn(60, DIM)
    head = lm.ClassHead(DIM, CLASSES)
    loss = lm.CosFace(scale=8.0)
    optimizer = importlib.import_module("largemargin.heads.optim").RowwiseAdam(
        head.parameters(), lr=0.05
    )
    bank = lm.CentroidBank(CLASSES, DIM)
    first = None
    for _ in range(20):
        optimizer.zero_grad()
        value = loss(features, head, labels)
        first = float(value.detach()) if first is None else first
        value.backward()
        optimizer.step()
        bank(features, labels)
    assert float(value.detach()) < first, "the head did not learn"
    other = lm.CentroidBank(CLASSES, DIM)
    other.load_state_dict(through_a_file(bank.state_dict()))
    assert bank.seen.all()
    assert torch.equal(other.centroids, bank.centroids)
    geometry = lm.measure(copy.deepcopy(head), [(features, labels)], progress=False)
    path = Path(tempfile.mkdtemp()) / "geometry.json"
    geometry.save(path)
    assert lm.Geometry.load(path) == geometry
    assert geometry.samples == 60
    return f"accuracy {geometry.accuracy:.2f}"


def check_extras() -> str:
    """What needs another package names the extra that brings it."""
    sys.path.insert(0, str(HERE.parent))
    from extras import EXTRAS

    wrong = []
    for label, (extra, code) in EXTRAS.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                exec(code, {})
            text = said.getvalue()
        except (ImportError, ValueError) as error:
            text = str(error)
        if f"pip install 'largemargin[{extra}]'" not in text:
            wrong.append(f"{label}: {text or 'it worked'}")
    assert not wrong, "\n".join(wrong)
    return f"{len(EXTRAS)} messages"


CHECKS: dict[str, Callable[[], str]] = {
    "imports": check_imports,
    "losses": check_losses,
    "compiling": check_compiling,
    "golden vectors": check_golden_vectors,
    "training and measuring": check_training_and_measuring,
    "missing packages": check_extras,
}


@contextlib.contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the installed library with torch alone.")
    parser.add_argument("--hide", nargs="*", default=(), help="packages to do without")
    options = parser.parse_args(arguments)
    hide(options.hide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself
        import torch
    import largemargin as lm

    place = Path(lm.__file__).resolve()
    if place.is_relative_to(ROOT / "src"):
        print(f"core_alone: {place} is the source, not what a wheel brought", file=sys.stderr)
        return 2
    print(f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}")
    failed = 0
    for name, check in CHECKS.items():
        try:
            with warnings_are_errors():
                print(f"{name}: {check()}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc(limit=-5)}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

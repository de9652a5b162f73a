"""The rooms and who may import whom: core (torch alone), with models people have, the product.

    app: cli -> report -> training -> models -> data
    with models: integrations -> export -> measuring
    core: geometry -> dropin -> losses -> heads -> ops -> shapes, errors -> tracing

Each room may import only what stands to its right or below, anywhere in a file, also inside
functions and under ``TYPE_CHECKING``. Inside the library a name is imported from the file that
defines it, so that the graph of imports is the graph of what needs what.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "largemargin"
PACKAGE = "largemargin"

LEVELS = (
    ("__main__",),
    ("app.cli",),
    ("app.report",),
    ("app.training",),
    ("app.predict",),
    ("app.models",),
    ("app.data",),
    ("app.config",),
    ("integrations",),
    ("export",),
    ("measuring",),
    ("geometry",),
    ("dropin",),
    ("losses",),
    ("heads",),
    ("ops",),
    ("shapes", "errors", "version"),
    ("exceptions", "tracing", "evaluation_config"),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# The public face re-exports every room; nothing below it may look back at it.
FACES = ("__init__", "functional", "app")
USES_FUNCTIONAL = ("app.cli",)
TORCH_ONLY = ("geometry", "dropin", "losses", "heads", "ops", *LEVELS[-2], *LEVELS[-1])
# Triton comes with torch where there is a GPU. Only these import it, and nothing imports them
# before a kernel is launched.
KERNELS = (
    "largemargin.ops.triton.rival_boundaries",
    "largemargin.ops.triton.rows",
    "largemargin.ops.triton.centroids",
    "largemargin.ops.triton.backward",
    "largemargin.ops.triton.forward",
    "largemargin.ops.triton.chunks",
    "largemargin.heads.optim.triton_kernels",
)
DRAWERS = {"util", "utils", "common", "helper", "helpers", "misc"}


def test_the_design_names_the_rooms_in_this_order() -> None:
    named = [room.removeprefix("app.") for (room,) in LEVELS[1:-2]]
    rooms = [room for room in named if room not in ("config", "predict")]
    design = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    assert f"`{' -> '.join(rooms)} -> shapes, errors -> tracing`" in design


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """``ops/similarity.py`` -> ``largemargin.ops.similarity``; a package is named by its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every imported name of a module, absolute, with its line; relative imports are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str:
    """The room a dotted name of the package lies in; the package itself is ``__init__``."""
    parts = name.split(".")[1:]
    for room in (".".join(parts[:2]), *parts[:1]):
        if room in LEVEL or room in FACES:
            return room
    return "__init__"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    room = room_of(module)
    found = []
    for line, name in imports(ast.parse(source), module, is_package):
        top = name.split(".")[0]
        if top == PACKAGE:
            target = room_of(name)
            if room in FACES or target == room:
                continue
            if target in FACES:
                allowed = target == "functional" and room in USES_FUNCTIONAL
            else:
                allowed = LEVEL[room] < LEVEL[target]
            if not allowed:
                found.append(f"{module}:{line} imports {name}: {room} may not import {target}")
        elif top == "triton" and module in KERNELS:
            continue
        elif room in TORCH_ONLY and top != "torch" and top not in sys.stdlib_module_names:
            found.append(f"{module}:{line} imports {name}: the core needs torch alone")
    return found


def by_way_of_a_face(source: str) -> list[str]:
    """Names that are taken from a package's face instead of the file that defines them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            place = SOURCE.joinpath(*(node.module or "").split(".")[1:])
            if place.is_dir():
                names = [alias.name for alias in node.names]
                files = {path.stem for path in place.iterdir()} if node.module != PACKAGE else set()
                found += [f"{node.module}.{name}" for name in names if name not in files]
    return [name for name in found if name not in DEFINED_IN_FACES]


DEFINED_IN_FACES = {
    "largemargin.losses.LOSSES",
    "largemargin.app.data.sources.SOURCES",
    "largemargin.app.report.sections.all_sections",
}


@pytest.mark.parametrize("path", python_files("src"), ids=lambda path: module_name(path))
def test_imports_only_what_stands_to_its_right(path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert violations(path.read_text(), module_name(path), is_package) == []


@pytest.mark.parametrize("path", python_files("src"), ids=lambda path: module_name(path))
def test_names_are_imported_from_the_file_that_defines_them(path: Path) -> None:
    if path.name != "__init__.py" and path.name != "functional.py":
        assert by_way_of_a_face(path.read_text()) == []


def test_every_room_has_a_place_in_the_plan() -> None:
    files = [path.relative_to(SOURCE).with_suffix("") for path in python_files("src")]
    rooms = {
        ".".join(file.parts[:2] if file.parts[0] == "app" else file.parts[:1]) for file in files
    }
    assert rooms - {"app.__init__"} <= LEVEL.keys() | set(FACES)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("largemargin.ops.similarity", "from largemargin.losses import loss"),
        ("largemargin.ops.similarity", "from ..losses import loss"),
        ("largemargin.ops.similarity", "from .. import losses"),
        ("largemargin.ops.similarity", "import largemargin.losses.base.loss"),
        ("largemargin.ops.similarity", "def f():\n    from largemargin.losses import loss"),
        ("largemargin.ops.similarity", "import largemargin"),
        ("largemargin.ops.similarity", "from largemargin import ClassHead"),
        ("largemargin.ops.similarity", "import numpy"),
        ("largemargin.ops.similarity", "import triton"),
        ("largemargin.losses.cosface", "def f():\n    import scipy.special"),
        ("largemargin.dropin.attach", "from largemargin.geometry import margins"),
        ("largemargin.geometry.margins", "from largemargin.measuring.robust import perturbations"),
        ("largemargin.measuring.batches", "from largemargin.app.data.samples import Samples"),
        ("largemargin.measuring.measure", "from largemargin.export.saved_model import save"),
        ("largemargin.errors", "from .shapes import Features"),
        ("largemargin.app.training.engine", "from largemargin.app.cli import main"),
        ("largemargin.app.training.engine", "import largemargin as lm"),
        ("largemargin.app.data.load", "from largemargin.app.models import build"),
    ],
)
def test_the_rule_sees_a_wrong_import(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "is_package", "source"),
    [
        ("largemargin.losses.cosface", False, "from ..ops import class_stats"),
        ("largemargin.losses.cosface", False, "from .base.loss import Loss"),
        ("largemargin.losses", True, "from .ldam import LDAM\nfrom ..errors import check_choice"),
        ("largemargin.losses.cosface", False, "import math\nimport torch.nn.functional as F"),
        ("largemargin.ops.triton.forward", False, "import triton.language as tl"),
        (
            "largemargin.app.training.demo",
            False,
            "from largemargin.losses import LOSSES\nimport sklearn",
        ),
        ("largemargin", True, "from .app.training import engine\nfrom .losses import CosFace"),
    ],
)
def test_the_rule_accepts_a_right_import(module: str, is_package: bool, source: str) -> None:
    assert violations(source, module, is_package) == []


def test_oracles_are_independent() -> None:
    for path in python_files("tests/oracles"):
        tops = {name.split(".")[0] for _, name in imports(ast.parse(path.read_text()), "", False)}
        assert tops.isdisjoint({"torch", PACKAGE}), path.name


def test_a_name_taken_from_a_face_is_seen() -> None:
    assert by_way_of_a_face("from largemargin.ops import normalize") != []
    assert by_way_of_a_face("from largemargin.ops.class_stats import class_stats") == []


def test_no_drawer_for_odds_and_ends() -> None:
    parts = {part for path in python_files("src", "tests") for part in path.relative_to(ROOT).parts}
    assert {part.removesuffix(".py").strip("_") for part in parts}.isdisjoint(DRAWERS)


def test_importing_the_package_brings_nothing_but_torch() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import largemargin; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    new = done.stdout.split()
    others = {name.split(".")[0] for name in new} - sys.stdlib_module_names - {PACKAGE, "torch"}
    assert others == set()
    # Loading the compiler costs seconds, so nothing may do it on import.
    slow = ("torch._dynamo", "torch._inductor", "torch.onnx")
    assert [name for name in new if name.startswith(slow)] == []

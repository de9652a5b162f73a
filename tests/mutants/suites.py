"""Which files are mutated, and which tests are run for each, the quickest and sharpest first.

The Triton kernels (`ops/triton`, `heads/optim/triton_*`) are left out: they run on a GPU, or for
minutes in Triton's interpreter.
"""

import ast
from functools import cache
from pathlib import Path

ROOMS = ("losses", "losses/base", "ops", "heads")
BEYOND = (
    *("heads/optim", "dropin", "geometry", "measuring", "measuring/robust", "export"),
    "integrations",
    *("app", "app/data", "app/data/sources", "app/models", "app/training"),
)
"""Rooms beyond the losses, all but reports and the command line, which say more than they compute.
Copies are tried with the tests that speak of what the file defines."""
TESTS = Path(__file__).resolve().parents[1]
LOSSES = {
    "adacos": "adacos",
    "adaface": "adaface",
    "arcface": "arcface",
    "center": "center",
    "centroid_margin": "centroid_margin or centroid_norm",
    "compactness": "compactness or noise_alignment",
    "cosface": "cosface",
    "cross_entropy": "cross_entropy",
    "curricularface": "curricularface",
    "discriminative": "discriminative",
    "elasticface": "elasticface or plus",
    "gaussian_mixture": "gaussian_mixture",
    "gm_softmax": "gm_softmax",
    "hinges": "hinge or softplus",
    "input_margin": "margin_distribution or margin_hinge or linearized",
    "kobayashi": "kobayashi or biased_softmax or rival_divergence",
    "magface": "magface",
    "prototype_penalties": "zero_centroid or super_symmetry",
    "sphereface": "sphereface or lsoftmax",
    "stability": "stability",
    "focal": "focal",
    "label_smoothing": "label_smoothing",
    "layer_margin": "layer_margin",
    "ldam": "ldam",
    "lm_softmax": "lm_softmax",
    "logit_adjustment": "logit_adjust or vs_loss or prior",
    "logit_norm": "logit_norm",
    "noisy_labels": "generalized_cross or symmetric_cross",
    "normface": "normface",
    "sample_margin": "sample_margin",
    "unified_margin": "unified_margin",
}
"""Files of losses, and what the names of their tests hold."""

SHARED = {
    "ops/dense.py": "class_stats or kobayashi or biased or rival_div or max_hinge or cosface",
    "ops/class_stats.py": "class_stats or kobayashi or max_hinge or cosface",
    "ops/norms.py": "normface or cosface or compactness",
    "heads/centroid_bank.py": "sequence or compactness or centroid_norm or robust_discriminative",
}
"""For files that many losses stand on: those that show the most of them."""

ORACLE = "tests/contract/test_oracle.py"
GRADIENTS = "tests/contract/test_gradients.py"
GOLDEN = "tests/test_conformance.py::test_every_golden_case_passes"
EXAMPLES = "tests/test_docstrings.py"
WARM = (
    *("tests/contract", "tests/mutants", "tests/ops/test_norms.py"),
    *("tests/properties", GOLDEN, EXAMPLES),
    *(f"tests/dropin/test_{name}.py" for name in ("accumulate", "scale", "schedules")),
    "tests/dropin/test_schedules_in_training.py",
    *(f"tests/heads/test_{n}.py" for n in ("centroid_bank", "simplex", "class_head", "packing")),
    *(f"tests/heads/test_{n}.py" for n in ("memory_estimate", "sharded")),
)
"""Tests of the losses' mutants in forks: quick ones that neither compile nor start processes."""
WARM_BEYOND = (
    *(f"tests/{room}" for room in ("dropin", "geometry", "measuring", "export", "integrations")),
    *(f"tests/{room}" for room in ("heads/optim", "app/data", "app/models", "app/training")),
    *("tests/app/cli", "tests/properties/test_items_measures.py", GOLDEN, EXAMPLES),
    "tests/contract/test_margin_distribution.py",
    *(f"tests/faults/test_{name}.py" for name in ("configs", "diverged", "edited_runs", "paused")),
    *(f"tests/faults/test_{name}.py" for name in ("launchers", "not_finite", "values", "versions")),
)
"""Tests of mutants beyond the losses in forks."""
ALSO = {
    **{
        f"losses/{name}.py": ("tests/contract/test_running_statistics.py",)
        for name in ("adacos", "adaface", "curricularface", "elasticface", "magface")
    },
    "losses/discriminative.py": ("tests/app/training/test_stable_discriminative.py",),
    "losses/base/running_statistics.py": ("tests/contract/test_running_statistics.py",),
    "losses/base/scale.py": ("tests/dropin/test_scale.py",),
    "losses/base/schedules.py": ("tests/dropin/test_schedules.py",),
    "ops/eager_gradients.py": ("tests/ops/test_eager_gradients.py",),
    "ops/sharded.py": (
        "tests/heads/test_sharded.py",
        "tests/heads/test_sharded_ranks.py",
    ),
    "ops/shards.py": ("tests/heads/test_sharded.py",),
    "ops/norms.py": ("tests/ops/test_norms.py", "tests/ops/test_eager_gradients.py"),
    "ops/matmul.py": ("tests/ops/test_matmul.py",),
    "ops/boundary.py": (
        "tests/properties/test_items_centroids.py",
        "tests/mutants/test_centroid_margins.py",
    ),
    "heads/centroid_bank.py": ("tests/heads/test_centroid_bank.py",),
    "heads/simplex.py": ("tests/heads/test_simplex.py",),
    "heads/head_spec.py": ("tests/heads/test_class_head.py",),
    "heads/class_head.py": ("tests/heads/test_class_head.py",),
    "heads/packing.py": ("tests/heads/test_packing.py",),
    "heads/memory_estimate.py": ("tests/heads/test_memory_estimate.py",),
    "heads/sharded_class_head.py": (
        "tests/heads/test_sharded.py",
        "tests/heads/test_sharded_ranks.py",
    ),
    "heads/sub_center_head.py": ("tests/heads/test_sub_center_head.py",),
    "heads/topk.py": ("tests/heads/test_class_head.py", "tests/heads/test_sharded.py"),
}
"""Tests that belong to one file and are not found by the name of a loss."""


def files(package: Path) -> list[str]:
    """The files that are mutated, as paths inside the package."""
    rooms = (*ROOMS, *BEYOND)
    found = [path for room in rooms for path in sorted((package / room).glob("*.py"))]
    names = [path.relative_to(package).as_posix() for path in found]
    return [name for name in names if not Path(name).name.startswith(("__init__", "triton_"))]


def stages(file: str) -> list[list[str]]:
    """Arguments of pytest, one list after the other until something fails."""
    if is_beyond(file):
        return _speaking_of(file)
    also = [*ALSO.get(file, ())]
    added = ["tests/mutants/test_constants.py", "tests/mutants/test_killers.py"]
    name = LOSSES.get(Path(file).stem) if file.startswith("losses/") else None
    if name is not None:
        named = ["-k", f"{name} or other_pure or sequence"]
        return [
            [*added, *also],
            [ORACLE, GRADIENTS, *named],
            ["tests/contract", EXAMPLES, *named],
            [GOLDEN],
        ]
    some = SHARED.get(file, "cosface or kobayashi or max_hinge or discriminative or sphereface")
    edges = [f"tests/contract/test_{part}.py" for part in ("edges", "precision", "bad_settings")]
    return [
        [*added, *also],
        [ORACLE, "-k", some],
        [GRADIENTS, "-k", f"test_gradient and ({some})"],
        [GOLDEN],
        [ORACLE, *edges, EXAMPLES, "-k", f"test_oracle or {some} or {Path(file).stem}"],
    ]


def is_beyond(file: str) -> bool:
    return Path(file).parent.as_posix() in BEYOND


def _speaking_of(file: str) -> list[list[str]]:
    """Tests of the room, those first that import the file, then those that name most of it."""
    package = TESTS.parent / "src" / "largemargin"
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = {each.name.lstrip("_") for each in tree.body if isinstance(each, kinds)}
    names.add(Path(file).stem)
    texts, imports = dict(_tests_of(_room_of(file))), f".{Path(file).stem} import"
    counts = {path: sum(text.count(name) for name in names) for path, text in texts.items()}
    ranked = sorted(filter(counts.get, counts), key=lambda p: (imports not in texts[p], -counts[p]))
    several = [path for path in texts if "distributed" in path or "two_processes" in path]
    ranked = [path for path in ranked if path not in several]
    parts = [ranked[:2], several, ranked[2:6], ranked[6:]]
    parts = parts if ranked else [[f"tests/{_room_of(file)}"]]
    return [part for part in parts if part]


def _room_of(file: str) -> str:
    """The folder of tests that mirrors a file's."""
    room = Path(file).parent
    while not (TESTS / room).is_dir():
        room = room.parent
    return room.as_posix()


@cache
def _tests_of(room: str) -> list[tuple[str, str]]:
    found = sorted((TESTS / room).rglob("test_*.py"))
    return [(path.relative_to(TESTS.parent).as_posix(), path.read_text("utf-8")) for path in found]

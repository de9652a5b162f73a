"""The API reference: a page per public module, an entry per public name.

Everything is read from the source text. Only the names of losses are asked of the core, which finds
them by itself. The same list decides what the snapshot of the public API holds
(``make_public_api.py``).
"""

import importlib
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]

PAGES: dict[str, tuple[str, str]] = {
    "largemargin": (
        "largemargin",
        "Losses, heads, `attach`, measuring, training: `import largemargin as lm`.",
    ),
    "functional": (
        "largemargin.functional",
        "`lm.functional`: every pure function of the core, unreduced.",
    ),
    "schedules": (
        "largemargin.losses.base.schedules",
        "`lm.schedules`: hyper-parameters as functions of the training step.",
    ),
    "heads": ("largemargin.heads", "Heads, class centroids, packings of class vectors."),
    "optim": ("largemargin.heads.optim", "Optimizers for heads with many classes."),
    "geometry": (
        "largemargin.geometry",
        "`lm.geometry`: margins, dispersion, curvature and bounds of tensors; pure functions.",
    ),
    "measuring": (
        "largemargin.measuring",
        "`lm.measuring`: whole models. Geometry, accuracy, calibration, retrieval, out of "
        "distribution, prediction.",
    ),
    "robust": (
        "largemargin.measuring.robust",
        "`lm.robust`: perturbations of inputs, and attacks.",
    ),
    "export": ("largemargin.export", "`lm.export`: ONNX, torch.export, saving without pickle."),
    "training": ("largemargin.app.training", "Settings, runs and the training engine."),
    "data": ("largemargin.app.data", "Data sets, modifications of them, batches."),
    "models": ("largemargin.app.models", "Networks by name."),
    "report": ("largemargin.app.report", "One HTML page about runs."),
}
"""Pages by name: the module and one sentence."""

INTEGRATIONS = (
    *("scikit_learn", "skorch", "lightning", "hugging_face"),
    *("timm", "metric_learning", "torchmetrics"),
)

DERIVED = (
    *("largemargin", "largemargin.functional", "largemargin.geometry", "largemargin.measuring"),
    "largemargin.measuring.robust",
)
"""Modules whose ``__all__`` follows from what they import; they need no more than torch."""

PLAIN = (
    griffe.Kind.FUNCTION,
    griffe.Kind.CLASS,
    griffe.Kind.ATTRIBUTE,
    griffe.Kind.TYPE_ALIAS,
)


@cache
def package() -> griffe.Object:
    """The library as its source text says it is."""
    loaded = griffe.load("largemargin", search_paths=[str(ROOT / "src")], resolve_aliases=True)
    assert isinstance(loaded, griffe.Object)
    return loaded


def find(module: str, name: str) -> griffe.Object | griffe.Alias:
    """The object that ``module.name`` is; a function wins over the file it shares its name with."""
    inside = f"{module}.{name}".removeprefix("largemargin.")
    try:
        found = package()[inside]
    except KeyError:  # a name that the module does not write down
        value = getattr(importlib.import_module(module), name)
        found = package()[f"{value.__module__}.{value.__qualname__}".removeprefix("largemargin.")]
    if found.is_module and name in found.members:
        found = found[name]
    return found.final_target if found.is_alias else found


def names(module: str) -> list[str]:
    """Public names of a module, without modules: ``__all__``, or what it defines itself."""
    holder = package() if module == "largemargin" else package()[module.split(".", 1)[1]]
    listed = [str(name) for name in holder.exports or ()]
    if module in DERIVED:
        listed = list(dict.fromkeys([*listed, *importlib.import_module(module).__all__]))
    if not listed:
        listed = [
            name
            for name, member in holder.members.items()
            if not name.startswith("_")
            and not member.is_alias
            and (member.is_class or member.is_function)
        ]
    return sorted(
        (name for name in listed if name != "__version__" and find(module, name).kind in PLAIN),
        key=lambda name: (find(module, name).kind is griffe.Kind.ATTRIBUTE, name.lower()),
    )


@cache
def modules() -> dict[str, tuple[str, ...]]:
    """Public names of every public module."""
    found = {module: tuple(names(module)) for module, _ in PAGES.values()}
    for each in INTEGRATIONS:
        module = f"largemargin.integrations.{each}"
        found[module] = tuple(names(module))
    return found


@cache
def homes() -> dict[str, tuple[str, str]]:
    """By identifier: the module whose page describes the object, and its name there."""
    found: dict[str, tuple[str, str]] = {}
    for module, listed in modules().items():
        for name in listed:
            found.setdefault(find(module, name).path, (module, name))
    return found


@cache
def links() -> dict[str, str]:
    """Identifiers by the last part of their name, for references inside docstrings."""
    found: dict[str, str] = {}
    for path, (_, name) in homes().items():
        found.setdefault(name, path)
    return found


def pages() -> dict[str, str]:
    """Markdown of the reference by path."""
    made = {"api/index.md": _index()}
    for page, (module, sentence) in PAGES.items():
        made[f"api/{page}.md"] = _page(module, sentence, [module])
    integrations = [f"largemargin.integrations.{each}" for each in INTEGRATIONS]
    made["api/integrations.md"] = _page(
        "largemargin.integrations", "Integrations with trainers and libraries.", integrations
    )
    return made


def _index() -> str:
    lines = [
        "# API reference",
        "",
        "The names listed here are public; the [stability policy](../stability.md) says what that "
        "means.",
        "",
        "| module | what it is for | names |",
        "|---|---|---|",
    ]
    for page, (module, sentence) in PAGES.items():
        lines.append(f"| [`{module}`]({page}.md) | {sentence} | {len(modules()[module])} |")
    count = sum(len(modules()[f"largemargin.integrations.{each}"]) for each in INTEGRATIONS)
    lines.append(
        "| [`largemargin.integrations`](integrations.md) | Integrations with trainers and "
        f"libraries. | {count} |"
    )
    return "\n".join(lines) + "\n"


def _page(title: str, sentence: str, described: list[str]) -> str:
    lines = [f"# {title}", "", sentence, ""]
    for module in described:
        if len(described) > 1:
            lines += [f"## `{module}`", ""]
        elsewhere = []
        for name in modules()[module]:
            path = find(module, name).path
            if homes()[path] != (module, name):
                elsewhere.append(f"[`{name}`][{path}]")
                continue
            shown = f"lm.{name}" if module == "largemargin" else name
            level = 3 if len(described) > 1 else 2
            lines += [
                f"::: {path}",
                "    options:",
                f"      heading: {shown}",
                f"      toc_label: {name}",
                f"      heading_level: {level}",
                "",
            ]
        if elsewhere:
            lines[4:4] = ["Described with another module: " + ", ".join(elsewhere) + ".", ""]
    return "\n".join(lines) + "\n"

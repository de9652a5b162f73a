"""Writes docs/how-to/README.md: every script of the folder, verbatim, under its own heading.

Run ``python docs/make_how_to.py``; a test fails when the committed page is out of date. Another
test runs every script.
"""

import ast
import sys
from pathlib import Path

from site_pages import notebooks

FOLDER = Path(__file__).parent / "how-to"
PAGE = FOLDER / "README.md"
FIRST = "plain_loop"

# Which extra brings a package, the most telling first: most scripts use scikit-learn for its data.
EXTRAS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "transformers": "transformers",
    "timm": "timm",
    "skorch": "skorch",
    "torchmetrics": "torchmetrics",
    "onnx": "export",
    "onnxruntime": "export",
    "safetensors": "export",
    "pytorch_metric_learning": "metric-learning",
    "sklearn": "sklearn",
}


def scripts() -> list[Path]:
    return sorted(FOLDER.glob("*.py"), key=lambda path: (path.stem != FIRST, path.stem))


def pages() -> list[tuple[str, Path]]:
    """The folder's pages of prose, each by its title."""
    found = []
    for path in sorted(FOLDER.glob("*.md")):
        if path != PAGE:
            title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            found.append((title, path))
    return found


def heading(path: Path) -> str:
    """The first line of the script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{path.name} needs a docstring: its first line is the heading.")
    return text.splitlines()[0].rstrip(".")


def extra(path: Path) -> str:
    """The extra to install for a script, by what it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    # Exporting imports its packages where it uses them, so the script may name none.
    if any(
        isinstance(n, ast.ImportFrom) and n.module == "largemargin.export" for n in ast.walk(tree)
    ):
        names.add("onnx")
    return next((made for package, made in EXTRAS.items() if package in names), "")


def anchor(text: str) -> str:
    kept = "".join(each for each in text.lower() if each.isalnum() or each in " -_")
    return kept.replace(" ", "-")


def page() -> str:
    lines = [
        "# How to train with it",
        "",
        "Each script is complete, takes seconds, downloads nothing, and is run by the tests. They",
        "train on scikit-learn's digits, so they also need `pip install scikit-learn`; only",
        "`omniglot_embeddings.py` draws its own characters. Nothing is released yet: the install",
        "commands, here and on the other pages, run in a clone of the repository. (This page is",
        "made by `docs/make_how_to.py` from the scripts in this folder; do not edit it by hand.)",
        "",
        "| how to | script | install |",
        "|---|---|---|",
    ]
    for path in scripts():
        made = extra(path)
        install = f"`pip install '.[{made}]'`" if made else "`pip install .`"
        title = heading(path)
        lines.append(f"| [{title}](#{anchor(title)}) | [{path.name}]({path.name}) | {install} |")
    lines += ["", "Notebooks, with their outputs:", ""]
    lines += [
        f"- [{notebooks.title(path)}](../../notebooks/{path.name})"
        for path in notebooks.FILES.values()
    ]
    if pages():
        lines += ["", "Guides:", ""]
        lines += [f"- [{title}]({path.name})" for title, path in pages()]
    for path in scripts():
        code = path.read_text(encoding="utf-8").rstrip("\n")
        lines += ["", f"## {heading(path)}", "", "```python", code, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")

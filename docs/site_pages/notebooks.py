"""Notebooks as pages: text, code and the outputs that are stored in them. Nothing is run."""

import base64
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "notebooks"
FIRST = "margins_in_five_minutes"
FILES = {
    f"notebooks/{path.stem}.md": path
    for path in sorted(FOLDER.glob("*.ipynb"), key=lambda path: (path.stem != FIRST, path.stem))
}
"""By page; in the navigation in this order."""


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


def title(path: Path) -> str:
    return "".join(cells(path)[0]["source"]).splitlines()[0].lstrip("# ")


def pages() -> dict[str, str]:
    return {page: _page(path) for page, path in FILES.items()}


def figures() -> dict[str, bytes]:
    """The PNG files of all pages, by their paths in the site."""
    return {
        f"notebooks/{name}": base64.b64decode(png)
        for path in FILES.values()
        for name, png in _figures(path).items()
    }


def _figures(path: Path) -> dict[str, str]:
    outputs = [each for cell in cells(path) for each in cell.get("outputs", [])]
    found = [each["data"]["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    return {f"{path.stem}-{number}.png": "".join(png) for number, png in enumerate(found)}


def _page(path: Path) -> str:
    names = iter(_figures(path))
    parts = []
    for cell in cells(path):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced("python", source))
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(_fenced("text", "".join(output["text"]).rstrip()))
            elif "image/png" in output["data"]:
                parts.append(f"![What the code above draws]({next(names)})")
    parts.insert(1, f"This page is the notebook `notebooks/{path.name}` with the outputs of a run.")
    return "\n\n".join(parts) + "\n"


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"

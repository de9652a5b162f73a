"""How to cite the library, as BibTeX made from CITATION.cff."""

from pathlib import Path
from typing import Any

from largemargin.app.training.config_file import read_yaml

FILE = Path(__file__).parents[2] / "CITATION.cff"


def bibtex(about: dict[str, Any] | None = None) -> str:
    """Markdown with one entry; fields that the file does not have are left out."""
    about = about or read_yaml(FILE)
    fields = {
        "author": " and ".join(_name(each) for each in about["authors"]),
        "title": f"{{{about['title']}}}",
        "version": about.get("version"),
        "year": str(about["date-released"])[:4] if "date-released" in about else None,
        "url": about.get("repository-code") or about.get("url"),
        "note": f"{about['license']} licence" if "license" in about else None,
    }
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join(["```bibtex", "@software{largemargin,", *lines, "}", "```"])


def _name(author: dict[str, str]) -> str:
    if "name" in author:
        return f"{{{author['name']}}}"
    return f"{author['family-names']}, {author['given-names']}"

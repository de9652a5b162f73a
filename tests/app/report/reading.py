"""A page as a test reads it: elements, texts, tables, the data of the figures."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Every element of a page; texts of scripts and of tables are kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: list[str] = []
        self._script = False
        self._rows: list[list[str]] = []
        self._cell: list[str] | None = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        self._script = tag == "script"
        if tag == "table":
            self._rows = self.tables.setdefault(attributes.get("id", ""), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        self._script = False
        if tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts.append(data)
            return
        self.texts.append(data)
        if self._cell is not None:
            self._cell.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def payload(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0], parse_constant=_refuse)
        return found

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON: the page would not open")

"""What mkdocs asks for while it builds the site: made pages, navigation, equations."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import (
    api,
    benchmarks,
    choosing,
    citing,
    loss_pages,
    mathematics,
    navigation,
    notebooks,
    reproductions,
    root_files,
)

SITUATIONS = "<!-- decision table -->"
RESULT_FILES = "<!-- result files -->"
CAPTION = "<!-- figure numbers -->"
PRESETS = "<!-- presets -->"
CITATION = "<!-- citation -->"
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "index.md": {
        CAPTION: choosing.caption,
        PRESETS: choosing.presets,
        CITATION: citing.bibtex,
    },
    "choosing.md": {SITUATIONS: choosing.table},
    "benchmarks.md": {RESULT_FILES: benchmarks.all_rows},
}
"""What stands in place of a line of a page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation.navigation()
    # Sources that the site is made from, so that `mkdocs serve` sees them change.
    root = Path(config.config_file_path).parent
    config.watch += [
        str(root / name) for name in ("src", "papers", "benchmarks", "notebooks", "DESIGN.md")
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {
        **loss_pages.pages(),
        **reproductions.pages(),
        **api.pages(),
        **root_files.pages(),
        **notebooks.pages(),
        **notebooks.figures(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, mathematics.FONT, content=mathematics.font()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    path = page.file.src_uri
    for place, part in PARTS.get(path, {}).items():
        if place not in markdown:
            raise ValueError(f"{path} has lost the line {place}")
        markdown = markdown.replace(place, part())
    if path == "losses.md":
        markdown = re.sub(
            r"(?m)^\| ([a-z_0-9]+) \| (?=`|yes|no)", r"| [\1](losses/\1.md) | ", markdown
        )
    return root_files.inside(markdown, path)


def on_page_content(html: str, **_: Any) -> str:
    return mathematics.with_mathml(html)

"""Pages that are files of the repository's root, and links from pages to files outside the site."""

import posixpath
import re
from pathlib import Path

import largemargin as lm
from site_pages import notebooks
from site_pages.sources import PAPERS

ROOT = Path(__file__).parents[2]

SHOWN = {
    "design.md": "DESIGN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "benchmark/index.md": "papers/benchmark/README.md",
    "benchmark/protocol.md": "papers/benchmark/PROTOCOL.md",
    "benchmark/log.md": "papers/benchmark/LOG.md",
}
"""Pages of the site by the file they show."""

CODE = "src/largemargin"

RULE = "reproductions/rule.md"
MEASURED = re.compile(r"papers/benchmark/measured/\w+\.json")
RESULTS = re.compile(r"benchmarks/results/(\w+)\.json")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def pages() -> dict[str, str]:
    made = {page: _read(file) for page, file in SHOWN.items()}
    papers = _read("papers/README.md")
    rule = papers[papers.index("## The rule of the verdicts") :]
    made[RULE] = re.sub(r"(?m)^##", "#", rule)
    return made


def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def inside(markdown: str, page: str) -> str:
    """Links to files of the repository lead to their page; where there is none they are text."""
    files = SHOWN | {each: f"notebooks/{path.name}" for each, path in notebooks.FILES.items()}
    home = posixpath.dirname(files.get(page, f"docs/{page}"))

    def lead(found: re.Match[str]) -> str:
        text, target, part = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        file = posixpath.normpath(posixpath.join(home, target))
        shown = {each: name for name, each in files.items()}
        shown |= {"papers/README.md": "reproductions/index.md", "README.md": "index.md"}
        shown |= {
            f"papers/{paper.folder}/README.md": f"reproductions/{paper.folder}.md"
            for paper in PAPERS.values()
        }
        shown |= {f"{CODE}/losses/{name}.py": f"losses/{name}.md" for name in lm.LOSSES}
        shown[f"{CODE}/__init__.py"] = "api/index.md"
        if MEASURED.fullmatch(file):
            shown[file] = "benchmark/index.md"
        if rows := RESULTS.fullmatch(file):
            shown[file], part = "benchmarks.md", f"#{rows[1].replace('_', '-')}"
        if file in shown:
            there = posixpath.relpath(shown[file], posixpath.dirname(page) or ".")
            return f"[{text}]({there}{part})"
        if file.startswith("docs/") and page in files:
            there = posixpath.relpath(file.removeprefix("docs/"), posixpath.dirname(page) or ".")
            return f"[{text}]({there}{part})"
        if not file.startswith("docs/") and (ROOT / file).exists():
            return f"`{file}`" if "`" not in text else text
        return found[0]

    return LINK.sub(lead, markdown)

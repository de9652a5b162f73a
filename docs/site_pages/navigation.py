"""The navigation: written pages by hand, made ones from what they are made of."""

from pathlib import Path
from typing import Any

import make_how_to
import make_tables

import largemargin as lm
from site_pages import api, notebooks
from site_pages.sources import FAMILIES, PAPERS

DOCS = Path(__file__).parents[1]


def navigation() -> list[Any]:
    return [
        {"Start": "index.md"},
        {"Losses": _losses()},
        {"How to": _how_to()},
        {
            "Results": [
                {"Reproductions": "reproductions/index.md"},
                *(
                    {f"{paper.tag}": f"reproductions/{paper.folder}.md"}
                    for paper in PAPERS.values()
                ),
                {"Rule of the verdicts": "reproductions/rule.md"},
                {
                    "Against a tuned softmax": [
                        {"Results": "benchmark/index.md"},
                        {"Protocol": "benchmark/protocol.md"},
                        {"Log": "benchmark/log.md"},
                    ]
                },
                {"Benchmarks": "benchmarks.md"},
            ]
        },
        {
            "API": [
                {"Overview": "api/index.md"},
                *({name: f"api/{name}.md"} for name in (*api.PAGES, "integrations")),
            ]
        },
        {
            "Project": [
                {"Design": "design.md"},
                {"Kernels and numerics": "kernels.md"},
                {"Stability": "stability.md"},
                {"Reliability": "reliability.md"},
                {"Models that were tried": "models.md"},
                {"Security": "security.md"},
                {"Contributing": "contributing.md"},
                {"Changes": "changelog.md"},
            ]
        },
    ]


def _losses() -> list[Any]:
    groups: dict[str, list[Any]] = {group: [] for group in FAMILIES}
    for name, loss in lm.LOSSES.items():
        groups[make_tables.family(name)].append({loss.__name__: f"losses/{name}.md"})
    return [
        {"Choosing a loss": "choosing.md"},
        {"All losses": "losses.md"},
        {"Errata of the papers": "errata.md"},
        {"Glossary": "glossary.md"},
        *({group: pages} for group, pages in groups.items()),
    ]


def _how_to() -> list[Any]:
    """Pages of prose by their titles, after notebooks and the page with all scripts."""
    return [
        {"Notebooks": [{notebooks.title(path): page} for page, path in notebooks.FILES.items()]},
        {"Scripts for every trainer": "how-to/README.md"},
        *({title.replace("`", ""): f"how-to/{path.name}"} for title, path in make_how_to.pages()),
        {"Other libraries": "other_libraries.md"},
    ]

"""The papers' tables: what was reported, what was measured here, and what that means.

Reads ``papers/*/claims`` and, where it exists, ``papers/*/measured``; nothing is run.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from largemargin_papers.recipes import Cell, Claim, Line, Recipe, read_claims, read_recipe
from largemargin_papers.recipes import Table as Measured
from largemargin_papers.recipes.figures import CAPTIONS, Picture, pictures_of
from largemargin_papers.recipes.measured import read_measured
from largemargin_papers.recipes.pages import measured_tables
from largemargin_papers.recipes.reproduce import read_cells
from largemargin_papers.recipes.table import spread_of, text_of
from largemargin_papers.recipes.table_rows import AS_PRINTED

from site_pages.sources import PAPERS, Paper

ROOT = Path(__file__).parents[2]
READY = "recipe ready, not measured here"
TERM = re.compile(r"[a-z][a-z_]+")


class Table(NamedTuple):
    """A recipe with its reported and its measured numbers."""

    paper: Paper
    path: Path
    recipe: Recipe
    cells: list[Cell]
    claims: list[Claim]
    measured: list[Measured]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def page(self) -> str:
        return f"reproductions/{self.paper.folder}.md"

    @property
    def anchor(self) -> str:
        return self.name.replace("_", "-")

    @property
    def losses(self) -> set[str]:
        """Names of the losses that its runs train with."""
        return {
            name for cell in self.cells for name in TERM.findall(str(cell.config.objective.name))
        }


@cache
def tables(root: Path = ROOT / "papers") -> list[Table]:
    """All recipes, paper by paper."""
    found = []
    for paper in PAPERS.values():
        for path in sorted((root / paper.folder).glob("*.yaml")):
            recipe = read_recipe(path)
            cells = read_cells(path, recipe)
            claims = read_claims(recipe, path.parent / recipe.claims, cells)
            measured = sorted(
                (table for table in measured_tables(path) if any(_known(x) for x in table.lines)),
                key=lambda table: (not table.protocol.startswith(AS_PRINTED), table.protocol),
            )
            found.append(Table(paper, path, recipe, cells, claims, measured))
    return found


def _known(line: Line) -> bool:
    return line.measured.n > 0 or line.verdict.startswith("failed")


def state(table: Table) -> str:
    """In a few words: is it measured, and what came out."""
    if not table.measured:
        return READY
    parts = []
    for each in table.measured:
        known = [line for line in each.lines if line.measured.n]
        failed = sum(line.verdict.startswith("failed") for line in each.lines)
        parts.append(
            f"{len(known)} of {len(each.lines)} numbers measured ({_cell(each.protocol)})"
            + _counted(known)
            + (f", {failed} failed" if failed else "")
        )
    return "; ".join(parts)


def brief(table: Table) -> str:
    """How many of its numbers were measured and reproduced, each once whatever the protocols."""
    lines = [line for each in table.measured for line in each.lines if line.measured.n]
    verdicts = {
        (*line.key.values(), line.column): line.verdict
        for line in reversed(lines)  # the protocol as printed comes first, and counts
        if line.reported is not None
    }
    if not verdicts:
        return state(table)
    reproduced = sum(each.startswith("reproduced") for each in verdicts.values())
    reported = sum(claim.reported is not None for claim in table.claims)
    return f"{len(verdicts)} of {reported} numbers measured, {reproduced} reproduced"


def _counted(known: list[Line]) -> str:
    texts = [
        part for line in known for part in line.verdict.split("; ") if part != "other protocol"
    ]
    counted = {text: texts.count(text) for text in dict.fromkeys(texts)}
    return "".join(f", {count} {text}" for text, count in counted.items())


def pages() -> dict[str, str]:
    made = {"reproductions/index.md": _index()}
    for paper in PAPERS.values():
        made[f"reproductions/{paper.folder}.md"] = _page(paper)
    for table in tables():
        for picture in pictures_of(table.path):
            made[f"reproductions/{_picture(table, picture)}"] = picture.path.read_text("utf-8")
    return made


def _picture(table: Table, picture: Picture) -> str:
    """Name of a figure on the site, where those of all papers lie in one folder."""
    return f"{table.paper.folder}-{picture.path.name}"


def _index() -> str:
    lines = [
        "# Reproductions",
        "",
        "Every table of the five papers has a recipe with the printed settings, our reading of "
        "what the paper leaves open, and the reported numbers. `largemargin reproduce` runs a "
        "recipe and stores what it measured. This page is made from those files; a table without "
        f'one is marked "{READY}". Reported and measured numbers never share a column, and '
        "verdicts follow [a rule fixed before anything was measured](rule.md).",
        "",
        "| paper | table | numbers reported | runs | status |",
        "|---|---|---|---|---|",
    ]
    for table in tables():
        reported = sum(claim.reported is not None for claim in table.claims)
        runs = sum(cell.runs for cell in table.cells if cell.train)
        link = f"[{_short(table)}]({table.paper.folder}.md#{table.anchor})"
        lines.append(f"| {table.paper.tag} | {link} | {reported} | {runs} | {state(table)} |")
    lines += ["", "## The main claims", "", _main_claims()]
    return "\n".join(lines) + "\n"


def _main_claims() -> str:
    """Of ``papers/README.md``, with links to the pages of the papers."""
    text = (ROOT / "papers" / "README.md").read_text(encoding="utf-8")
    part = re.search(r"<!-- made: papers -->\n(.*?)<!-- end -->", text, flags=re.DOTALL)
    assert part is not None, "papers/README.md has lost its main claims"
    rule = part[1].replace("](#the-rule-of-the-verdicts)", "](rule.md)")
    return re.sub(r"\]\((\w+)/README\.md\)", r"](\1.md)", rule)


def _short(table: Table) -> str:
    """``Table 3: accuracy by training fraction``, without the paper's name."""
    return table.recipe.title.removeprefix(table.paper.tag).strip()


def _page(paper: Paper) -> str:
    text = (ROOT / "papers" / paper.folder / "README.md").read_text(encoding="utf-8")
    lines = [_absolute(text).rstrip(), ""]
    for table in tables():
        if table.paper == paper:
            lines += _table(table)
    return "\n".join(lines) + "\n"


def _absolute(text: str) -> str:
    """Links into the repository become plain text: the site does not hold those files."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)


def _table(table: Table) -> list[str]:
    file = (
        table.path.relative_to(ROOT).as_posix() if table.path.is_relative_to(ROOT) else table.name
    )
    lines = [f"## {_short(table)} {{ #{table.anchor} }}", "", f"**{_capital(state(table))}.**", ""]
    lines += [f"`largemargin reproduce {file}`", ""]
    if table.recipe.readings:
        lines += ['??? note "What the paper leaves open, and our reading"', ""]
        lines += [f"    - {' '.join(reading.split())}" for reading in table.recipe.readings] + [""]
    for name in table.recipe.variants:
        lines += [f'??? note "What differs in the reading by the {name}"', ""]
        differs = table.recipe.variant(name).differs
        lines += [f"    - {' '.join(text.split())}" for text in differs] + [""]
    for each in table.measured:
        lines += [f"Measured, {each.protocol}. {_made(table, each.protocol)}", ""]
        lines += [*_rows([line for line in each.lines if _known(line)]), ""]
        missing = sum(not _known(line) for line in each.lines)
        if missing:
            lines += [f"{missing} of {len(each.lines)} numbers are not measured here.", ""]
        for picture in pictures_of(table.path):
            if picture.protocol == each.protocol:
                told = CAPTIONS[picture.kind]
                lines += [f"![{told}]({_picture(table, picture)})", "", f"*{told}*", ""]
    lines += _reported(table)
    return lines


def _made(table: Table, protocol: str) -> str:
    """Where the numbers come from."""
    cells = read_measured(table.path)[protocol].values()
    runs = [run for cell in cells for run in cell if run.get("seed") is not None]
    if not runs:
        return "Nothing was trained."

    def of(name: str) -> str:
        return ", ".join(
            sorted({_cell(str(run[name])) for run in runs if run.get(name) is not None})
        )

    return f"{len(runs)} runs on {of('device')}, torch {of('torch')}, commit {of('commit')}."


def _rows(lines: list[Line]) -> list[str]:
    keys = list(dict.fromkeys(key for line in lines for key in line.key))
    heads = [*(key.replace("_", " ") for key in keys), "quantity"]
    heads += ["reported", "measured", "runs", "verdict"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        measured = text_of(line.measured.mean, spread_of(line), line) if line.measured.n else "–"
        cells = [*(line.key.get(key, "") for key in keys), line.column.replace("_", " ")]
        cells += [text_of(line.reported, line.reported_std, line), measured]
        cells += [str(line.measured.n or ""), line.verdict]
        rows.append(f"| {' | '.join(_cell(each) for each in cells)} |")
    return rows


def _reported(table: Table) -> list[str]:
    """All the paper's numbers, in a block that opens on a click."""
    keys = list(dict.fromkeys(key for claim in table.claims for key in claim.key))
    heads = [*(key.replace("_", " ") for key in keys), "quantity", "reported"]
    count = sum(claim.reported is not None for claim in table.claims)
    if not count:
        return ["The paper prints no numbers here.", ""]
    rows = [f'??? quote "The {count} reported numbers"', ""]
    rows += [f"    | {' | '.join(heads)} |", "    " + "|---" * len(heads) + "|"]
    for claim in table.claims:
        std = "" if claim.std is None else f" ± {claim.std:g}"
        number = "–" if claim.reported is None else f"{claim.reported:g}{std}"
        cells = [*(claim.key.get(key, "") for key in keys), claim.column.replace("_", " "), number]
        rows.append(f"    | {' | '.join(_cell(each) for each in cells)} |")
    return [*rows, ""]


def _cell(text: str) -> str:
    """Text as it is, inside a table."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

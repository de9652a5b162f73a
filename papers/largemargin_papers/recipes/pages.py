"""Records into ``measured/``, and the tables there that people read."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from largemargin.app.training.files import write_text
from largemargin.errors import LargeMarginError
from largemargin_papers.recipes.claims import read_claims
from largemargin_papers.recipes.figure_data import settled_run
from largemargin_papers.recipes.figures import CAPTIONS, pictures_of, write_figures
from largemargin_papers.recipes.measured import (
    Measurements,
    computed,
    read_measured,
    write_measured,
)
from largemargin_papers.recipes.metrics import label
from largemargin_papers.recipes.queue import Place, tasks_of
from largemargin_papers.recipes.records import read_records
from largemargin_papers.recipes.reproduce import read_cells
from largemargin_papers.recipes.schema import read_recipe
from largemargin_papers.recipes.table import Line, Table, spread_of, text_of
from largemargin_papers.recipes.table_rows import (
    is_whole,
    measurements_of,
    reported_by_cell,
    table_of,
)
from largemargin_papers.recipes.verdicts import Sample

PAGE = "README.md"


def take_records(file: Path, folder: Path) -> int:
    """Put the runs of a file of records into ``measured/`` of all tables they belong to.

    Args:
        file: that :func:`largemargin_papers.recipes.run_queue.run_missing` wrote.
        folder: of the queue, from which recipes are named.

    Returns:
        How many runs there were.
    """
    if not file.is_file():
        raise LargeMarginError(
            f"there is no file {file}. Pass the file of records that a queue was run into."
        )
    records = read_records([file])
    found: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for record in records:
        run = settled_run({name: each for name, each in record.items() if name != "places"})
        for place in record["places"]:
            table = found.setdefault((place["recipe"], place["protocol"]), {})
            table.setdefault(place["cell"], []).append(run)
    _write(found, folder)
    return len(records)


def share_runs(queue: Path) -> int:
    """Put runs that one table has into ``measured/`` of the others that name the same run.

    Returns:
        How many places were filled.
    """
    found: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    filled = 0
    for task in tasks_of(queue):
        stored = {place: _stored(queue.parent, place, task.name) for place in task.places}
        known = next((run for run in stored.values() if run is not None), None)
        if known is None:
            continue
        shared = {name: each for name, each in known.items() if name != "sketches"}
        for place in [place for place, run in stored.items() if run is None]:
            cells = found.setdefault((place.recipe, place.protocol), {})
            cells.setdefault(place.cell, []).append(shared)
            filled += 1
    _write(found, queue.parent)
    return filled


def _stored(folder: Path, place: Place, name: str) -> dict[str, Any] | None:
    cells = read_measured(folder / place.recipe).get(place.protocol, {})
    return next((run for run in cells.get(place.cell, []) if run.get("run") == name), None)


def _write(
    found: Mapping[tuple[str, str], dict[str, list[Mapping[str, Any]]]], folder: Path
) -> None:
    """Runs by recipe and protocol, then by cell."""
    for (name, protocol), runs in found.items():
        path = folder / name
        recipe = read_recipe(path)
        recipe = recipe.as_read(recipe.reading_of(protocol))
        cells = read_cells(path, recipe)
        claims = read_claims(recipe, path.parent / recipe.claims, cells)
        unknown = runs.keys() - {cell.name for cell in cells}
        if unknown:
            raise LargeMarginError(
                f"{path} has no cell {sorted(unknown)[0]!r}, but a run was made for it. Take the "
                "records with the recipe they were made by."
            )
        needed = measurements_of(claims, recipe)
        known = read_measured(path).get(protocol, {})
        for cell in cells:
            if not cell.train and cell.name not in known:
                runs[cell.name] = [computed(needed[cell.name].wanted)]
        write_measured(path, recipe, protocol, runs, reported_by_cell(claims))


def measured_tables(path: Path) -> list[Table]:
    """The tables of a recipe that were measured, one for every protocol."""
    stored = read_measured(path)
    if not stored:
        return []
    printed = read_recipe(path)
    tables = []
    for protocol, runs in stored.items():
        recipe = printed.as_read(printed.reading_of(protocol))
        cells = read_cells(path, recipe)
        claims = read_claims(recipe, path.parent / recipe.claims, cells)
        needed = measurements_of(claims, recipe)
        found = {cell.name: needed.get(cell.name, Measurements()).copy() for cell in cells}
        for name, each in runs.items():
            for run in each:
                if name in found:
                    found[name].take(run)
        tables.append(table_of(recipe, protocol, claims, found))
    return tables


def write_pages(folder: Path) -> list[Path]:
    """The figures and a page ``measured/README.md`` of every paper with something measured."""
    pages = []
    for paper in sorted(each for each in folder.iterdir() if (each / "measured").is_dir()):
        recipes = [path for path in sorted(paper.glob("*.yaml")) if read_measured(path)]
        if not recipes:
            continue
        parts = [f"# {paper.name}: measured", "", INTRODUCTION]
        for path in recipes:
            write_figures(path)
            tables = measured_tables(path)
            parts += _side_by_side(path, tables)
            for table in tables:
                parts += ["", *_section(path, table)]
        page = paper / "measured" / PAGE
        write_text(page, "\n".join(parts) + "\n")
        pages.append(page)
    return pages


INTRODUCTION = """\
Written by `python papers/measure.py tables` from the JSON files beside this page, which hold the
settings, seed, seconds, device and commit of every run. ± is the standard deviation over runs (over
draws of noise where there is one run). Verdicts follow the rule of [papers](../../README.md).
Numbers that were not measured are not listed."""


def _side_by_side(path: Path, tables: Sequence[Table]) -> list[str]:
    """The printed protocol beside other readings and other precisions, where there are any."""
    recipe = read_recipe(path)
    whole = [each for each in tables if is_whole(each.protocol, recipe.variants)]
    lines = [
        row
        for row in zip(*(each.lines for each in whole), strict=True)
        if sum(line.measured.n > 0 for line in row) > 1
    ]
    if not lines:
        return []
    heads = ["", "", "reported", *(each.protocol for each in whole)]
    rows = []
    for row in lines:
        first = row[0]
        key = ", ".join(value for value in first.key.values() if value)
        found = [
            f"{text_of(line.measured.mean, spread_of(line), line)} ({line.measured.n})"
            if line.measured.n
            else "-"
            for line in row
        ]
        rows.append([key, first.column, text_of(first.reported, first.reported_std, first), *found])
    parts = ["", f"## {recipe.title}: readings", "", "The number of runs is in brackets.", ""]
    parts += [f"| {' | '.join(_cells(row))} |" for row in (heads, ["---"] * len(heads), *rows)]
    for name in dict.fromkeys(recipe.reading_of(each.protocol) for each in whole):
        if name:
            differs = (f"* {' '.join(text.split())}" for text in recipe.variant(name).differs)
            parts += ["", f'What differs in "{name}":', "", *differs]
    return parts


def _cells(texts: Iterable[str]) -> list[str]:
    return [text.replace("|", "\\|") for text in texts]


def _section(path: Path, table: Table) -> list[str]:
    lines = [line for line in table.lines if line.measured.n or line.verdict.startswith("failed")]
    runs = [run for each in read_measured(path)[table.protocol].values() for run in each]
    return [
        f"## {table.title}",
        "",
        f"Recipe: [{path.name}](../{path.name}). Protocol: {table.protocol}.",
        f"{_made(runs)}",
        "",
        "| | | reported | measured | difference | runs | verdict |",
        "|---|---|---|---|---|---|---|",
        *(_row(line) for line in lines),
        "",
        f"{len(table.lines) - len(lines)} of {len(table.lines)} numbers not measured here.",
        *_beside(path, table.protocol),
        *_figures(path, table.protocol),
    ]


def _beside(path: Path, protocol: str) -> list[str]:
    """Numbers that are measured and compared with nothing."""
    recipe = read_recipe(path)
    recipe = recipe.as_read(recipe.reading_of(protocol))
    rows = []
    for cell, runs in read_measured(path)[protocol].items():
        for measure in recipe.record:
            name = label(measure.metric, measure.options)
            found = [run["numbers"][name][0] for run in runs if name in run["numbers"]]
            sample = Sample(tuple(value for value in found if value is not None))
            if sample.n:
                spread = f" ± {sample.std:.2f}" if sample.n > 1 else ""
                told = f"{sample.mean:.2f}{spread} {measure.unit}".rstrip()
                rows.append(f"| {' | '.join(_cells((cell, name, told)))} | {sample.n} |")
    if not rows:
        return []
    head = ["| | | measured | runs |", "|---|---|---|---|"]
    return ["", "Measured beside, compared with nothing:", "", *head, *rows]


def _figures(path: Path, protocol: str) -> list[str]:
    lines = []
    for picture in pictures_of(path):
        if picture.protocol == protocol:
            told = CAPTIONS[picture.kind]
            lines += ["", f"![{picture.path.stem}]({picture.path.name})", "", told]
    return lines


def _made(runs: list[dict[str, Any]]) -> str:
    trained = [run for run in runs if run["seed"] is not None]
    if not trained:
        return "Nothing was trained."
    seconds = sum(run.get("seconds") or 0 for run in trained)
    devices = sorted({str(run.get("device")) for run in trained})
    commits = sorted({str(run.get("commit")) for run in trained})
    versions = sorted({str(run.get("torch")) for run in trained})
    return (
        f"{len(trained)} runs, {seconds:,.0f} s of training side by side on {', '.join(devices)}, "
        f"torch {', '.join(versions)}, commit {', '.join(commits)}."
    )


def _row(line: Line) -> str:
    key = ", ".join(value for value in line.key.values() if value)
    reported = text_of(line.reported, line.reported_std, line)
    measured = text_of(line.measured.mean, spread_of(line), line) if line.measured.n else "-"
    difference = "-"
    if line.reported is not None and line.measured.n:
        difference = text_of(line.measured.mean - line.reported, None, line, sign=True)
    cells = (key, line.column, reported, measured, difference, str(line.measured.n), line.verdict)
    return f"| {' | '.join(_cells(cells))} |"

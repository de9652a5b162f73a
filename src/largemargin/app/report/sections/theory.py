"""Which statements of the papers hold on these models, and say something."""

from dataclasses import replace

from largemargin.app.report.charts import (
    Block,
    Cell,
    Note,
    Section,
    Table,
    arranged,
    known,
    number,
    percent,
)
from largemargin.app.report.report_models import ReportModel, ReportModels, unknown
from largemargin.measuring.geometry_result import Geometry

READING = (
    "What each statement says about these models. Good is one that holds and is informative: most "
    "bounds exceed what is known anyway."
)
Row = tuple[Cell, ...]
COLUMNS = ("model", "statement", "value", "says")


def theory_section(models: ReportModels) -> Section:
    telling: list[Row] = []
    rest: list[Row] = []
    for model, g in models.measured:
        found = [*_propositions(model, g), *_bounds(model, g), *_stability(model, g)]
        for row, informs in found:
            (telling if informs else rest).append(row)
    blocks: list[Block] = [Table(COLUMNS, _joined(telling), key="theory", numeric=(2,))]
    if models.measured and not telling:
        blocks.append(Note(f"None of {len(rest)} statements is informative."))
    without = [model for model in models if model.geometry is None]
    blocks += unknown(without, "no geometry was measured.", ReportModel.measure_command)
    without = [model for model, geometry in models.measured if geometry.bounds is None]
    blocks += unknown(
        without,
        "generalization bounds were not measured.",
        lambda model: model.measure_command("--bounds true", "--max_samples 500"),
    )
    more = [Table(COLUMNS, _joined(rest), key="theory-rest", numeric=(2,))] if rest else []
    folded = "Statements that do not hold or say nothing"
    return Section("theory", "Theory", READING, arranged(blocks), arranged(more), folded)


def _joined(rows: list[Row]) -> tuple[Row, ...]:
    """Equal statements about several models as one row, with the value of each."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row[1].text, row[3].text), []).append(row)
    return tuple(
        (
            Cell.of(", ".join(row[0].text for row in same)),
            same[0][1],
            replace(same[0][2], text=", ".join(dict.fromkeys(row[2].text for row in same))),
            same[0][3],
        )
        for same in found.values()
    )


def _row(model: ReportModel, name: str, value: Cell, says: str, informs: bool) -> tuple[Row, bool]:
    return (Cell.of(model.title), Cell.of(name), value, Cell.of(says)), informs


def _propositions(model: ReportModel, geometry: Geometry) -> list[tuple[Row, bool]]:
    """LMD Propositions 4.1 and 4.2 on the measured features."""
    c = geometry.compactness
    if c is None:
        return []
    bounded = known(c.inside_radius) and c.inside_radius >= 1
    if bounded:
        first = (
            f"holds: every sample is within {c.radius:g} of its class mean, so no class is wider "
            f"than {2 * c.radius:g}"
        )
    else:
        first = (
            f"does not apply: {percent(c.inside_radius)} of samples are within {c.radius:g} of "
            "their class mean, all would have to be"
        )
    ideal = known(c.ideal_ratio) and c.ideal_ratio < 1
    second = (
        "ideal features: every class is narrower than the gap to the others"
        if ideal
        else "not ideal: some class is wider than the smallest gap between classes"
    )
    dispersion, ratio = Cell.number(c.largest_dispersion), Cell.number(c.ideal_ratio)
    return [
        _row(model, "LMD Prop. 4.1, largest dispersion", dispersion, first, bounded),
        _row(model, "LMD Prop. 4.2, dispersion / separation", ratio, second, ideal),
    ]


def _bounds(model: ReportModel, geometry: Geometry) -> list[tuple[Row, bool]]:
    rows = []
    for bound in geometry.bounds or ():
        broken = [each.text for each in bound.assumptions if each.state == "broken"]
        title = f"assumption broken: {broken[0]}" if broken else f"about {bound.bounds}"
        value = Cell(number(bound.value), bound.value if known(bound.value) else None, title=title)
        rows.append(_row(model, bound.name, value, bound.verdict, bound.informative))
    return rows


def _stability(model: ReportModel, geometry: Geometry) -> list[tuple[Row, bool]]:
    found = None if geometry.curvature is None else geometry.curvature.stability
    if found is None:
        return []
    says = (
        f"a heuristic: curvature is below the bound for {percent(found.upper_kept)} of samples, "
        f"noise {found.sigma:g}; {found.assumes}"
    )
    value = Cell.number(found.upper.median)
    return [_row(model, "ROB Theorem 6.1, bound on curvature", value, says, False)]

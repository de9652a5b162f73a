"""Section 7: which statements of the papers hold on these models."""

from largemargin.app.report.charts import Block, Cell, Note, Section, Table, known, number, percent
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.measuring.geometry_result import Geometry

READING = (
    "What each statement says about this model. Most bounds exceed what is known anyway and are "
    "marked as not informative. Good is a statement that holds and is informative."
)
INFORMATIVE, NOT = "informative", "not informative"


def theory_section(models: ReportModels) -> Section:
    blocks: list[Block] = []
    rows: list[tuple[Cell, ...]] = []
    for model in models:
        if model.geometry is None:
            words = f"{model.title}: no geometry was measured."
            blocks.append(Note(words, model.measure_command()))
            continue
        g = model.geometry
        rows += [*_propositions(model, g), *_bounds(model, g), *_stability(model, g)]
        if g.bounds is None:
            words = f"{model.title}: generalization bounds were not measured."
            blocks.append(Note(words, model.measure_command("--bounds true", "--max_samples 500")))
    heads = ("model", "statement", "value", "says", "mark")
    table = Table(heads, tuple(rows), caption="Statements", key="theory", numeric=(2,))
    return Section.arranged("theory", "Theory", READING, [table, *blocks])


def _row(model: ReportModel, name: str, value: Cell, says: str, informs: bool) -> tuple[Cell, ...]:
    mark = Cell.of(INFORMATIVE if informs else NOT, strong=informs)
    return Cell.of(model.title), Cell.of(name), value, Cell.of(says), mark


def _propositions(model: ReportModel, geometry: Geometry) -> list[tuple[Cell, ...]]:
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


def _bounds(model: ReportModel, geometry: Geometry) -> list[tuple[Cell, ...]]:
    rows = []
    for bound in geometry.bounds or ():
        broken = [each.text for each in bound.assumptions if each.state == "broken"]
        title = f"assumption broken: {broken[0]}" if broken else f"about {bound.bounds}"
        value = Cell(number(bound.value), bound.value if known(bound.value) else None, title=title)
        rows.append(_row(model, bound.name, value, bound.verdict, bound.informative))
    return rows


def _stability(model: ReportModel, geometry: Geometry) -> list[tuple[Cell, ...]]:
    found = None if geometry.curvature is None else geometry.curvature.stability
    if found is None:
        return []
    says = (
        f"a heuristic: curvature is below the bound for {percent(found.upper_kept)} of samples, "
        f"noise {found.sigma:g}; {found.assumes}"
    )
    value = Cell.number(found.upper.median)
    return [_row(model, "ROB Theorem 6.1, bound on curvature", value, says, False)]

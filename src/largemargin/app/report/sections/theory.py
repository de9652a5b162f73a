"""Section 7: which statements of the papers hold on these models."""

from largemargin.app.report.charts import Block, Cell, Note, Section, Table
from largemargin.app.report.number_format import known, number, number_cell, percent, text_cell
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.verdict import measure_command

READING = (
    "Each statement with what it says about this model; most bounds are above what is known "
    "anyway, and are then marked as not informative. Good is a statement that holds and is "
    "informative."
)
INFORMATIVE, NOT = "informative", "not informative"


def theory_section(subjects: Subjects) -> Section:
    blocks: list[Block] = []
    rows: list[tuple[Cell, ...]] = []
    for each in subjects.each:
        if each.geometry is None:
            words = f"{each.title}: no geometry was measured."
            blocks.append(Note(words, measure_command(each)))
            continue
        rows += [*_propositions(each), *_bounds(each), *_stability(each)]
        if each.geometry.bounds is None:
            words = f"{each.title}: generalization quantities were not measured."
            blocks.append(Note(words, measure_command(each, "--bounds true", "--max_samples 500")))
    if rows:
        heads = ("model", "statement", "value", "says", "mark")
        table = Table(heads, tuple(rows), caption="Statements", key="theory", numeric=(2,))
        blocks.insert(0, table)
    return Section("theory", "Theory", READING, tuple(blocks))


def _row(subject: Subject, name: str, value: Cell, says: str, informs: bool) -> tuple[Cell, ...]:
    mark = text_cell(INFORMATIVE if informs else NOT, strong=informs)
    return text_cell(subject.title), text_cell(name), value, text_cell(says), mark


def _propositions(subject: Subject) -> list[tuple[Cell, ...]]:
    """LMD Propositions 4.1 and 4.2 on the measured features."""
    assert subject.geometry is not None
    c = subject.geometry.compactness
    if c is None:
        return []
    inside = known(c.inside_radius) and c.inside_radius >= 1
    bound = 2 * c.radius
    first = (
        f"holds: every sample is within {c.radius:g} of its class mean, so no class is wider than "
        f"{bound:g}"
        if inside
        else f"does not apply: {percent(c.inside_radius)} of samples are within {c.radius:g} of "
        "their class mean, all would have to be"
    )
    ideal = known(c.ideal_ratio) and c.ideal_ratio < 1
    second = (
        "ideal features: every class is narrower than the gap to the others"
        if ideal
        else "not ideal: some class is wider than the smallest gap between classes"
    )
    widest = number_cell(c.largest_dispersion)
    return [
        _row(subject, "LMD Prop. 4.1, largest dispersion", widest, first, inside),
        _row(
            subject,
            "LMD Prop. 4.2, dispersion / separation",
            number_cell(c.ideal_ratio),
            second,
            ideal,
        ),
    ]


def _bounds(subject: Subject) -> list[tuple[Cell, ...]]:
    assert subject.geometry is not None
    rows = []
    for each in subject.geometry.bounds or ():
        broken = [a.text for a in each.assumptions if a.state == "broken"]
        title = f"assumption broken: {broken[0]}" if broken else f"about {each.bounds}"
        value = Cell(number(each.value), each.value if known(each.value) else None, title=title)
        rows.append(_row(subject, each.name, value, each.verdict, each.informative))
    return rows


def _stability(subject: Subject) -> list[tuple[Cell, ...]]:
    curvature = None if subject.geometry is None else subject.geometry.curvature
    found = None if curvature is None else curvature.stability
    if found is None:
        return []
    says = (
        f"a heuristic: curvature is below the bound for {percent(found.upper_kept)} of samples, "
        f"noise {found.sigma:g}; {found.assumes}"
    )
    value = number_cell(found.upper.median)
    return [_row(subject, "ROB Theorem 6.1, bound on curvature", value, says, False)]

"""From measured numbers to the lines of a table: what stands beside each reported number."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from largemargin_papers.recipes.cells import NEUTRAL
from largemargin_papers.recipes.claims import Claim
from largemargin_papers.recipes.measured import Measurements
from largemargin_papers.recipes.schema import Recipe
from largemargin_papers.recipes.table import Line, Table
from largemargin_papers.recipes.verdicts import Sample, verdict

AS_PRINTED = "as printed"
UNPRINTED = ("precision",)
"""Settings that none of the papers prints: they are named, but no departure from the paper."""


def protocol_of(fraction: float, overrides: Mapping[str, Any], reading: str = "") -> str:
    """How runs differ from the paper's, in words; first, which reading of it they follow.

    >>> protocol_of(1.0, {"device": "cpu"}), protocol_of(1.0, {"precision": "bf16"})
    ('as printed', 'as printed, precision bf16')
    >>> protocol_of(0.3, {"batch_size": 128})
    '0.3 of the epochs, batch_size 128'
    >>> protocol_of(1.0, {"precision": "bf16"}, "authors' code")
    "authors' code, precision bf16"
    """
    changed = {name: value for name, value in overrides.items() if name not in NEUTRAL}
    parts = [] if fraction == 1 else [f"{fraction:g} of the epochs"]
    parts += [f"{name} {changed[name]}" for name in sorted(changed) if name not in UNPRINTED]
    named = [f"{name} {changed[name]}" for name in UNPRINTED if changed.get(name, "fp32") != "fp32"]
    if reading:
        parts.insert(0, reading)
    return ", ".join((parts or [AS_PRINTED]) + named)


def is_whole(protocol: str, readings: Iterable[str] = ()) -> bool:
    """Whether it is the printed protocol, or a reading of it, changed in nothing but precision.

    >>> is_whole("as printed, precision bf16"), is_whole("authors' code", ["authors' code"])
    (True, True)
    >>> is_whole("authors' code, batch_size 128", ["authors' code"]), is_whole("batch_size 128")
    (False, False)
    """
    words = [each for each in protocol.split(", ") if each.split(" ")[0] not in UNPRINTED]
    return ", ".join(words) in (AS_PRINTED, *readings)


def measurements_of(claims: Sequence[Claim], recipe: Recipe) -> dict[str, Measurements]:
    """What is to be measured of every cell, by its name."""
    needed: dict[str, Measurements] = {}

    def add(cell: str, metric: str, options: Mapping[str, Any]) -> None:
        needed.setdefault(cell, Measurements()).add(metric, options)

    for claim in claims:
        if claim.cell is None or claim.measure is None:
            continue
        names = [claim.cell.name]
        if claim.measure.against is not None:
            names.append(_other(claim))
        for name in names:
            add(name, claim.measure.metric, claim.measure.options)
    for cell in list(needed):
        for each in recipe.record:
            add(cell, each.metric, each.options)
    return needed


def reported_by_cell(claims: Sequence[Claim]) -> dict[str, dict[str, float | None]]:
    """The reported numbers of every cell: by column, and by what names a number beside the cell."""
    found: dict[str, dict[str, float | None]] = {}
    for claim in claims:
        if claim.cell is None:
            continue
        more = [value for name, value in claim.key.items() if name not in claim.cell.key]
        found.setdefault(claim.cell.name, {})[", ".join([claim.column, *more])] = claim.reported
    return found


def table_of(
    recipe: Recipe, protocol: str, claims: Sequence[Claim], found: Mapping[str, Measurements]
) -> Table:
    """The table of one protocol."""
    as_printed = is_whole(protocol, recipe.variants)
    lines = tuple(_line(each, found, as_printed, claims) for each in claims)
    failures = {name: each.failure for name, each in found.items() if each.failure}
    return Table(recipe.title, protocol, lines, failures)


def _other(claim: Claim) -> str:
    """Name of the cell that a difference is taken from."""
    assert claim.cell is not None
    assert claim.measure is not None
    against = {name: str(value) for name, value in (claim.measure.against or {}).items()}
    return replace(claim.cell, key={**claim.cell.key, **against}).name


def _line(
    claim: Claim, found: Mapping[str, Measurements], as_printed: bool, claims: Sequence[Claim]
) -> Line:
    if claim.cell is None or claim.measure is None:
        text = f"left out: {claim.reason}"
        return Line(claim.key, claim.column, "", claim.reported, claim.std, Sample(), None, text)
    cell = found.get(claim.cell.name)
    sample = _sample(claim, found)
    base = _baseline_of(claim, claims)
    return Line(
        key=claim.key,
        column=claim.column,
        unit=claim.measure.unit,
        reported=claim.reported,
        reported_std=claim.std,
        measured=sample,
        draws_std=None if cell is None else cell.draws_std(claim.measure),
        verdict=verdict(
            claim.measure,
            claim.reported,
            sample,
            # What is computed, not trained, knows no epochs.
            as_printed=as_printed or not claim.cell.train,
            baseline=None if base is None else (base.reported, _sample(base, found)),
            failure="" if cell is None or sample.n else cell.failure,
        ),
    )


def _sample(claim: Claim, found: Mapping[str, Measurements]) -> Sample:
    assert claim.cell is not None
    assert claim.measure is not None
    cell = found.get(claim.cell.name)
    values = {} if cell is None else cell.values(claim.measure)
    if claim.measure.against is not None:
        other = found.get(_other(claim))
        theirs = {} if other is None else other.values(claim.measure)
        values = {seed: theirs[seed] - value for seed, value in values.items() if seed in theirs}
        return Sample(tuple(values.values()))
    return Sample(tuple(values.values()), None if cell is None else cell.draws_std(claim.measure))


def _baseline_of(claim: Claim, claims: Sequence[Claim]) -> Claim | None:
    """The same number of the cell this one is compared with."""
    if claim.cell is None or claim.cell.baseline is None:
        return None
    wanted = {**claim.key, **claim.cell.baseline}
    same = [each for each in claims if each.key == wanted and each.column == claim.column]
    return same[0] if same else None

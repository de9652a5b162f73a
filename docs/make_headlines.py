"""The main claims of the five papers: from a baseline to the paper's method, reported and measured.

Read from ``papers/*/measured``; one row of ``papers/README.md`` for every claim. A claim is chosen
here once, with both ends, and shown whatever was measured.
"""

from collections.abc import Mapping
from typing import NamedTuple

from largemargin_papers.recipes import Line
from largemargin_papers.recipes.table import spread_of
from largemargin_papers.recipes.table_rows import is_whole
from largemargin_papers.recipes.verdicts import direction
from site_pages import reproductions


class Claim(NamedTuple):
    """That a method changes a number of a table."""

    words: str
    recipe: str
    base: str
    method: str
    column: str
    said: float = 0.0
    """1 or -1 where the paper says higher or lower and prints no numbers."""


LONG_TAIL = "CIFAR-10, long-tailed, 100"
CLAIMS = (
    Claim(
        "LMD: discriminative loss, all images of CIFAR-10",
        "lmd/table3",
        "CIFAR10, softmax, 100",
        "CIFAR10, ours, 100",
        "accuracy",
    ),
    Claim(
        "LMD: the same, 20 % of the images",
        "lmd/table3",
        "CIFAR10, softmax, 20",
        "CIFAR10, ours, 20",
        "accuracy",
    ),
    Claim(
        "LMD: a margin delta_d of 6 against 0.5, 20 % of CIFAR-10",
        "lmd/table1",
        "CIFAR10, 20, 0.5",
        "CIFAR10, 20, 6.0",
        "accuracy",
    ),
    Claim(
        "LMD: momentum in one part only, against both",
        "lmd/table2",
        "CIFAR10, both momentum, 20",
        "CIFAR10, partial momentum, 20",
        "accuracy",
    ),
    Claim(
        "LMD: compactness alone is better than the margin alone, 20 % of CIFAR-10",
        "lmd/figure1",
        "CIFAR10, margin, 20",
        "CIFAR10, compactness, 20",
        "accuracy",
        1.0,
    ),
    Claim(
        "LMD: both terms are better than the margin alone",
        "lmd/figure1",
        "CIFAR10, margin, 20",
        "CIFAR10, both, 20",
        "accuracy",
        1.0,
    ),
    Claim(
        "ROB: robust training, noise 16/255, against normal training",
        "robust/table1",
        "Normal training, 16/255",
        "Ours, 16/255",
        "accuracy",
    ),
    Claim(
        "ROB: the same, against training on noisy images",
        "robust/table1",
        "Training only on noisy images, 16/255",
        "Ours, 16/255",
        "accuracy",
    ),
    Claim(
        "ROB: the same, against stability training",
        "robust/table1",
        "Stability training, 16/255",
        "Ours, 16/255",
        "accuracy",
    ),
    Claim(
        "ROB: compactness and margin, against compactness alone",
        "robust/table5",
        "CIFAR10, 1, 0, 0.001",
        "CIFAR10, 1, 1, 0.001",
        "accuracy",
    ),
    Claim(
        "ROB: robust training on clean images, against training on noisy images",
        "robust/table1",
        "Training only on noisy images, clean",
        "Ours, clean",
        "accuracy",
    ),
    Claim(
        "LTLM: sample margin regularizer on NormFace, class margin",
        "ltlm/table1",
        "NormFace (s=64), MNIST",
        "NormFace (s=64) + 0.5 R_sm, MNIST",
        "class_margin_deg",
    ),
    Claim(
        "LTLM: zero-centroid regularizer on LM-Softmax, long tail of CIFAR-10",
        "ltlm/table2",
        f"LM-Softmax, 0, {LONG_TAIL}",
        f"LM-Softmax, 1, {LONG_TAIL}",
        "accuracy",
    ),
    Claim(
        "LTLM: that, against cross entropy",
        "ltlm/table2",
        f"CE, 0, {LONG_TAIL}",
        f"LM-Softmax, 1, {LONG_TAIL}",
        "accuracy",
    ),
    Claim(
        "LTLM: zero-centroid regularizer on LM-Softmax, long tail of CIFAR-100",
        "ltlm/table2",
        "LM-Softmax, 0, CIFAR-100, long-tailed, 100",
        "LM-Softmax, 1, CIFAR-100, long-tailed, 100",
        "accuracy",
    ),
    Claim(
        "LTLM: LM-Softmax spreads eight classes on the sphere wider than NormFace",
        "ltlm/figure_tammes",
        "NormFace",
        "LM-Softmax",
        "class_margin_deg",
    ),
    Claim(
        "LMS: regularizer at 0.3, error",
        "kobayashi/table2",
        "Softmax loss",
        "Ours, 0.3",
        "error",
    ),
    Claim(
        "LMS: half of the samples, regularizer at 1, error",
        "kobayashi/table3",
        "a, training_fraction, 0.5, Softmax loss",
        "a, training_fraction, 0.5, Ours, 1",
        "error",
    ),
    Claim(
        "LMS: 20 % wrong labels, regularizer at 1, error",
        "kobayashi/table3",
        "b, label_noise, 0.2, Softmax loss",
        "b, label_noise, 0.2, Ours, 1",
        "error",
    ),
    Claim(
        "ODN: against cross entropy, 5 % of CIFAR-10",
        "odn/table1",
        "5, 1, 1, Xent",
        "5, 1, 1, ODN",
        "accuracy",
    ),
    Claim(
        "ODN: variance between over within classes, 1 % of CIFAR-10, test",
        "odn/table3",
        "test, Xent",
        "test, ODN",
        "between_over_within",
    ),
    Claim(
        "ODN: mean over deviation of input margins, MNIST",
        "odn/text",
        "margin_mean_over_std, MNIST, Xent",
        "margin_mean_over_std, MNIST, ODN",
        "value",
    ),
)


def headlines() -> str:
    """A table in Markdown."""
    rows = ["| paper | claim | reported | measured | verdict |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        paper, words = claim.words.split(": ", 1)
        start = f"| [{paper}]({claim.recipe.split('/')[0]}/README.md) | {words} |"
        found = _both(claim)
        rows += [f"{start} {_row(claim, *each)} |" for each in found]
        if not found:
            rows.append(f"{start} {_reported(claim)} | – | not measured |")
    return "\n".join(rows)


def _table(recipe: str) -> reproductions.Table:
    for table in reproductions.tables():
        if f"{table.paper.folder}/{table.name}" == recipe:
            return table
    raise SystemExit(f"CLAIMS of {__file__} names {recipe}, which is no recipe.")


def _both(claim: Claim) -> list[tuple[Line, Line, str]]:
    """Baseline and method of the printed protocol and other readings, else of another protocol."""
    table = _table(claim.recipe)
    found = []
    for each in table.measured:
        lines = {(_name(line.key), line.column): line for line in each.lines if line.measured.n}
        base, method = (lines.get((name, claim.column)) for name in (claim.base, claim.method))
        if base is not None and method is not None:
            found.append((base, method, each.protocol))
    whole = [each for each in found if is_whole(each[2], table.recipe.variants)]
    return whole or found[:1]


def _name(key: Mapping[str, str]) -> str:
    return ", ".join(value for value in key.values() if value)


def _reported(claim: Claim) -> str:
    if claim.said:
        return "higher" if claim.said > 0 else "lower"
    numbers = {(_name(each.key), each.column): each for each in _table(claim.recipe).claims}
    base, method = (numbers[name, claim.column] for name in (claim.base, claim.method))
    assert base.reported is not None
    assert method.reported is not None
    assert method.measure is not None
    return f"{base.reported:.2f} → {method.reported:.2f} {method.measure.unit}".rstrip()


def _row(claim: Claim, base: Line, method: Line, protocol: str) -> str:
    unit = f" {method.unit}" if method.unit else ""
    measured = f"{_told(base)} → {_told(method)}{unit}"
    gain = f"{method.measured.mean - base.measured.mean:+.2f}"
    if not claim.said:
        assert method.reported is not None
        assert base.reported is not None
        gain += f" instead of {method.reported - base.reported:+.2f}"
    runs = min(base.measured.n, method.measured.n)
    how = ", ".join(part for part in protocol.split(", ") if not part.startswith("precision"))
    counted = "1 run" if runs == 1 else f"{runs} runs"
    told = f"**{verdict(claim, base, method)}**: {gain}; {counted}, {how}"
    return f"{_reported(claim)} | {measured} | {told}"


def verdict(claim: Claim, base: Line, method: Line) -> str:
    """By the rule of the verdicts: does the number move the way the paper says?"""
    measure = next(
        each.measure
        for each in _table(claim.recipe).claims
        if _name(each.key) == claim.method and each.column == claim.column
    )
    assert measure is not None
    ends = (claim.said, 0.0) if claim.said else (method.reported, base.reported)
    words = direction(measure, ends[0] or 0.0, method.measured, ends[1], base.measured)
    return words.removeprefix("direction ").removeprefix("is ") or "not judged"


def _told(line: Line) -> str:
    spread = spread_of(line) if line.measured.n > 1 else None
    return f"{line.measured.mean:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")

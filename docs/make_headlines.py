"""The main claims of the five papers: from a baseline to the paper's method, reported and measured.

Read from ``papers/*/measured``; one row of ``papers/README.md`` for every claim. A claim is chosen
here once, with both ends, and shown whatever was measured.
"""

from typing import NamedTuple

from largemargin_papers.recipes import Line
from largemargin_papers.recipes.table import spread_of
from site_pages import reproductions


class Claim(NamedTuple):
    """That a method changes a number of a table."""

    words: str
    recipe: str
    base: str
    method: str
    column: str


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
        "ROB: the same, clean images",
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
        "LTLM: zero-centroid regularizer on LM-Softmax, long tail",
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
        "LMS: regularizer at 0.3, error",
        "kobayashi/table2",
        "Softmax loss",
        "Ours, 0.3",
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
        "ODN: mean over deviation of input margins, MNIST",
        "odn/text",
        "margin_mean_over_std, MNIST, Xent",
        "margin_mean_over_std, MNIST, ODN",
        "value",
    ),
)


def headlines() -> str:
    """A table in Markdown."""
    rows = [
        "| claim | reported | measured | change reported | change measured | runs | protocol |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        found = _both(claim)
        if found is not None:
            rows.append(_row(claim, *found))
    return "\n".join(rows)


def _both(claim: Claim) -> tuple[Line, Line, str] | None:
    """Baseline and method of one protocol, that of the paper where it was measured."""
    for protocol, lines in _lines(claim.recipe).items():
        base = lines.get((claim.base, claim.column))
        method = lines.get((claim.method, claim.column))
        if base is not None and method is not None:
            return base, method, protocol
    return None


def _lines(recipe: str) -> dict[str, dict[tuple[str, str], Line]]:
    """What was measured of a table, by protocol, name and column."""
    for table in reproductions.tables():
        if f"{table.paper.folder}/{table.name}" == recipe:
            return {
                each.protocol: {
                    (", ".join(v for v in line.key.values() if v), line.column): line
                    for line in each.lines
                    if line.measured.n
                }
                for each in table.measured
            }
    raise SystemExit(f"CLAIMS of {__file__} names {recipe}, which is no recipe.")


def _row(claim: Claim, base: Line, method: Line, protocol: str) -> str:
    assert base.reported is not None
    assert method.reported is not None
    unit = f" {method.unit}" if method.unit else ""
    reported = f"{base.reported:.2f} → {method.reported:.2f}{unit}"
    measured = f"{_told(base)} → {_told(method)}{unit}"
    moves = (method.reported - base.reported, method.measured.mean - base.measured.mean)
    folder = claim.recipe.split("/")[0]
    how = ", ".join(part for part in protocol.split(", ") if not part.startswith("precision"))
    runs = min(base.measured.n, method.measured.n)
    return (
        f"| [{claim.words}]({folder}/README.md) | {reported} | {measured} | "
        f"{moves[0]:+.2f} | {moves[1]:+.2f} | {runs} | {how} |"
    )


def _told(line: Line) -> str:
    spread = spread_of(line) if line.measured.n > 1 else None
    return f"{line.measured.mean:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")

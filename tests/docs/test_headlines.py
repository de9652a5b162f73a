"""The main claims in papers/README.md are the numbers of the papers and of the measured files."""

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_headlines
from largemargin_papers.recipes import Line
from largemargin_papers.recipes.verdicts import Sample
from make_headlines import CLAIMS, Claim
from site_pages import reproductions

ROOT = Path(__file__).parents[2]


def table(recipe: str) -> reproductions.Table:
    return next(
        each for each in reproductions.tables() if f"{each.paper.folder}/{each.name}" == recipe
    )


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.words)
def test_both_ends_are_numbers_of_the_paper(claim: Claim) -> None:
    """Reported ones, or where the paper says which is higher and prints none, ones it speaks of."""
    known = {
        (", ".join(value for value in each.key.values() if value), each.column)
        for each in table(claim.recipe).claims
        if (each.reported is None) == bool(claim.said)
    }
    assert {(claim.base, claim.column), (claim.method, claim.column)} <= known


def test_a_row_has_the_numbers_of_the_files() -> None:
    stored = json.loads((ROOT / "papers/lmd/measured/table3.json").read_text("utf-8"))
    cells = stored["protocols"]["as printed, precision bf16"]
    base, found = (
        [run["numbers"]["accuracy"][0] for run in cells[f"CIFAR10, {method}, 20"]["runs"]]
        for method in ("softmax", "ours")
    )
    row = next(line for line in make_headlines.headlines().splitlines() if "the same, 20 %" in line)
    assert f"{statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f} %" in row
    assert "| 77.92 → 84.73 % |" in row
    gain = statistics.fmean(found) - statistics.fmean(base)
    assert f"**holds**: {gain:+.2f} instead of +6.81; {len(found)} runs, as printed |" in row


def test_every_claim_has_a_row() -> None:
    rows = make_headlines.headlines().splitlines()[2:]
    for claim in CLAIMS:
        assert any(f"| {claim.words.split(': ', 1)[1]} |" in row for row in rows), claim.words
    assert all(row.count(" | ") == 4 for row in rows)


def test_the_protocol_of_the_paper_comes_first() -> None:
    """LMD was also measured with other initial weights, and both ends are of one protocol."""
    claim = next(each for each in CLAIMS if each.recipe == "lmd/table3")
    found = make_headlines._both(claim)
    assert [protocol.partition(",")[0] for _, _, protocol in found][:1] == ["as printed"]


def line(*values: float, reported: float | None = None) -> Line:
    sample = Sample(values)
    return Line({}, "accuracy", "%", reported, None, sample, None, "")


def test_verdicts_are_those_of_the_rule() -> None:
    printed = next(each for each in CLAIMS if each.words.startswith("LMD: the same, 20 %"))
    told = next(each for each in CLAIMS if each.said > 0)

    def said(claim: Claim, base: Line, method: Line) -> str:
        return make_headlines.verdict(claim, base, method)

    low, high = line(70.0, 70.2, reported=77.0), line(80.0, 80.2, reported=84.0)
    assert said(printed, low, high) == "holds"
    assert said(printed, high, low) == "holds"  # the paper's numbers fall, too
    assert said(printed, line(80.0, 80.2, reported=77.0), line(70.0, 70.2, reported=84.0)) == (
        "does not hold"
    )
    assert said(told, line(70.0), line(80.0)) == "holds in one run"
    assert said(told, line(80.0), line(70.0)) == "does not hold in one run"
    assert said(told, line(70.0, 80.0), line(71.0, 81.0)) == "within noise"


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(SystemExit, match="names lmd/table99, which is no recipe"):
        make_headlines._table("lmd/table99")

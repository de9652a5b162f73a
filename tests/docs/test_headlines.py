"""The main claims in papers/README.md are the numbers of the papers and of the measured files."""

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_headlines
from make_headlines import CLAIMS, Claim
from site_pages import reproductions

ROOT = Path(__file__).parents[2]


def table(recipe: str) -> reproductions.Table:
    return next(
        each for each in reproductions.tables() if f"{each.paper.folder}/{each.name}" == recipe
    )


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.words)
def test_both_ends_are_reported_numbers(claim: Claim) -> None:
    known = {
        (", ".join(value for value in each.key.values() if value), each.column)
        for each in table(claim.recipe).claims
        if each.reported is not None
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
    assert "77.92 → 84.73 %" in row
    gain = statistics.fmean(found) - statistics.fmean(base)
    assert f"| +6.81 | {gain:+.2f} | " in row
    assert f"| {len(found)} | as printed |" in row


def test_the_protocol_of_the_paper_comes_first() -> None:
    """LMD was also measured with other initial weights, and both ends are of one protocol."""
    claim = next(each for each in CLAIMS if each.recipe == "lmd/table3")
    found = make_headlines._both(claim)
    assert found is not None
    assert found[2].startswith("as printed")


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(SystemExit, match="names lmd/table99, which is no recipe"):
        make_headlines._lines("lmd/table99")

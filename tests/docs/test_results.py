"""Pages made from results: they say what was measured, and say so where nothing was."""

import json
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_decisions
import make_measured
from largemargin_papers.recipes.measured import write_measured
from largemargin_papers.recipes.metrics import label
from site_pages import benchmarks, choosing, reproductions, results, root_files

import largemargin as lm

ROOT = Path(__file__).resolve().parents[2]


def test_every_recommendation_rests_on_a_result_or_says_that_none_was_measured() -> None:
    rows = choosing.table().splitlines()[2:]
    assert len(rows) >= 6
    for row, advice in zip(rows, choosing.rows(), strict=True):
        assert set(advice.losses) <= set(lm.LOSSES)
        evidence = row.split(" | ")[3]
        assert "not measured here" in evidence or re.search(r"\]\((?:repr|bench|how)", evidence)
        if "not measured here" in evidence:
            assert "reported in [" in evidence
    situations = {advice.situation for advice in choosing.rows()}
    asked = {"Few labels", "Long tail", "Wrong labels", "Corrupted inputs", "A million classes"}
    assert asked <= situations


def test_what_won_the_benchmark_is_tried_first() -> None:
    lines = dict(
        zip([a.situation for a in choosing.rows()], choosing.table().splitlines()[2:], strict=True)
    )
    for advice in choosing.rows():
        first = choosing.recommended(advice)
        if first:
            assert lines[advice.situation].split(" | ")[1].startswith(f"[`{first[0]}`]")
    # A name that is no preset, and a preset without a winner, recommend nothing.
    plain = choosing.Advice("x", ("kobayashi",), "y", ())
    assert choosing.recommended(plain) == []
    winners = {
        name for name, each in make_decisions.read_presets().items() if each["status"] == "winner"
    }
    for name in make_decisions.read_presets():
        assert bool(choosing.recommended(plain._replace(situations=name))) == (name in winners)


def measured_copy(folder: Path) -> list[reproductions.Table]:
    """The recipes of one paper, two runs of one cell of which were measured."""
    shutil.copytree(ROOT / "papers" / "kobayashi", folder / "kobayashi")
    shutil.rmtree(folder / "kobayashi" / "measured", ignore_errors=True)
    (before,) = [t for t in reproductions.tables.__wrapped__(folder) if t.name == "table2"]
    assert not before.measured
    assert reproductions.state(before) == reproductions.READY
    claim = before.claims[0]
    assert claim.cell is not None
    assert claim.measure is not None
    assert claim.reported is not None
    number = label(claim.measure.metric, claim.measure.options)
    runs = [
        {
            "seed": seed,
            "run": f"run-{seed}",
            "status": "finished",
            "numbers": {number: [claim.reported + change, None]},
            "device": "some <b>device</b>",
            "torch": "2.9",
            "commit": "abc",
        }
        for seed, change in enumerate((-0.1, 0.1))
    ]
    write_measured(before.path, before.recipe, "as printed", {claim.cell.name: runs}, {})
    return [t for t in reproductions.tables.__wrapped__(folder) if t.name == "table2"]


def test_measured_numbers_stand_beside_reported_ones(tmp_path: Path) -> None:
    (table,) = measured_copy(tmp_path)
    reported = sum(claim.reported is not None for claim in table.claims)
    brief = f"1 of {reported} numbers measured, 1 reproduced"
    assert reproductions.brief(table) == brief
    said = reproductions.state(table)
    assert said.startswith(f"1 of {len(table.claims)} numbers measured (as printed), 1 reproduced")
    page = "\n".join(reproductions._table(table))
    assert "| reported | measured | runs | verdict |" in page
    assert re.search(r"\| 28\.62 ± 0\.24 % \| 28\.62 ± 0\.14 % \| 2 \| reproduced \|", page)
    assert f"{len(table.claims) - 1} of {len(table.claims)} numbers are not measured here" in page
    assert "2 runs on some &lt;b>device" in page


def test_measured_results_reach_the_decision_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = measured_copy(tmp_path)
    monkeypatch.setattr(reproductions, "tables", lambda: tables)
    advice = choosing.Advice("x", ("kobayashi",), "y", ("kobayashi/table2",))
    assert "not measured here" not in choosing.evidence(advice)
    assert "1 reproduced" in choosing.evidence(advice)
    assert "1 reproduced" in results.of_loss("kobayashi")


def test_every_paper_has_its_page_and_every_table_its_place() -> None:
    pages = reproductions.pages()
    for table in reproductions.tables():
        assert f"{{ #{table.anchor} }}" in pages[table.page]
        assert f"({table.paper.folder}.md#{table.anchor})" in pages["reproductions/index.md"]


def test_benchmarks_show_every_file_also_unknown_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = benchmarks.all_rows()
    for file in benchmarks.RESULTS.glob("*.json"):
        assert f"## {file.stem.replace('_', ' ')}\n" in page
    new = [{"provider": "a|b", "ms": 1234.5, "commit": "abc", "gpu": "X", "shape": {"N": 2}}]
    (tmp_path / "new_thing.json").write_text(json.dumps(new))
    (tmp_path / "empty.json").write_text("[]")
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    page = benchmarks.all_rows()
    assert "## new thing" in page
    assert "| a\\|b | 1,234 | N\u00a02 |" in page
    assert "X; commit `abc`" in page
    assert "## empty" in page


def test_links_out_of_the_site_become_pages_or_text() -> None:
    text = "[a](../../papers/README.md) [b](../../DESIGN.md#x) [c](../../src/largemargin) [d](e.md)"
    assert root_files.inside(text, "how-to/x.md") == (
        "[a](../reproductions/index.md) [b](../design.md#x) `src/largemargin` [d](e.md)"
    )
    assert root_files.inside("[a](docs/losses.md)", "design.md") == "[a](losses.md)"
    assert root_files.inside("[a](https://x.org/y)", "design.md") == "[a](https://x.org/y)"
    loss = "[a](../src/largemargin/losses/cosface.py)"
    assert root_files.inside(loss, "errata.md") == "[a](losses/cosface.md)"
    rows = "[a](../../benchmarks/results/cpu_heads.json)"
    assert root_files.inside(rows, "how-to/x.md") == "[a](../benchmarks.md#cpu-heads)"
    runs = "[a](../papers/benchmark/measured/omniglot.json)"
    assert root_files.inside(runs, "choosing.md") == "[a](benchmark/index.md)"
    face = "[a](../src/largemargin/__init__.py)"
    assert root_files.inside(face, "stability.md") == "[a](api/index.md)"


def test_the_rows_warn_where_the_summary_does() -> None:
    summary = make_measured.made("docs/benchmarks.md")
    page = benchmarks.all_rows()
    section = page[page.index("## training speed cuda") :].split("\n## ")[0]
    assert (benchmarks.ON_ZEROS in summary) == (benchmarks.ON_ZEROS in section)
    old = {"commit": benchmarks.WITHOUT_GRADIENT[0]}
    assert benchmarks.caveats("training_speed_cuda", old) == [benchmarks.ON_ZEROS]
    assert benchmarks.caveats("training_speed_cuda", {"commit": "another"}) == []
    jumps = "jumps between two levels"
    assert jumps in summary
    assert f"With 20,000 classes {results.PML_JUMPS}" in page
    assert results.PML_JUMPS in results.cost_of_loss("cosface")
    assert results.PML_JUMPS not in results.cost_of_loss("arcface")
    assert jumps in choosing.table()


def test_the_papers_pages_count_the_runs_of_their_recipes() -> None:
    for table in reproductions.tables():
        text = (ROOT / "papers" / table.paper.folder / "README.md").read_text(encoding="utf-8")
        row = re.search(
            rf"(?m)^\| {table.name} \| [^|]* \| (\d+)(?: x (\d+))?( more)?[^|]* \|", text
        )
        assert row, f"{table.paper.folder} does not speak of {table.name}"
        runs = sum(cell.runs for cell in table.cells if cell.train)
        if not row[3]:  # "0 more": the models are those of another table
            assert int(row[1]) * int(row[2] or 1) == runs, table.name


def test_tests_of_the_benchmark_are_evidence_once_they_are_concluded(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "protocol.yaml").write_text("presets: {few_labels: [a, b]}\n")
    assert choosing._against_softmax("few_labels", tmp_path) == []
    test = {"difference": 0.0123, "low": 0.004, "high": 0.0206, "corrected": 0.01, "pairs": 6}
    found = {"title": "T", "chosen": "cosface", "baseline": "softmax", "verdict": "winner"}
    (tmp_path / "measured" / "a.json").write_text(json.dumps({**found, "test": test}))
    (tmp_path / "measured" / "b.json").write_text(json.dumps({**found, "test": None}))
    (said,) = choosing._against_softmax("few_labels", tmp_path)
    assert "`cosface` against softmax +1.23 [+0.40, +2.06] points, **better**" in said
    assert choosing._against_softmax("other", tmp_path) == []

"""From records to conclusions, tables, presets and decisions."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("yaml", reason="the protocol is a YAML file")
pytest.importorskip("scipy", reason="the paired tests are scipy's")

from largemargin_papers.benchmark import Protocol, conclude, next_jobs, plan, read_protocol
from largemargin_papers.benchmark.conclude import _aim_met, _verdict, preset_entries
from largemargin_papers.benchmark.plan import TRAIN_IMAGES
from largemargin_papers.benchmark.tables import readme
from papers.benchmark.tiny import TINY, tiny_protocol
from scipy import stats

import largemargin as lm
from largemargin.app.training import presets
from largemargin.app.training.files import read_json
from largemargin.app.training.presets import BEHIND, SHOWN

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "papers" / "benchmark"
NAME = "digits_few"
SOFTMAX = [0.80, 0.82, 0.78, 0.81, 0.79, 0.80]
GAINS = [0.021, 0.034, 0.018, 0.029, 0.025, 0.031]


def decisions() -> Any:
    spec = importlib.util.spec_from_file_location("decisions", ROOT / "docs" / "make_decisions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def protocol(tmp_path: Path) -> Protocol:
    situation = {**TINY["situations"][NAME], "aim": 0.02}
    other = {**situation, "title": "Another task"}
    return tiny_protocol(
        tmp_path,
        seeds=[0, 1, 2, 3, 4, 5],
        situations={NAME: situation, "other": other},
        presets={"few_labels": [NAME, "other"]},
    )


def made(
    protocol: Protocol, gains: list[float | None], chosen: str = "kobayashi"
) -> dict[str, Any]:
    """Records in which softmax has SOFTMAX and the chosen method so much more."""
    records: dict[str, Any] = {}
    situation = protocol.situations[NAME]
    while jobs := list(next_jobs(protocol, situation, records)):
        for each in jobs:
            score: float | None = 0.6 if each.method == chosen else 0.5
            if each.stage == "final":
                gain = gains[each.seed] if each.method == chosen else 0.0
                score = None if gain is None else SOFTMAX[each.seed] + gain
            records[each.key] = {
                "key": each.key,
                "method": each.method,
                "status": "diverged" if score is None else "finished",
                "score": score,
                "accuracy": score,
                "ece": 0.05,
                "device": "cpu",
                "torch": "2",
                "commit": "abc",
                "rejection_by_margin": {"area": 0.1},
            }
    return records


def test_the_registered_test_is_the_paired_t_test(protocol: Protocol) -> None:
    found = conclude(protocol, {NAME: made(protocol, list(GAINS))})[NAME]
    test = found["test"]
    expected = stats.ttest_rel([a + b for a, b in zip(SOFTMAX, GAINS, strict=True)], SOFTMAX)
    assert test["p"] == pytest.approx(expected.pvalue)
    assert (test["low"], test["high"]) == pytest.approx(tuple(expected.confidence_interval()))
    assert test["difference"] == pytest.approx(sum(GAINS) / 6)
    # Two situations, of which one was not run and counts with p = 1.
    assert test["corrected"] == pytest.approx(2 * test["p"])
    assert found["chosen"] == "kobayashi"
    assert (found["verdict"], found["aim_met"]) == ("winner", True)
    assert found["methods"]["kobayashi"]["rejection_by_margin"] == {"area": pytest.approx(0.1)}
    assert set(found["reported_beside"]) == {
        "kobayashi - label_smoothing",
        "label_smoothing - softmax",
    }


def test_a_small_gain_wins_but_misses_the_aim(protocol: Protocol) -> None:
    found = conclude(protocol, {NAME: made(protocol, [g - 0.016 for g in GAINS])})[NAME]
    assert (found["verdict"], found["aim_met"]) == ("winner", False)


def test_noise_and_losses_win_nothing(protocol: Protocol) -> None:
    noise: list[float | None] = [0.03, -0.02, 0.01, -0.03, 0.02, 0.0]
    assert conclude(protocol, {NAME: made(protocol, noise)})[NAME]["verdict"] == "no winner"
    worse: list[float | None] = [-each for each in GAINS]
    assert conclude(protocol, {NAME: made(protocol, worse)})[NAME]["verdict"] == "worse"


def test_a_final_run_that_diverged_counts_as_guessing(protocol: Protocol) -> None:
    gains: list[float | None] = [None, *GAINS[1:]]
    found = conclude(protocol, {NAME: made(protocol, gains)})[NAME]
    assert found["methods"]["kobayashi"]["scores"][0] == 0.1
    assert found["diverged"] == {"kobayashi": 1}
    assert found["verdict"] == "no winner"


def test_an_aim_is_met_by_winners_alone(protocol: Protocol) -> None:
    """A gain of 3 points in the mean that may be luck is none."""
    luck: list[float | None] = [0.2, -0.14, 0.2, -0.14, 0.2, -0.14]
    found = conclude(protocol, {NAME: made(protocol, luck)})[NAME]
    assert found["test"]["difference"] > found["aim"]
    assert (found["verdict"], found["aim_met"]) == ("no winner", False)


def test_the_verdict_needs_less_than_the_level() -> None:
    assert _verdict({"corrected": 0.05, "difference": 1.0}, 0.05) == "no winner"
    assert _verdict({"corrected": 0.049, "difference": 1.0}, 0.05) == "winner"
    assert _verdict({"corrected": math.nan, "difference": 1.0}, 0.05) == "no winner"
    exactly = {"verdict": "winner", "aim": 0.02, "test": {"difference": 0.02}}
    assert _aim_met(exactly) is True
    assert _aim_met({**exactly, "aim": None}) is None


def test_runs_that_diverged_are_counted_and_have_no_score(protocol: Protocol) -> None:
    records = made(protocol, list(GAINS))
    broken = [key for key in records if "/cosface/" in key]
    for key in broken:
        records[key] |= {"status": "diverged", "score": None, "accuracy": None}
    found = conclude(protocol, {NAME: records})[NAME]
    assert found["diverged"] == {"cosface": len(broken)}
    assert len(broken) > 1
    tuned = found["tuned"]["cosface"]
    assert tuned["validation"] is None
    assert [rung["best"] for rung in tuned["rungs"]] == [None, None]


def test_a_method_with_some_of_its_final_runs_has_no_mean(protocol: Protocol) -> None:
    """Methods that no test is about are run afterwards, seed by seed."""
    records = made(protocol, list(GAINS))
    (extra, *_) = next_jobs(protocol, protocol.situations[NAME], records, everyone=True)
    records[extra.key] = {**next(iter(records.values())), "method": extra.method, "score": 0.9}
    found = conclude(protocol, {NAME: records})[NAME]
    assert extra.method == "cosface"
    assert found["methods"].keys() == {"softmax", "kobayashi", "label_smoothing"}


def test_an_unfinished_situation_has_no_test(protocol: Protocol) -> None:
    records = made(protocol, list(GAINS))
    del records[next(key for key in records if "/final/" in key and key.endswith("seed5"))]
    found = conclude(protocol, {NAME: records})[NAME]
    assert (found["status"], found["test"], found["verdict"]) == ("under way", None, None)
    assert found["tuned"]["softmax"]["validation"] == 0.5


def entries(protocol: Protocol, gains: list[float | None] | None) -> dict[str, Any]:
    records = {} if gains is None else {NAME: made(protocol, gains)}
    return preset_entries(protocol, conclude(protocol, records), "papers/benchmark")


def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: dict[str, Any]) -> lm.Preset:
    file = tmp_path / "presets.json"
    file.write_text(json.dumps(found))
    monkeypatch.setattr(presets, "FILE", file)
    return lm.preset("few_labels")


def test_a_preset_follows_from_the_winner(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = given(monkeypatch, tmp_path, entries(protocol, list(GAINS)))
    assert (chosen.status, chosen.method, chosen.objective.name) == (
        "winner",
        "kobayashi",
        "kobayashi",
    )
    said = str(chosen)
    for part in (
        "Digits, 100 images",
        "+2.63 points accuracy over tuned softmax",
        "95 % interval [+1.99, +3.28]",
        "papers/benchmark/measured/digits_few.json",
        "Another task: not measured yet",
    ):
        assert part in " ".join(said.split()), said
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    criterion = lm.attach(model, chosen)
    loss = criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
    assert list(criterion.terms) == ["kobayashi"]
    assert loss.dim() == 0
    tuned = chosen.config(optimizer=True)
    assert tuned.optimizer.lr == chosen.optimizer["lr"]
    assert chosen.config().optimizer == lm.RunConfig().optimizer


def test_without_a_winner_it_is_softmax_and_says_so(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise: list[float | None] = [0.03, -0.02, 0.01, -0.03, 0.02, 0.0]
    chosen = given(monkeypatch, tmp_path, entries(protocol, noise))
    assert (chosen.status, chosen.objective.name) == ("no winner", "cross_entropy")
    assert "no margin method was better" in str(chosen)
    power = "would have been found with probability 0.8"
    assert power in " ".join(str(chosen).split())


def test_not_measured_is_softmax_and_says_so(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = given(monkeypatch, tmp_path, entries(protocol, None))
    assert (chosen.status, chosen.objective.name) == ("not measured", "cross_entropy")
    assert "not measured yet: softmax" in str(chosen)


def test_presets_with_counts_or_noise_say_what_they_need(
    protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = entries(protocol, list(GAINS))
    recommended = found["few_labels"]["recommended"]
    recommended |= {"objective": "ldam", "settings": {}, "reweight_at": 0.8}
    chosen = given(monkeypatch, tmp_path, found)
    assert chosen.objective.schedule == "preset"
    with pytest.raises(lm.LargeMarginError, match="class_counts"):
        chosen(3, 8)
    counted = lm.preset("few_labels", class_counts=[9, 3, 2])
    assert "ldam" in counted(3, 8).terms
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(lm.LargeMarginError, match="total_steps"):
        lm.attach(model, counted)
    assert len(lm.attach(model, counted, total_steps=100).schedules) > 0
    assert lm.attach(model, counted, schedule=()).schedules == []
    recommended |= {"objective": "cross_entropy", "noise": {"use": "clean_and_noisy"}}
    noisy = given(monkeypatch, tmp_path, found)
    with pytest.raises(lm.LargeMarginError, match="noisy images"):
        noisy(3, 8)
    assert noisy.config().noise.use == "clean_and_noisy"


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(lm.LargeMarginError, match="Did you mean few_labels"):
        lm.preset("few_label")


def test_the_page_and_the_decisions_show_wins_and_losses(protocol: Protocol) -> None:
    found = conclude(protocol, {NAME: made(protocol, list(GAINS))})
    page = readme(found, plan(protocol, {}))
    assert "| Digits, 100 images | softmax 80.00 | kobayashi | +2.63 [+1.99, +3.28] |" in page
    assert "+2, met | **better** |" in page
    assert "| Another task | softmax | – | – | – | – | +2 | not measured |" in page
    table = decisions().decision_table
    assert "+2.63 [+1.99, +3.28] points" in table(entries(protocol, list(GAINS)))
    noise: list[float | None] = [0.03, -0.02, 0.01, -0.03, 0.02, 0.0]
    lost = table(entries(protocol, noise))
    assert "none shown: best margin method kobayashi" in lost
    assert "`cross_entropy`" in lost
    assert "not measured yet" in table(entries(protocol, None))


def test_the_decisions_show_the_other_tasks_of_a_preset(protocol: Protocol) -> None:
    """Also those in which nothing was won."""
    records = made(protocol, list(GAINS))
    noise: list[float | None] = [0.03, -0.02, 0.01, -0.03, 0.02, 0.0]
    other = {
        key.replace(NAME, "other"): {**each, "key": key.replace(NAME, "other")}
        for key, each in made(protocol, noise).items()
    }
    found = preset_entries(protocol, conclude(protocol, {NAME: records, "other": other}), "x")
    assert found["few_labels"]["others"]["Another task"]["objective"] == "cross_entropy"
    row = "| few labels, another task | – | `cross_entropy` | none shown: best margin method kobay"
    assert row in decisions().decision_table(found)


def test_what_is_in_the_package_follows_from_the_measured_files() -> None:
    """Presets, README and conclusions cannot drift from the runs: they are made again here."""
    from largemargin_papers.benchmark import read_records
    from largemargin_papers.benchmark.costs import read_costs
    from largemargin_papers.benchmark.followups import read_followups

    folder = ROOT / "papers" / "benchmark"
    real = read_protocol(folder / "protocol.yaml")
    records = {
        name: read_records([folder / "measured" / f"{name}.jsonl"]) for name in real.situations
    }
    questions = read_followups(folder / "questions.yaml", real)
    found = conclude(real, records, questions, read_costs(ROOT / "benchmarks" / "results"))
    shipped = json.loads(presets.FILE.read_text())
    again = preset_entries(real, found, "papers/benchmark")
    assert shipped == json.loads(json.dumps(again)), "run papers/benchmark/analyse.py"
    assert set(shipped) == {"few_labels", "long_tail", "label_noise", "corruption", "embedding"}
    every = {key: each for one in records.values() for key, each in one.items()}
    assert (folder / "README.md").read_text() == readme(found, plan(real, every))
    for name, each in found.items():
        if records[name]:
            written = json.loads((folder / "measured" / f"{name}.json").read_text())
            assert written == json.loads(json.dumps(each))


def test_what_presets_say_of_their_data_is_the_protocols() -> None:
    """Fewest and most images of a class, over tasks where a margin method won."""
    protocol = read_protocol(FOLDER / "protocol.yaml")
    for name, situations in protocol.presets.items():
        shown = SHOWN[name]
        if name in ("embedding", "long_tail"):
            continue
        sizes = [
            (protocol.situations[each].images or 0) / 10
            for each in situations
            if read_json(FOLDER / "measured" / f"{each}.json")["verdict"] == "winner"
            or len(situations) == 1
        ]
        assert (shown.fewest, shown.most) == (int(min(sizes)), int(max(sizes)))
        assert (shown.classes, shown.imbalance) == (10, 1)
    tail = protocol.situations["cifar10_long_tail"].data
    assert SHOWN["long_tail"].imbalance == tail["imbalance_ratio"]
    assert SHOWN["long_tail"].most == 5000 * (1 - tail["validation"])
    omniglot = SHOWN["embedding"]
    assert omniglot.classes * omniglot.fewest == TRAIN_IMAGES["omniglot"]


def test_how_far_few_labels_is_behind_on_a_long_tail() -> None:
    """The same trial, so the same optimizer settings."""
    settings = lm.preset("few_labels").objective
    lines = (FOLDER / "measured" / "cifar10_long_tail.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if (row["stage"], row["trial"]) == ("rung1", 7)]
    found = {row["method"]: row for row in rows}
    assert found["cosface"]["objective"]["name"] == settings.name
    assert found["cosface"]["objective"]["settings"] == settings.settings
    assert found["cosface"]["optimizer"] == found["softmax"]["optimizer"]
    behind = found["softmax"]["score"] - found["cosface"]["score"]
    assert round(100 * behind) == BEHIND

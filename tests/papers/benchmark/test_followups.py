"""Questions asked after the tests: their runs, their answers, and the doubts they settle."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the protocol is a YAML file")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

import yaml
from largemargin_papers.benchmark import Protocol, conclude, next_jobs, read_records, run_situations
from largemargin_papers.benchmark.caveats import caveats
from largemargin_papers.benchmark.conclude import preset_entries
from largemargin_papers.benchmark.followups import (
    FollowUp,
    changes_text,
    followup_jobs,
    read_followups,
)
from largemargin_papers.benchmark.halving import job
from largemargin_papers.benchmark.plan import plan
from largemargin_papers.benchmark.tables import readme
from papers.benchmark.tiny import tiny_protocol

from largemargin import LargeMarginError

NAME = "digits_few"
HALF = {"situation": NAME, "asked": "Stopped early?", "method": "softmax", "epochs": 0.5}
SWAPPED = {
    "baseline_at_chosen": {"asked": "?", "method": "softmax", "optimizer_of": "cosface"},
    "chosen_at_baseline": {"asked": "?", "method": "cosface", "optimizer_of": "softmax"},
}
WEIGHTED = {"situation": NAME, "asked": "Weights?", "method": "softmax", "reweight_at": 0.5}


def asked(folder: Path, protocol: Protocol, **entries: Any) -> dict[str, FollowUp]:
    path = folder / "questions.yaml"
    path.write_text(yaml.safe_dump(entries))
    return read_followups(path, protocol)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "ldam_drw"}, "is about ldam_drw, but the methods of digits_few are softmax"),
        (
            {"optimizer_of": "ldam_drw"},
            "is about ldam_drw, but the methods of digits_few are softmax",
        ),
        ({"situation": "digits"}, "there is no situation 'digits'"),
        ({"epochs": 1.0}, "changes nothing, and softmax has final runs: give epochs"),
        ({"trial": 9}, "trial must be a finite number >= 0 and <= "),
        ({"epochs": 1.5}, "epochs must be a finite number > 0 and <= 1"),
        ({"reweight_at": 1.0}, "reweight_at must be a finite number >= 0 and < 1"),
        ({"epoch": 0.5}, "half.epoch is no setting. Closest: epochs"),
    ],
)
def test_a_question_that_cannot_be_answered(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(LargeMarginError, match=message):
        asked(tmp_path, tiny_protocol(tmp_path), half={**HALF, **change})


def test_no_file_asks_nothing(tmp_path: Path) -> None:
    assert read_followups(tmp_path / "none.yaml", tiny_protocol(tmp_path)) == {}


def test_runs_of_questions_come_last_and_change_no_verdict(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    questions = asked(tmp_path, protocol, half=HALF, weighted=WEIGHTED)
    out, lines = tmp_path / "out", list[str]()
    done = run_situations(
        protocol,
        [NAME],
        out=out,
        device="cpu",
        questions=list(questions.values()),
        say=lines.append,
    )
    assert done == {NAME: True}
    records = read_records([out / f"{NAME}.jsonl"])
    own = {key: each for key, each in records.items() if "/asked-" in key}
    assert list(own) == list(records)[-4:]
    assert {each["judged_on"] for each in own.values()} == {"test"}
    assert [(each["epochs"], each["reweight_at"], each["seed"]) for each in own.values()] == [
        (1, None, 0),
        (1, None, 1),
        (2, 0.5, 0),
        (2, 0.5, 1),
    ]
    # The settings are those that the method was tuned to.
    final = next(each for key, each in records.items() if "softmax/final/" in key)
    assert all(each["optimizer"] == final["optimizer"] for each in own.values())
    with_them = conclude(protocol, {NAME: records}, questions)[NAME]
    plain = {key: each for key, each in records.items() if key not in own}
    without = conclude(protocol, {NAME: plain})[NAME]
    told = ("asked", "doubts")
    assert {k: v for k, v in with_them.items() if k not in told} == {
        k: v for k, v in without.items() if k not in told
    }
    answer = with_them["asked"]["half"]
    scores = [each["score"] for key, each in own.items() if "/asked-half/" in key]
    assert answer["scores"] == scores
    chosen = with_them["methods"][with_them["chosen"]]["scores"]
    beyond = [a - b for a, b in zip(chosen, scores, strict=True)]
    assert answer["chosen_beyond"]["difference"] == pytest.approx(sum(beyond) / 2)
    page = readme({NAME: with_them}, plan(protocol, records))
    assert "| Stopped early? | softmax with 50 % of the epochs |" in page
    assert "not run yet" not in page
    assert (
        preset_entries(protocol, {NAME: with_them}, "x")["few_labels"]["recommended"]
        == (preset_entries(protocol, {NAME: without}, "x")["few_labels"]["recommended"])
    )


def test_nothing_is_asked_before_the_method_is_tuned(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    (question,) = asked(tmp_path, protocol, half=HALF).values()
    assert followup_jobs(protocol, question, {}) is None
    answer = conclude(protocol, {}, {"half": question})[NAME]["asked"]["half"]
    assert answer["scores"] is None


def situation(**changes: Any) -> dict[str, Any]:
    """A concluded situation without anything to doubt."""
    tuned = {
        name: {
            "reweight_at": None,
            "validation": last,
            "margin": name == "cosface",
            "optimizer": {"lr": 0.05, "weight_decay": 5e-4, "clip_norm": 5.0},
            "rungs": [{"epochs": 0.5, "best": 0.60}, {"epochs": 1.0, "best": last}],
        }
        for name, last in (("softmax", 0.61), ("cosface", 0.70))
    }
    test = {"difference": 0.09, "low": 0.08, "high": 0.1, "p": 0.001}
    return {
        "baseline": "softmax",
        "chosen": "cosface",
        "beside": "label_smoothing",
        "tuned": tuned,
        "test": test,
        "methods": {"softmax": {"ece": 0.1}, "cosface": {"ece": 0.1}},
        "reported_beside": {
            "cosface - label_smoothing": {**test, "difference": 0.08},
            "label_smoothing - softmax": {**test, "difference": 0.01},
        },
        "asked": {},
        **changes,
    }


def test_nothing_to_doubt() -> None:
    assert caveats(situation()) == []
    assert caveats(situation(test=None)) == []


def test_a_baseline_that_was_better_with_fewer_epochs() -> None:
    found = situation()
    found["tuned"]["softmax"]["rungs"][0]["best"] = 0.68
    (said,) = caveats(found)
    assert said.startswith("softmax was better with fewer epochs: with 50 % of them 68.0 % of ")
    assert "with all 61.0 %; cosface had 60.0 % and 70.0 %." in said
    assert said.endswith("Against a softmax that stops early the gain is not known.")
    answer = {
        "method": "softmax",
        "epochs": 0.5,
        "reweight_at": None,
        "trial": None,
        "optimizer_of": None,
        "scores": [0.66, 0.68],
        "mean": 0.67,
        "chosen_beyond": {"difference": 0.03, "low": 0.01, "high": 0.05},
    }
    (said,) = caveats({**found, "asked": {"half": answer}})
    assert said.endswith(
        "Follow-up: softmax with 50 % of the epochs reaches 67.0 % on the test images; cosface is "
        "+3.00 [+1.00, +5.00] points above it."
    )
    # An answer about something else, or none yet, settles nothing.
    for other in ({"epochs": 1.0, "reweight_at": 0.8}, {"scores": None}, {"method": "cosface"}):
        (said,) = caveats({**found, "asked": {"half": {**answer, **other}}})
        assert said.endswith("the gain is not known.")


def test_a_baseline_that_diverged_in_the_end_was_better_before() -> None:
    found = situation()
    found["tuned"]["softmax"]["rungs"][1]["best"] = None
    (said,) = caveats(found)
    assert "with all diverged" in said


def test_what_label_smoothing_gets_alone() -> None:
    found = situation()
    found["reported_beside"]["label_smoothing - softmax"]["difference"] = 0.04
    assert caveats(found) == [
        "label_smoothing alone gains +4.00 of the +9.00 points; cosface is +8.00 "
        "[+8.00, +10.00] beyond it."
    ]
    for loss in (0.0, -0.02):  # no gain, of which nothing can be a part
        assert caveats({**found, "test": {**found["test"], "difference": loss}}) == []


def test_a_better_method_that_could_not_be_chosen() -> None:
    found = situation()
    found["tuned"]["stability"] = {**found["tuned"]["softmax"], "validation": 0.72}
    sentence = (
        "stability, which is no margin method and in no test, had the best validation score: "
        "72.0 %, cosface 70.0 %, softmax 61.0 %."
    )
    assert caveats(found) == [sentence]
    answer = {
        "method": "stability",
        "epochs": 1.0,
        "reweight_at": None,
        "trial": None,
        "optimizer_of": None,
        "scores": [0.70, 0.72],
        "mean": 0.71,
        "over_baseline": {"difference": 0.08, "low": 0.05, "high": 0.11},
    }
    assert caveats({**found, "asked": {"tested": answer}}) == [
        f"{sentence} Follow-up: stability with its tuned settings reaches 71.0 % on the test "
        "images, +8.00 [+5.00, +11.00] points over softmax."
    ]
    for other in ({"scores": None}, {"method": "softmax"}):
        assert caveats({**found, "asked": {"tested": {**answer, **other}}}) == [sentence]
    # A margin method could have been chosen, one with final runs stands in the table.
    stability = found["tuned"]["stability"]
    assert (
        caveats({**found, "tuned": {**found["tuned"], "stability": {**stability, "margin": True}}})
        == []
    )
    assert caveats({**found, "methods": {**found["methods"], "stability": {}}}) == []
    for worse in (0.70, None):
        stability["validation"] = worse
        assert caveats(found) == []


def test_one_rung_is_no_earlier_one() -> None:
    found = situation()
    for tuned in found["tuned"].values():
        del tuned["rungs"][0]
    assert caveats(found) == []


def test_weights_that_only_one_had() -> None:
    found = situation()
    found["tuned"]["cosface"]["reweight_at"] = 0.8
    (said,) = caveats(found)
    assert said == (
        "cosface has balanced class weights in the last 20 % of the steps and softmax has none. "
        "How much of the gain is the margin's is not known."
    )
    found["tuned"]["softmax"]["reweight_at"] = 0.8
    assert caveats(found) == []


def test_probabilities_that_say_less() -> None:
    found = situation(methods={"softmax": {"ece": 0.04}, "cosface": {"ece": 0.25}})
    (said,) = caveats(found)
    assert "of cosface are less to be trusted" in said
    assert "expected calibration error 25.0 %, softmax 4.0 %" in said
    assert caveats(situation(methods={"softmax": {}, "cosface": {"ece": 0.25}})) == []
    assert caveats(situation(methods={"softmax": {"ece": 0.04}, "cosface": {}})) == []


def test_runs_are_asked_for_in_their_order(tmp_path: Path) -> None:
    """A key of a question is none of the registered runs."""
    protocol = tiny_protocol(tmp_path)
    (question,) = asked(tmp_path, protocol, half=HALF).values()
    records: dict[str, Any] = {}
    while jobs := list(next_jobs(protocol, protocol.situations[NAME], records)):
        for each in jobs:
            records[each.key] = {"score": 0.5, "method": each.method}
    keys = [each.key for each in followup_jobs(protocol, question, records) or []]
    assert keys == [
        f"{NAME}/softmax/asked-half/trial0/seed0",
        f"{NAME}/softmax/asked-half/trial0/seed1",
    ]
    assert not set(keys) & set(records)
    # Of another trial than the one that is left of the tuning; and of a method without final runs.
    more = asked(
        tmp_path,
        protocol,
        other={"situation": NAME, "asked": "?", "method": "softmax", "trial": 2},
        plain={"situation": NAME, "asked": "?", "method": "kobayashi"},
    )
    (first, _), (plain, _) = (
        followup_jobs(protocol, each, records) or [] for each in more.values()
    )
    assert first.key == f"{NAME}/softmax/asked-other/trial2/seed0"
    assert (
        first.config.optimizer != job(protocol, first.task, "softmax", None, 0, 0).config.optimizer
    )
    assert (plain.key, plain.epochs) == (f"{NAME}/kobayashi/asked-plain/trial0/seed0", 2)
    told = conclude(protocol, {}, more)[NAME]["asked"]
    assert changes_text(told["other"]) == "softmax with the settings of trial 2"
    assert changes_text(told["plain"]) == "kobayashi with its tuned settings"


def test_an_answer_stands_between_baseline_and_chosen_method(tmp_path: Path) -> None:
    """0.5 the baseline, 0.6 the answer, 0.9 the chosen method: +10 over one, +30 to the other."""
    protocol = tiny_protocol(tmp_path)
    questions = asked(tmp_path, protocol, half=HALF)
    levels = {"softmax": 0.5, "label_smoothing": 0.4, "cosface": 0.9, "kobayashi": 0.8}

    def record(job: Any, score: float) -> dict[str, Any]:
        noise = 0.001 * (job.seed % 2) * len(job.method)
        facts = {"method": job.method, "status": "finished", "seconds": 1.0, "device": "cpu"}
        return {**facts, "score": score + noise, "torch": "2", "commit": "abc"}

    records: dict[str, Any] = {}
    while jobs := list(next_jobs(protocol, protocol.situations[NAME], records)):
        records |= {each.key: record(each, levels[each.method]) for each in jobs}
    for each in followup_jobs(protocol, questions["half"], records) or []:
        records[each.key] = record(each, 0.6)
    found = conclude(protocol, {NAME: records}, questions)[NAME]
    answer = found["asked"]["half"]
    assert answer["over_baseline"]["difference"] == pytest.approx(0.1, abs=0.01)
    assert answer["chosen_beyond"]["difference"] == pytest.approx(0.3, abs=0.01)
    line = next(row for row in readme({NAME: found}, []).splitlines() if "Stopped early?" in row)
    over, beyond = line.split(" | ")[-2:]
    assert over.startswith("+10.")
    assert beyond.startswith(("+29.", "+30."))


def tuned_apart(protocol: Protocol, levels: dict[str, float]) -> dict[str, Any]:
    """Records of all registered runs; softmax is best with trial 0, CosFace with trial 1."""
    kept = {"cosface": 1}
    records: dict[str, Any] = {}
    while jobs := list(next_jobs(protocol, protocol.situations[NAME], records)):
        for each in jobs:
            score = levels[each.method] + 0.1 * (each.trial == kept.get(each.method, 0))
            # Not the same difference at every seed, of which there is no t-test.
            luck = 0.001 * (each.seed % 2) * (each.method == "cosface")
            records[each.key] = finished(each.method, score + luck)
    return records


def finished(method: str, score: float) -> dict[str, Any]:
    facts = {"method": method, "status": "finished", "device": "cpu", "torch": "2", "commit": "a"}
    return {**facts, "score": score}


def at_equal(tmp_path: Path, *, baseline: float, chosen: float) -> tuple[Protocol, dict[str, Any]]:
    """Softmax 0.6, CosFace 0.8; what they reach with the optimizer settings of the other."""
    protocol = tiny_protocol(tmp_path, seeds=[0, 1, 2, 3])
    levels = {"softmax": 0.5, "label_smoothing": 0.4, "cosface": 0.7, "kobayashi": 0.6}
    records = tuned_apart(protocol, levels)
    entries = {name: {"situation": NAME, **each} for name, each in SWAPPED.items()}
    questions = asked(tmp_path, protocol, **entries)
    for question in questions.values():
        score = baseline if question.method == "softmax" else chosen
        for each in followup_jobs(protocol, question, records) or []:
            records[each.key] = finished(each.method, score + 0.002 * (each.seed % 2))
    return protocol, conclude(protocol, {NAME: records}, questions)[NAME]


def test_runs_with_the_optimizer_settings_of_another_method(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    records = tuned_apart(
        protocol, {"softmax": 0.5, "label_smoothing": 0.4, "cosface": 0.7, "kobayashi": 0.6}
    )
    entries = {name: {"situation": NAME, **each} for name, each in SWAPPED.items()}
    questions = asked(tmp_path, protocol, **entries)
    one, other = (
        (followup_jobs(protocol, each, records) or [])[0].config for each in questions.values()
    )
    situation = protocol.situations[NAME]
    softmax = job(protocol, situation, "softmax", None, 0, 0).config
    cosface = job(protocol, situation, "cosface", None, 1, 0).config
    assert softmax.optimizer != cosface.optimizer
    assert (one.objective, one.optimizer) == (softmax.objective, cosface.optimizer)
    assert (other.objective, other.optimizer) == (cosface.objective, softmax.optimizer)


@pytest.mark.parametrize(
    ("baseline", "chosen", "whose", "gain"),
    [
        (0.5, 0.9, "each its own", 0.2),
        (0.7, 0.9, "cosface", 0.1),
        (0.7, 0.65, "softmax", 0.05),
    ],
)
def test_the_smallest_gain_is_advertised(
    tmp_path: Path, baseline: float, chosen: float, whose: str, gain: float
) -> None:
    protocol, found = at_equal(tmp_path, baseline=baseline, chosen=chosen)
    assert found["verdict"] == found["advice"] == "winner"
    assert found["advertised"]["optimizer"] == whose
    assert found["advertised"]["difference"] == pytest.approx(gain, abs=0.002)
    (preset,) = preset_entries(protocol, {NAME: found}, "x").values()
    assert preset["compared"]["difference"] == found["advertised"]["difference"]
    assert preset["compared"]["registered"] == found["test"]["difference"]
    assert preset["recommended"]["method"] == "cosface"
    (said,) = (each for each in caveats(found) if "different optimizer" in each)
    shown = (
        "the registered one" if whose == "each its own" else f"that with the settings of {whose}"
    )
    assert f"The smallest, {shown}, is the one shown" in said
    page = readme({NAME: found}, plan(protocol, {}))
    assert "| cosface's: +" in page


@pytest.mark.parametrize(("baseline", "optimizer_of"), [(0.801, "cosface"), (0.5, "softmax")])
def test_a_gain_that_is_the_optimizers_is_no_advice(
    tmp_path: Path, baseline: float, optimizer_of: str
) -> None:
    """Softmax reaches as much with CosFace's settings, or CosFace as little with softmax's."""
    protocol, found = at_equal(tmp_path, baseline=baseline, chosen=0.6)
    assert (found["verdict"], found["advice"]) == ("winner", "no winner")
    (preset,) = preset_entries(protocol, {NAME: found}, "x").values()
    recommended = preset["recommended"]
    assert (preset["status"], recommended["method"]) == ("no winner", "softmax")
    assert recommended["optimizer"] == found["tuned"][optimizer_of]["optimizer"]


def test_without_the_runs_the_registered_gain_stands_and_is_doubted(tmp_path: Path) -> None:
    protocol = tiny_protocol(tmp_path)
    levels = {"softmax": 0.5, "label_smoothing": 0.4, "cosface": 0.7, "kobayashi": 0.6}
    found = conclude(protocol, {NAME: tuned_apart(protocol, levels)})[NAME]
    assert found["advertised"]["optimizer"] == "each its own"
    assert found["advertised"]["difference"] == found["test"]["difference"]
    assert "What is left with equal settings was not measured." in found["doubts"][0]
    assert "cosface's: not run yet; softmax's: not run yet" in readme(
        {NAME: found}, plan(protocol, {})
    )

"""The protocol that was fixed beforehand: whole, fair, and the same as the one that is run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the protocol is a YAML file")

from largemargin_papers.benchmark import Protocol, plan, read_protocol
from largemargin_papers.benchmark.draws import all_trials, dimension_from, trials_of
from largemargin_papers.benchmark.halving import job
from papers.benchmark.tiny import TINY, tiny_protocol

from largemargin import LargeMarginError
from largemargin.losses.base.setting_ranges import Choice, Range

FOLDER = Path(__file__).resolve().parents[3] / "papers" / "benchmark"


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return read_protocol(FOLDER / "protocol.yaml")


def test_the_trials_are_those_that_were_written_down(protocol: Protocol) -> None:
    assert json.loads((FOLDER / "trials.json").read_text()) == all_trials(protocol)


def test_every_method_has_as_many_trials_and_the_same_common_ones(protocol: Protocol) -> None:
    for situation in protocol.situations.values():
        drawn = [trials_of(protocol, situation, protocol.methods[n]) for n in situation.methods]
        common = [[_of_optimizer(trial) for trial in trials] for trials in drawn]
        for trials, shared in zip(drawn, common, strict=True):
            assert len(trials) == protocol.trials == 8
            assert trials[0] == {}
            assert shared == common[0]
            assert [len(each) for each in shared] == [0] + 7 * [3]


def _of_optimizer(trial: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in trial.items() if name.startswith("optimizer.")}


def test_every_part_of_a_range_is_tried_once(protocol: Protocol) -> None:
    rates = sorted(
        trial["optimizer.lr"]
        for trial in trials_of(
            protocol, protocol.situations["cifar10_1"], protocol.methods["softmax"]
        )[1:]
    )
    edges = [0.005 * 60 ** (part / 7) for part in range(8)]
    for low, rate, high in zip(edges, rates, edges[1:], strict=False):
        assert low <= rate <= high


def test_the_registered_numbers(protocol: Protocol) -> None:
    assert [(rung.keep, rung.epochs) for rung in protocol.rungs] == [(8, 0.25), (3, 0.5), (1, 1.0)]
    assert len(protocol.seeds) == 6
    assert len(protocol.situations) == 8
    text = (FOLDER / "PROTOCOL.md").read_text()
    for situation in protocol.situations.values():
        assert f"| `{situation.name}` |" in text
        assert f"| {situation.epochs}, {situation.batch_size} |" in text
        first = situation.methods[0]
        assert first == situation.baseline
        assert not protocol.methods[first].margin


def test_methods_of_a_situation_differ_in_the_objective_and_their_trial_alone(
    protocol: Protocol,
) -> None:
    for situation in protocol.situations.values():
        first = job(protocol, situation, situation.baseline, None, 0, 3)
        for name in situation.methods:
            mine = job(protocol, situation, name, None, 0, 3)
            same = replace(
                mine.config,
                name=first.config.name,
                objective=first.config.objective,
                noise=first.config.noise,
            )
            assert same == first.config


def test_what_a_drawn_trial_changes(protocol: Protocol) -> None:
    situation = protocol.situations["cifar10_corrupted"]
    values = trials_of(protocol, situation, protocol.methods["combined_noisy"])[2]
    config = job(protocol, situation, "combined_noisy", 0, 2, 1001).config
    assert config.noise.level == values["noise.level"]
    assert config.noise.use == "clean_and_noisy"
    assert config.optimizer.lr == values["optimizer.lr"]
    assert config.objective.settings["cosface"]["scale"] == values["objective.cosface.scale"]
    assert config.epochs == 15
    assert config.seed == 1001


def test_ranges() -> None:
    assert dimension_from("x", [0.1, 1.0]) == Range(0.1, 1.0, log=True)
    assert dimension_from("x", [0.2, 1.0]) == Range(0.2, 1.0, log=False)
    assert dimension_from("x", [None, 1.0, 5.0]) == Choice((None, 1.0, 5.0))
    for wrong in ([1.0], [2.0, 1.0], 3):
        with pytest.raises(LargeMarginError, match="the range of x"):
            dimension_from("x", wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [101, 0]}, "must not be those of a rung"),
        ({"trials": 4}, "from 4 trials down to 1"),
        ({"seeds": [0]}, r"two different numbers or more, .* but they are \[0\]"),
        ({"seeds": [0, 1, 1]}, "two different numbers"),
        ({"level": 0.0}, "level must be"),
        ({"power": 1.0}, "power must be"),
        ({"power": 0.01}, "power must be"),
        ({"rungs": [{"keep": 3, "epochs": 1.0, "seeds": [7]}]}, "down to 1"),
        ({"presets": {"few_labels": ["nowhere"]}}, "nowhere"),
        ({"methods": {**TINY["methods"], "odd": {"objective": "cosfase"}}}, "cosface"),
    ],
)
def test_a_protocol_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LargeMarginError, match=message):
        tiny_protocol(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "luck"}, "luck"),
        ({"methods": ["softmax", "cosface"]}, "must have label_smoothing"),
        ({"methods": ["softmax", "label_smoothing", "magic"]}, "magic"),
        ({"baseline": "cosface"}, "own baseline"),
        ({"baseline": "label_smoothing"}, "beside must be another method"),
        ({"methods": ["softmax", "label_smoothing"]}, "has no method to choose"),
        ({"choice_seeds": 3}, "choice_seeds"),
        ({"epoch": 3}, "epochs"),
    ],
)
def test_a_situation_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    situation = {**TINY["situations"]["digits_few"], **changes}
    with pytest.raises(LargeMarginError, match=message):
        tiny_protocol(tmp_path, situations={"digits_few": situation})


def test_the_plan_counts_runs_and_images(tmp_path: Path) -> None:
    (cost,) = plan(tiny_protocol(tmp_path), {})
    # 4 methods x (3 of 1 epoch + 1 of 2 epochs), and 3 final methods x 2 seeds of 2 epochs
    assert cost.runs == 4 * 4 + 6
    assert cost.images == 100 * (4 * (3 * 1 + 2) + 6 * 2)

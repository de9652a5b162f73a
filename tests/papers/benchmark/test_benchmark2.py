"""The second benchmark: its protocol, and every one of its runs, for a moment, on made-up data."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("yaml", reason="the protocol is a YAML file")

from largemargin_papers.benchmark import (
    Protocol,
    next_jobs,
    plan,
    read_protocol,
    read_records,
)
from largemargin_papers.benchmark.assess import assess
from largemargin_papers.benchmark.conclude import conclude
from largemargin_papers.benchmark.corruptions import TEST
from largemargin_papers.benchmark.draws import all_trials, trials_of
from largemargin_papers.benchmark.followups import followup_jobs, swaps
from largemargin_papers.benchmark.halving import (
    PENALTY,
    Job,
    finalist,
    job,
    optimizer_of,
    rung_jobs,
)
from largemargin_papers.benchmark.images import Images
from largemargin_papers.benchmark.linear_probe import logistic_head
from largemargin_papers.benchmark.plan import EFFICIENTNET, by_value
from largemargin_papers.benchmark.protocol import Situation
from largemargin_papers.benchmark.rehearsal import rehearsal
from largemargin_papers.benchmark.run_benchmark import judged_model, trained
from largemargin_papers.benchmark.tables import readme
from papers.benchmark.tiny import TINY, tiny_protocol

from largemargin.app.data.sources.source import in_memory
from largemargin.measuring.accuracy import accuracy_of
from largemargin.measuring.confidence import detect_ood
from largemargin.measuring.retrieval import head_inputs_of
from largemargin.measuring.robust.perturbations import SCALED_32

FOLDER = Path(__file__).resolve().parents[3] / "papers" / "benchmark2"
PROTOCOL = read_protocol(FOLDER / "protocol.yaml")
TUNED = [each for each in PROTOCOL.situations.values() if each.like is None]


def test_the_registered_numbers() -> None:
    text = (FOLDER / "PROTOCOL.md").read_text()
    written = json.dumps(all_trials(PROTOCOL), indent=1) + "\n"
    assert sha256(written.encode()).hexdigest() in text
    assert (PROTOCOL.trials, PROTOCOL.own_trials) == (16, 8)
    assert PROTOCOL.tests == len(TUNED) == 19
    for each in PROTOCOL.situations.values():
        assert f"| `{each.name}` |" in text
        assert f"| {each.epochs}, {each.batch_size} |" in text
    for each in TUNED:
        assert {"softmax", "label_smoothing"} <= {
            name.removesuffix("_noisy") for name in each.baselines
        }
        assert not any(PROTOCOL.methods[name].margin for name in each.baselines)
        assert each.choice_seeds == 2


def test_scales_and_margins_are_written_down() -> None:
    """A default of the library may change; what is registered may not."""
    for method in PROTOCOL.methods.values():
        for path in method.space:
            place, *rest = path.split(".")
            if place == "objective" and rest[1] in ("scale", "margin", "max_margin"):
                given = method.settings.get(rest[0], method.settings)
                assert rest[1] in given, f"{method.name} leaves {path} to the library"


def test_settings_of_protocol_situation_method_and_trial_add_up() -> None:
    situation = PROTOCOL.situations["efficientnet_5"]
    first = job(PROTOCOL, situation, "softmax", None, 0, 10).config
    assert (first.optimizer.name, first.optimizer.lr, first.optimizer.head_lr) == (
        "adamw",
        1e-4,
        0.01,
    )
    assert (first.model.freeze_batch_norm, first.model.freeze) == (True, ())
    assert first.model.options == {"size": 128}
    assert first.geometry_samples == 0
    probe = job(PROTOCOL, situation, "linear_probe", None, 3, 10)
    assert (probe.config.model.freeze, probe.epochs) == (("backbone",), 1)
    assert 1e-7 <= probe.penalty <= 0.03
    drawn = trials_of(PROTOCOL, situation, PROTOCOL.methods["softmax"])[5]
    fifth = job(PROTOCOL, situation, "softmax", None, 5, 10).config
    assert fifth.model.freeze_batch_norm is drawn["model.freeze_batch_norm"]
    assert fifth.optimizer.head_lr == drawn["optimizer.head_lr"]
    text = PROTOCOL.situations["minilm_5"]
    assert job(PROTOCOL, text, "cosface", None, 0, 10).config.model.freeze == ("backbone.words",)
    noisy = job(PROTOCOL, PROTOCOL.situations["cifar10_corruptions"], "mixup_noisy", None, 0, 10)
    assert (noisy.config.data.mixup, noisy.config.noise.level) == (0.2, 0.06)


def test_own_parameters_are_drawn_apart_from_the_optimizers() -> None:
    for situation in TUNED:
        common = PROTOCOL.common_space(situation).keys()
        for name in situation.methods:
            method = PROTOCOL.methods[name]
            trials = trials_of(PROTOCOL, situation, method)
            assert len(trials) == 16
            assert trials[0] == {}
            own = PROTOCOL.own_space(situation, method).keys()
            last = 15 if method.probe == "only" else 8
            if own:
                assert all(each.keys() == own for each in trials[16 - last :])
            assert all(each.keys() == common for each in trials[1 : 16 - last if own else 16])


def test_the_page_is_that_of_the_records() -> None:
    records = {
        name: read_records([FOLDER / "measured" / f"{name}.jsonl"]) for name in PROTOCOL.situations
    }
    every = {key: each for one in records.values() for key, each in one.items()}
    costs = plan(PROTOCOL, every)
    page = readme(conclude(PROTOCOL, records), costs, "benchmark2")
    assert (FOLDER / "README.md").read_text() == page


def test_the_plan_begins_with_what_is_worth_most_a_minute() -> None:
    costs = by_value(PROTOCOL, plan(PROTOCOL, {}))
    worth = [PROTOCOL.situations[each.situation].value / each.seconds for each in costs]
    tuned = worth[: PROTOCOL.tests]
    assert tuned == sorted(tuned, reverse=True)
    assert all(PROTOCOL.situations[each.situation].like for each in costs[PROTOCOL.tests :])


# Choice and conclusions, on a protocol of two situations of which one tries the other's settings.
NAME = "digits_few"


@pytest.fixture
def two(tmp_path: Path) -> Protocol:
    situation = {**TINY["situations"][NAME], "baselines": ["softmax", "label_smoothing"]}
    situation["beside"] = "label_smoothing"
    tried = {**situation, "like": NAME, "baselines": [], "title": "Elsewhere"}
    return tiny_protocol(
        tmp_path,
        trials=4,
        own_trials=2,
        rungs=[
            {"keep": 4, "epochs": 0.5, "seeds": [101]},
            {"keep": 1, "epochs": 1, "seeds": [102]},
        ],
        seeds=[0, 1, 2, 3],
        situations={NAME: situation, "elsewhere": tried},
    )


LEVELS = {"softmax": 0.5, "label_smoothing": 0.6, "cosface": 0.8, "kobayashi": 0.7}


def filled(protocol: Protocol, gains: dict[str, float] | None = None) -> dict[str, Any]:
    """Records of all registered runs; the last trial is the best, of label smoothing the first."""
    records: dict[str, Any] = {}

    def add(each: Job, score: float) -> None:
        number = list(LEVELS).index(each.method) + 2 * each.stage.startswith("asked")
        noise = 0.001 * ((each.seed + 1) ** 2 * (number + 2) % 7)
        facts = {"method": each.method, "status": "finished", "device": "cpu", "torch": "2"}
        records[each.key] = {**facts, "commit": "a", "score": score + noise}

    for situation in protocol.situations.values():
        while jobs := list(next_jobs(protocol, situation, records)):
            for each in jobs:
                better = -0.01 if each.method == "label_smoothing" else 0.01
                add(each, LEVELS[each.method] + better * each.trial)
        for question in swaps(protocol, situation, records).values():
            for each in followup_jobs(protocol, question, records) or []:
                add(each, LEVELS[each.method] + (gains or {}).get(question.name, 0.0))
    return records


def test_own_trials_have_the_best_optimizer_before_them(two: Protocol) -> None:
    situation, records = two.situations[NAME], {}
    first = rung_jobs(two, situation, "cosface", records, 0) or []
    assert [each.trial for each in first] == [0, 1]
    assert [each.trial for each in rung_jobs(two, situation, "softmax", records, 0) or []] == [
        0,
        1,
        2,
        3,
    ]
    records = {each.key: {"score": 0.1 * each.trial} for each in first}
    assert rung_jobs(two, situation, "cosface", records, 1) is None
    *_, third, fourth = rung_jobs(two, situation, "cosface", records, 0) or []
    best = optimizer_of(job(two, situation, "cosface", 0, 1, 101))
    assert optimizer_of(third) == optimizer_of(fourth) == best
    assert best != optimizer_of(job(two, situation, "cosface", 0, 0, 101))
    assert third.config.objective != fourth.config.objective
    records |= {third.key: {"score": 0.9}, fourth.key: {"score": 0.2}}
    (kept,) = rung_jobs(two, situation, "cosface", records, 1) or []
    assert (kept.trial, optimizer_of(kept)) == (2, best)


def test_the_gain_has_to_remain_beyond_every_baseline(two: Protocol) -> None:
    records = filled(two)
    found = conclude(two, {NAME: records})[NAME]
    assert set(found["against"]) == {"softmax", "label_smoothing"}
    assert (found["chosen"], found["baseline"], found["beside"]) == (
        "cosface",
        "label_smoothing",
        "softmax",
    )
    hardest = found["against"]["label_smoothing"]
    assert found["test"]["difference"] == hardest["difference"] < 0.25
    assert found["test"]["p"] == max(each["p"] for each in found["against"].values())
    # As good as one of them is not better than all of them.
    for key, each in records.items():
        if "/label_smoothing/final/" in key:
            each["score"] += 0.3
    worse = conclude(two, {NAME: records})[NAME]
    assert (worse["test"]["p"], worse["verdict"]) == (1.0, "no winner")
    assert worse["against"]["softmax"]["difference"] > 0.2


def test_the_smallest_of_all_swapped_gains_is_advertised(two: Protocol) -> None:
    questions = swaps(two, two.situations[NAME], filled(two))
    assert set(questions) == {
        "softmax_at_cosface",
        "cosface_at_softmax",
        "label_smoothing_at_cosface",
        "cosface_at_label_smoothing",
    }
    plain = conclude(two, {NAME: filled(two)})[NAME]
    assert plain["advice"] == "winner"
    lifted = conclude(two, {NAME: filled(two, {"softmax_at_cosface": 0.25})})[NAME]
    assert lifted["advertised"]["optimizer"] == "cosface"
    assert lifted["advertised"]["difference"] == pytest.approx(0.08, abs=0.02)
    fallen = conclude(two, {NAME: filled(two, {"cosface_at_softmax": -0.35})})[NAME]
    assert fallen["advertised"]["difference"] < 0
    assert (fallen["verdict"], fallen["advice"]) == ("winner", "no winner")
    # Without these runs there is no advice.
    waiting = {key: each for key, each in filled(two).items() if "/asked-" not in key}
    assert conclude(two, {NAME: waiting})[NAME]["advice"] == "no winner"


def test_settings_are_tried_elsewhere_unchanged(two: Protocol) -> None:
    records = filled(two)
    elsewhere = two.situations["elsewhere"]
    tried = [each for each in records if each.startswith("elsewhere/")]
    assert len(tried) == 3 * 4
    assert all("/final/" in each for each in tried)
    trial, _ = finalist(two, elsewhere, "cosface", records) or (None, None)
    here, there = (
        job(two, situation, "cosface", None, trial, 0, records).config
        for situation in (two.situations[NAME], elsewhere)
    )
    assert (here.objective, here.optimizer) == (there.objective, there.optimizer)
    found = conclude(two, {NAME: records, "elsewhere": records})
    assert found["elsewhere"]["test"]["corrected"] == found["elsewhere"]["test"]["p"]
    assert found["elsewhere"]["advice"] == "winner", found["elsewhere"]
    assert "## On other data" in readme(found, plan(two, records))


# Every run, for a moment.
def pictures(draw: np.random.Generator, count: int, classes: int, *shape: int) -> Any:
    labels = np.arange(count) % classes
    light = (labels * (150 // classes)).reshape(-1, *[1] * len(shape))
    return (draw.integers(0, 100, (count, *shape)) + light).astype(np.uint8), labels


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)

    def save(name: str, **arrays: Any) -> None:
        np.savez(folder / f"{name}.npz", **arrays)

    for name, classes, shape in (
        ("cifar10", 10, (16, 16, 3)),
        ("cifar100", 100, (16, 16, 3)),
        ("svhn", 10, (16, 16, 3)),
        ("fashion_mnist", 10, (16, 16)),
    ):
        arrays = {}
        for split, count in (("train", 10 * classes if classes > 10 else 700), ("test", 300)):
            found = pictures(draw, count, classes, *shape)
            arrays |= dict(zip((f"{split}_images", f"{split}_labels"), found, strict=True))
        save(name, **arrays)
    wrong = draw.integers(0, 10, 700)
    save("cifar10n", worse_label=wrong, aggre_label=np.arange(700) % 10)
    save("cifar100n", noisy_label=draw.permutation(1000) % 100)
    names = np.array([f"alphabet{number // 2}/character{number % 2}" for number in range(24)])
    marks, kinds = pictures(draw, 96, 24, 16, 16)
    save("omniglot", images=marks, labels=kinds, names=names, evaluation=np.arange(24) >= 20)
    for name, classes, shape in (
        ("clinc150", 150, (1, 1, 8)),
        ("trec", 6, (1, 1, 8)),
        ("letters", 26, (1, 4, 4)),
    ):
        arrays = {"classes": np.arange(classes).astype(str)}
        for split, count in (("train", 4 * classes), ("imbalanced", 320), ("validation", 150)):
            labels = np.arange(count) % classes
            arrays[f"{split}_labels"] = labels
            arrays[f"{split}_inputs"] = draw.integers(0, 20, (count, *shape)) + labels.reshape(
                -1, 1, 1, 1
            )
        arrays["test_inputs"], arrays["test_labels"] = arrays["validation_inputs"], labels
        for split in ("validation_ood", "test_ood"):
            arrays[f"{split}_inputs"] = draw.integers(200, 400, (20, *shape))
        save(name, **arrays)
    return Images({file.stem: str(file) for file in folder.iterdir()}, 100)


SHORT = rehearsal(PROTOCOL)


def small(name: str) -> Situation:
    """Without the pretrained networks, which have tests of their own."""
    situation = SHORT.situations[name]
    model, data = dict(situation.model), dict(situation.data)
    if model["name"] == EFFICIENTNET:
        model = {"name": "small_cnn"}
    elif "." in model["name"]:
        model = {"name": "mlp", "options": {"hidden": [16]}}
    data.pop("fraction", None)
    few = None if situation.images is None else min(situation.images, 200)
    if "letters" in name:
        few = 52
    if name.startswith(("minilm_", "trec")) and few is not None:
        few = 300 if name.startswith("minilm_") else 24
    return replace(
        situation, model=model, data=data, images=few, unseen=(3, 2) if situation.unseen else ()
    )


def ran(each: Job, images: Images, folder: Path) -> Iterator[Any]:
    jobs = partial(next, iter([each]), None)
    for ended, outcome in trained(jobs, images, folder=folder, device="cpu", side_by_side=1):
        assert ended is each
        assert outcome.error is None or outcome.divergence is not None, outcome.error
        yield outcome


def score_of(name: str, method: str, trial: int, images: Images, folder: Path) -> dict[str, Any]:
    situation = small(name)
    protocol = replace(SHORT, situations={**SHORT.situations, name: situation})
    each = job(protocol, situation, method, None, trial, 0)
    task = images.task(situation, 0, "test")
    found: dict[str, Any] = {}
    for outcome in ran(each, images, folder):
        if outcome.divergence is None:
            found = assess(
                judged_model(each, outcome.trainer),
                task.judged,
                score=situation.score,
                split="test",
                precision="fp32",
                validation=task.validation,
                ood=task.ood,
            )
    return found


KINDS = [
    ("efficientnet_5", "linear_probe"),
    ("efficientnet_5", "cosface_probe"),
    ("minilm_imbalanced", "vs_loss"),
    ("minilm_ood", "logit_norm"),
    ("cifar100_5", "odn"),
    ("cifar10n_worst", "early_stopping"),
    ("cifar10_lt", "softmax_drw"),
    ("cifar100_unseen", "elasticface"),
    ("omniglot", "adaface"),
    ("cifar10_ood", "cosface"),
    ("cifar10_corruptions", "mixup_noisy"),
    ("cifar10_corruptions", "cosface_stability"),
    ("letters_10", "lm_softmax"),
    ("trec_10", "probe_then_tune"),
]
REST = [
    (situation.name, method)
    for situation in PROTOCOL.situations.values()
    for method in situation.methods
    if (situation.name, method) not in KINDS
]


@pytest.mark.parametrize(("name", "method"), KINDS)
def test_one_run_of_every_kind(name: str, method: str, images: Images, tmp_path: Path) -> None:
    found = score_of(name, method, 2, images, tmp_path)
    assert 0 <= found["score"] <= 1
    assert list(tmp_path.iterdir()) == []
    if name == "cifar10_corruptions":
        assert found["score"] == pytest.approx(sum(found[each] for each in UNDER) / len(UNDER))
    if name == "cifar10_ood":
        assert found["score"] == (found["ood_auroc cifar100"] + found["ood_auroc svhn"]) / 2


UNDER = (*TEST, *SCALED_32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), REST)
def test_every_run(name: str, method: str, images: Images, tmp_path: Path) -> None:
    found = score_of(name, method, 2, images, tmp_path)
    assert not found or 0 <= found["score"] <= 1


def test_a_linear_probe_is_the_regression_on_the_frozen_features(
    images: Images, tmp_path: Path
) -> None:
    situation = small("efficientnet_5")
    each = job(SHORT, situation, "linear_probe", None, 2, 0)
    assert each.penalty == trials_of(SHORT, situation, SHORT.methods["linear_probe"])[2][PENALTY]
    for outcome in ran(each, images, tmp_path):
        model, samples = outcome.trainer.bare, images.task(situation, 0, "test").data.train
        features, labels = head_inputs_of(model, samples)
        weight, bias = logistic_head(features.double(), labels, 100, each.penalty)
        torch.testing.assert_close(model.head.weight.double(), weight, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model.head.bias.double(), bias, rtol=1e-3, atol=1e-3)
        assert sum(each.requires_grad for each in model.parameters()) == 2


def test_early_stopping_judges_the_epoch_that_was_best(images: Images, tmp_path: Path) -> None:
    situation = replace(small("cifar10n_worst"), epochs=4)
    protocol = replace(SHORT, situations={**SHORT.situations, situation.name: situation})
    each = job(protocol, situation, "early_stopping", None, 0, 0)
    for outcome in ran(each, images, tmp_path):
        best = outcome.trainer.best["accuracy"]
        held_out = images.task(situation, 0, "test").validation
        found = accuracy_of(judged_model(each, outcome.trainer), held_out)
        assert found.accuracy == pytest.approx(best)
        assert judged_model(each, outcome.trainer) is outcome.trainer.best_model
        plain = job(protocol, situation, "softmax", None, 0, 0)
        assert judged_model(plain, outcome.trainer) is outcome.trainer.bare


def test_classes_of_the_test_are_never_trained_on(images: Images) -> None:
    situation = small("cifar100_unseen")
    trained_on = []
    for seed in (0, 1):
        task = images.task(situation, seed, "validation")
        assert len(task.data.classes) == 95
        assert len(set(task.judged.labels.tolist())) == 2
        trained_on.append(set(task.data.classes))
    assert trained_on[0] != trained_on[1]
    tests = [images.task(situation, seed, "test").judged for seed in (0, 1)]
    assert torch.equal(tests[0].pixels, tests[1].pixels)
    assert len(set(tests[0].labels.tolist())) == 3


def test_labels_held_out_are_as_wrong_as_those_trained_on(images: Images) -> None:
    situation = replace(small("cifar10n_worst"), images=None)
    task = images.task(situation, 5, "validation")
    every = [*task.data.train.ids, *images.made["cifar10n_worst", 5]["validation"].ids]
    assert len(set(every)) == 700
    with np.load(images.file("cifar10n")) as file:
        wrong = file["worse_label"]
    for samples in (task.data.train, task.judged):
        rows = [int(name.rpartition("/")[2]) for name in samples.ids]
        assert samples.labels.tolist() == wrong[rows].tolist()
    test = images.task(situation, 5, "test").judged
    assert test.labels.tolist() == [int(name.rpartition("/")[2]) % 10 for name in test.ids]


def test_ood_data_of_the_validation_are_other_classes(images: Images) -> None:
    task = images.task(small("cifar10_ood"), 0, "test")
    assert task.ood["validation"].keys() == {"cifar100"}
    assert task.ood["test"].keys() == {"cifar100", "svhn"}
    assert images.task(small("cifar10_ood"), 0, "validation").ood.keys() == {"validation"}
    whole = images.made["cifar10_ood", 0]["ood"]
    # Half of 100 classes, of 1,000 training and 300 test images.
    assert len(whole["validation"]["cifar100"]) == 500
    assert len(whole["test"]["cifar100"]) == 150


def test_the_score_of_confidence_is_chosen_on_validation_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3))
    known, held_out, other, strange = (
        in_memory("x", torch.rand(60, 1, 2, 2) + shift, torch.zeros(60))
        for shift in (0.3, 0.3, 0.0, -0.3)
    )
    ood = {"validation": {"other": other}, "test": {"strange": strange}}
    given = {"score": "ood_auroc", "split": "test", "precision": "fp32"}
    found = assess(model, known, **given, validation=held_out, ood=ood)
    by = detect_ood(model, held_out, other).auroc
    assert found["ood_score"] == max(by, key=lambda name: by[name])
    expected = detect_ood(model, known, strange)
    assert found["score"] == expected.auroc[found["ood_score"]]
    assert found["ood_fpr95"] == expected.fpr95[found["ood_score"]]
    assert len(set(expected.auroc.values())) > 1


def test_a_logistic_head_is_scikit_learns() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="the reference")
    draw = np.random.default_rng(0)
    labels = np.arange(120) % 4
    features = draw.normal(size=(120, 6)) + np.eye(4, 6)[labels] * 2 + 5
    penalty = 1e-3
    size = penalty * (features**2).sum(1).mean()
    theirs = linear_model.LogisticRegression(C=1 / (size * 120), tol=1e-8, max_iter=5000)
    theirs.fit(features, labels)
    weight, bias = logistic_head(torch.from_numpy(features), torch.from_numpy(labels), 4, penalty)
    mine = (torch.from_numpy(features) @ weight.T + bias).softmax(1).numpy()
    np.testing.assert_allclose(mine, theirs.predict_proba(features), atol=2e-3)

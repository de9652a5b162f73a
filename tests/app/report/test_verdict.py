"""Verdicts follow their rules, and advice what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from app.data.pictures import class_folders
from app.report.made import geometry, trained
from app.report.reading import Page

import largemargin as lm
from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.report.charts import Chart
from largemargin.app.report.judgements import (
    accuracy,
    advise,
    calibration,
    class_margin,
    collapsed_tail,
    comparable,
    difference,
    graded,
    judge,
)
from largemargin.app.report.page import report
from largemargin.app.report.report_models import (
    ReportModel,
    ReportModels,
    is_softmax,
    read_models,
)
from largemargin.app.report.sections.robustness import robustness_section
from largemargin.app.report.sections.verdicts import against, compared, glance, verdict_section
from largemargin.app.training import NoiseConfig, ObjectiveConfig, Run, RunConfig
from largemargin.measuring import EvaluationConfig, evaluate


def measured(**changes: object) -> ReportModel:
    found = geometry()
    parts = {k: changes.pop(k) for k in list(changes) if k in ("accuracy", "samples", "loss")}
    prototypes = changes.pop("prototypes", {})
    made = replace(
        found,
        **parts,
        prototypes=replace(found.prototypes, **prototypes),  # type: ignore[arg-type]
    )
    return ReportModel("model", made, ("a", "b", "c"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "level"), [(0.95, "green"), (0.9, "green"), (0.89, "amber"), (0.69, "red")]
)
def test_class_margin_is_a_share_of_what_is_possible(share: float, level: str) -> None:
    given = measured(prototypes={"class_margin": 100 * share, "reachable": 100.0, "ceiling": 120.0})
    found = class_margin(given)
    assert found.level == level
    assert "of 100.00°" in found.detail


def test_the_ceiling_stands_in_for_an_unknown_packing() -> None:
    given = measured(prototypes={"class_margin": 60.0, "reachable": float("nan"), "ceiling": 120.0})
    assert class_margin(given).level == "red"


@pytest.mark.parametrize(
    ("own", "level"), [(0.90, "green"), (0.91, "green"), (0.89, "amber"), (0.80, "red")]
)
def test_accuracy_against_the_baseline(own: float, level: str) -> None:
    base = measured(accuracy=0.90, samples=1000)
    assert accuracy(measured(accuracy=own, samples=1000), base).level == level


@pytest.mark.parametrize(
    ("own", "low", "high"),
    [(0.89, -0.0370, 0.01697), (0.93, 0.00553, 0.05467), (0.9, -0.02642, 0.02642)],
)
def test_a_difference_has_an_interval(own: float, low: float, high: float) -> None:
    """Newcombe's: from Wilson's intervals, 0.8798 to 0.9171 for 900 of 1000."""
    base, given = (
        measured(accuracy=0.90, samples=1000),
        measured(accuracy=own, samples=1000),
    )
    assert difference(given, base) == pytest.approx((low, high), abs=2e-5)
    clear = not low <= 0 <= high
    assert ("no clear difference" in against(given, base).detail) is not clear


def test_a_model_of_other_images_is_not_held_against_the_baseline() -> None:
    def tested(digest: str) -> dict[str, object]:
        return {"record": {"digests": {"test": digest}}}

    base = measured(accuracy=0.9, samples=1000, data=tested("one"), baseline=True)
    same = measured(accuracy=0.8, samples=1000, data=tested("one"))
    other = measured(accuracy=0.8, samples=1000, data=tested("two"))
    unknown = measured(accuracy=0.8, samples=1000)
    assert [comparable(each, base) for each in (same, other, unknown, base)] == [
        *(True, False, True, False)
    ]
    assert judge(same, base)[0].rule != judge(other, base)[0].rule
    base, same, other = (replace(m, name=n) for m, n in ((base, "b"), (same, "s"), (other, "o")))
    assert shown(base, same, other)["against baseline"] == ["–", "-10.00", "–"]


def shown(*models: ReportModel) -> dict[str, list[str]]:
    """The first table of the page, by column."""
    base = next((model for model in models if model.baseline), None)
    judged = {model.name: {each.name: each for each in judge(model, base)} for model in models}
    table = glance(ReportModels(models), judged)
    columns = zip(*table.rows, strict=True)
    return {
        name: [cell.text for cell in column]
        for name, column in zip(table.columns, columns, strict=True)
    }


def test_what_changed_is_the_difference_of_the_numbers_above() -> None:
    base = measured(accuracy=0.90, samples=1000, baseline=True, prototypes={"class_margin": 70.0})
    given = replace(
        measured(
            accuracy=0.95,
            samples=1000,
            prototypes={"class_margin": 80.5},
            config=RunConfig(objective=ObjectiveConfig("cosface + 0.5*sample_margin")),
        ),
        name="wide",
    )
    base = replace(base, name="softmax")
    assert shown(base, given)["against baseline"] == ["–", "+5.00"]
    assert shown(base, given)["class margin"] == ["70.00°", "80.50°"]
    change = against(given, base)
    assert change.detail.endswith(", more accurate")
    assert change.strong
    (note,) = compared(ReportModels((base, given)))
    assert "--methods 'cosface + 0.5*sample_margin'" in note.command
    assert compared(ReportModels((given,))) == []
    assert "against baseline" not in shown(given)
    # Another run of softmax is no method, and one without accuracy has nothing to compare.
    again = replace(given, config=RunConfig())
    (note,) = compared(ReportModels((base, again)))
    assert "--methods NAME " in note.command
    unknown = replace(given, geometry=None)
    assert compared(ReportModels((base, unknown))) == []


def test_a_run_that_was_not_measured_knows_its_test_images() -> None:
    data = {"record": {"images": {"train": 100, "test": 40}}}
    given = ReportModel("m", None, ("a", "b"), result={"test": {"accuracy": 0.75}}, data=data)
    assert given.samples == 40
    assert accuracy(given, None).detail == "59.81 to 85.81 %"


@pytest.mark.parametrize(("own", "level"), [(0.95, "green"), (0.7, "amber"), (0.4, "red")])
def test_accuracy_alone_is_measured_from_guessing(own: float, level: str) -> None:
    assert accuracy(measured(accuracy=own), None).level == level


def test_graded_at_its_borders() -> None:
    assert [graded(v, 0.9, 0.7) for v in (0.9, 0.7, 0.6999)] == ["green", "amber", "red"]


def test_what_was_not_measured_is_unknown_and_names_a_command() -> None:
    bare = ReportModel("model", None, ("a", "b"))
    for each in judge(bare, None):
        assert each.level == "unknown"
        assert each.command.startswith("largemargin ") or each.name == "Accuracy"


def test_calibration_tells_which_way() -> None:
    given = measured()
    assert given.geometry is not None
    bins = replace(
        given.geometry.calibration,
        expected_error=0.2,
        counts=(10,),
        confidence=(0.9,),
        accuracy=(0.7,),
    )
    given = replace(given, geometry=replace(given.geometry, calibration=bins))
    found = calibration(given)
    assert found.level == "red"
    assert "overconfident by 20.00 %" in found.detail
    options = [each.option for each in advise(given, ReportModels((given,)))]
    assert "--objective label_smoothing" in options


def test_a_collapsed_tail_is_found() -> None:
    angles = ((0.0, 80.0, 85.0), (80.0, 0.0, 10.0), (85.0, 10.0, 0.0))
    record = {"counts": {"train": {"a": 100, "b": 50, "c": 5}}}
    given = measured(prototypes={"angles": angles}, data={"record": record})
    assert collapsed_tail(given) == (10.0, 80.0)
    found = advise(given, ReportModels((given,)))
    assert "tail classes have collapsed" in found[0].seen
    assert "zero_centroid" in found[0].option
    even = {"counts": {"train": {"a": 50, "b": 50, "c": 50}}}
    assert collapsed_tail(replace(given, data={"record": even})) is None


def test_advice_does_not_repeat_what_is_there() -> None:
    config = RunConfig(objective=ObjectiveConfig("cross_entropy + 0.5*discriminative"))
    given = measured(config=config)
    assert given.geometry is not None
    assert given.geometry.compactness is not None
    wide = replace(given.geometry.compactness, ideal_ratio=3.0)
    given = replace(given, geometry=replace(given.geometry, compactness=wide))
    found = [each for each in advise(given, ReportModels((given,))) if "wider" in each.seen]
    assert found[0].option == ""
    plain = replace(given, config=RunConfig())
    found = [each for each in advise(plain, ReportModels((plain,))) if "wider" in each.seen]
    assert found[0].option == "--objective 'cross_entropy + discriminative'"


def test_advice_knows_what_losses_do() -> None:
    """None has to be advised that is there: losses say themselves what they do."""
    assert {name for name, loss in lm.LOSSES.items() if loss.widens_margins} == {
        *("adaface", "arcface", "biased_softmax", "cosface", "curricularface", "elasticface"),
        *("gm_softmax", "kobayashi", "ldam", "lm_softmax", "lsoftmax", "magface", "sample_margin"),
        *("sphereface", "unified_margin"),
    }
    assert {name for name, loss in lm.LOSSES.items() if loss.gathers_classes} == {
        *("center", "compactness", "discriminative", "robust_discriminative"),
        "stable_discriminative",
    }


@pytest.mark.parametrize(
    ("config", "baseline"),
    [
        (RunConfig(), True),
        (RunConfig(objective=ObjectiveConfig("softmax")), True),
        (RunConfig(objective=ObjectiveConfig("cosface")), False),
        (RunConfig(objective=ObjectiveConfig("sample_margin")), False),
        (RunConfig(noise=NoiseConfig(use="noisy")), False),
    ],
)
def test_plain_softmax_is_the_baseline(config: RunConfig, baseline: bool) -> None:
    assert is_softmax(config) is baseline


def test_measuring_again_does_not_lose_what_was_measured() -> None:
    given = measured()
    assert given.geometry is not None
    plain = given.measure_command("--curvature true")
    assert plain == "largemargin measure RUN --curvature true --out RUN/geometry.json"
    given = replace(given, geometry=replace(given.geometry, bounds=()))
    assert "--bounds true --curvature true" in given.measure_command("--curvature true")
    assert given.measure_command("--bounds true").count("--bounds") == 1


def test_measuring_again_names_the_layers_that_were_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    data = [(torch.randn(20, 4), torch.arange(20) % 2)]
    found = lm.measure(model, data, layers=["0", "1"], layer_margins=["input"])
    said = replace(measured(), geometry=found).measure_command("--bounds true")
    assert " --layers 0,1 --layer_margins input --bounds true --out " in said


def test_commands_can_be_typed_where_folders_have_spaces() -> None:
    given = measured(run=Run("my runs/first one"))
    assert given.shell_path == "'my runs/first one'"


def test_a_temperature_is_told_and_drawn() -> None:
    """What it does to the calibration stands beside the calibration as it is."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    torch.nn.init.constant_(model[1].weight, 0.0)
    model[1].weight.data[0, 0] = 20.0
    images = torch.rand(60, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(60) % 3 == 0).long()
    config = EvaluationConfig(perturbations="none", gaussian=(), uniform=(), attacks=())
    found = evaluate(model, [(images, labels)], config=config, temperature=8.0)
    plain = replace(found, temperature=None, calibrated=None)
    assert found.calibrated is not None
    said = calibration(replace(measured(), evaluation=found)).detail
    error = f"{100 * found.calibrated.expected_error:.2f} %"
    assert said.endswith(f"; {error} with temperature 8")
    assert "temperature" not in calibration(replace(measured(), evaluation=plain)).detail
    for evaluation, names in (
        (found, ["calibrated", "model", "model, temperature 8"]),
        (plain, ["calibrated", "model"]),
    ):
        section = robustness_section(ReportModels((replace(measured(), evaluation=evaluation),)))
        (chart,) = [each for each in section.blocks if getattr(each, "key", "") == "calibration"]
        assert isinstance(chart, Chart)
        assert [each.name for each in chart.series] == names
        assert [each.dash for each in chart.series] == ["dash", "solid", "dot"][: len(names)]


def evaluated(wrong: float, **changes: object) -> ReportModel:
    """Ten classes, of whose images this share is taken for another class."""
    weight = torch.eye(10)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(10, 10, bias=False))
    model[1].weight.data = weight
    labels = torch.arange(400) % 10
    shown = torch.where(torch.arange(400) < 400 * wrong, (labels + 1) % 10, labels)
    images = torch.nn.functional.one_hot(shown, 10).float().view(400, 1, 2, 5)
    config = EvaluationConfig(
        perturbations="none", gaussian=(0.001,), uniform=(), attacks=(), draws=1
    )
    found = evaluate(model, [(images, labels)], config=config, progress=False)
    names = tuple(map(str, range(10)))
    return ReportModel("model", None, names, evaluation=found, **changes)  # type: ignore[arg-type]


def test_guessing_is_never_good() -> None:
    """7.5 % of ten classes: no class is far below the mean, softmax is no better, noise no harm."""
    guessing, base = evaluated(0.925), evaluated(0.95)
    assert guessing.accuracy == pytest.approx(0.075)
    levels = {each.name: each.level for each in judge(guessing, base)}
    assert (levels["Accuracy"], levels["Worst classes"], levels["Robustness"]) == ("red",) * 3
    assert not any(
        "perturbations" in each.seen for each in advise(guessing, ReportModels((guessing,)))
    )
    good = {each.name: each.level for each in judge(evaluated(0.05), base)}
    assert (good["Accuracy"], good["Worst classes"], good["Robustness"]) == ("green",) * 3


def test_nothing_right_is_measured_all_the_same() -> None:
    """Perturbations of a model that is never right were evaluated: they are not to be again."""
    nothing = {each.name: each for each in judge(evaluated(1.0), None)}["Robustness"]
    assert (nothing.level, nothing.value, nothing.command) == ("red", "0.00 %", "")


def test_a_temperature_is_not_promised() -> None:
    def attempt(**changes: object) -> str:
        given = evaluated(0.4, **changes)
        assert given.evaluation is not None
        given = replace(given, evaluation=replace(given.evaluation, temperature=fitted))
        (found,) = [e for e in advise(given, ReportModels((given,))) if "confident" in e.seen]
        return found.attempt

    fitted: float | None = 2.0
    assert "already use" in attempt()
    fitted = None
    assert "where the validation images allow it" in attempt()
    without = {"record": {"images": {"train": 10, "test": 5}}}
    assert "this model was trained without" in attempt(data=without)
    held_out = {"record": {"images": {"train": 10, "validation": 5}}}
    assert "where the validation images allow it" in attempt(data=held_out)


def without_test_images(folder: Path, data: Path, objective: str) -> Run:
    config = DataConfig("folder", str(data), size=8, augment="none")
    return trained(folder, objective, data=config, model=ModelConfig("mlp"))


def test_validation_images_are_not_called_test_images(tmp_path: Path) -> None:
    """They chose the epoch: they cannot say which model is more accurate."""
    photos = class_folders(tmp_path / "photos", ("a", "b", "c"), 40, height=8, width=8)
    runs = [without_test_images(tmp_path / n, photos, n) for n in ("cross_entropy", "cosface")]
    text = Page(report(runs, tmp_path / "a.html", features="none")).text
    assert "is of the accuracy on 12 validation images." in text
    assert "They also chose the epoch of each model" in text
    assert "on the validation images, which chose the epoch" in text
    assert "test images." not in text


@pytest.mark.parametrize(
    ("split", "says"), [("validation", ", higher"), ("test", ", more accurate")]
)
def test_only_test_images_say_what_is_more_accurate(split: str, says: str) -> None:
    data = {"record": {"digests": {split: "0"}}}
    base = measured(accuracy=0.5, samples=1000, data=data, baseline=True)
    other = replace(measured(accuracy=0.9, samples=1000, data=data), name="other")
    assert against(other, base).detail.endswith(says)
    (note,) = compared(ReportModels((base, other)))
    assert f"1,000 {split} images." in note.text


def test_test_images_are_called_so(softmax: Run, cosface: Run, tmp_path: Path) -> None:
    text = Page(report([softmax, cosface], tmp_path / "a.html", features="none")).text
    assert "540 test images." in text
    assert "chose the epoch" not in text
    assert [model.judged_on for model in read_models([softmax, cosface])] == ["test images"] * 2
    assert read_models(geometry()).models[0].judged_on == "images"


def test_advice_is_said_once_for_all_models_it_is_meant_for() -> None:
    found = geometry()
    assert found.compactness is not None
    wide = replace(found, compactness=replace(found.compactness, ideal_ratio=2.0))
    models = ReportModels(
        tuple(
            ReportModel(
                name, wide, ("a", "b", "c"), config=RunConfig(objective=ObjectiveConfig(name))
            )
            for name in ("cross_entropy", "cosface", "cross_entropy + discriminative")
        )
    )
    (block,) = [each for each in verdict_section(models).blocks if each.kind == "advice"]
    advice = [each for each in block.content if "wider than" in str(each)]  # type: ignore[union-attr]
    assert [[names for names, _ in each["seen"]] for each in advice] == [
        *(["cross_entropy, cosface"], ["cross_entropy + discriminative"])
    ]
    assert advice[0]["options"] == [
        "--objective 'cross_entropy + discriminative'",
        "--objective 'cosface + discriminative'",
    ]


def test_one_advice_for_what_was_seen_of_each_model() -> None:
    rising = [{"epoch": at, "validation": {"accuracy": 0.5 + 0.1 * at}} for at in range(3)]
    faster = [{"epoch": at, "validation": {"accuracy": 0.3 + 0.2 * at}} for at in range(3)]
    models = ReportModels(
        tuple(
            ReportModel(name, None, (), metrics=tuple({"kind": "epoch", **row} for row in rows))
            for name, rows in (("slow", rising), ("fast", faster))
        )
    )
    (block,) = [each for each in verdict_section(models).blocks if each.kind == "advice"]
    (longer,) = block.content  # type: ignore[misc]
    assert longer["seen"] == [
        ("slow", "Accuracy still rose by 10.0 points in the last epoch."),
        ("fast", "Accuracy still rose by 20.0 points in the last epoch."),
    ]
    assert longer["options"] == ["--epochs 6"]


def test_marks_stand_at_what_is_judged() -> None:
    good = measured(accuracy=0.99, samples=1000)
    judged = {"model": {each.name: each for each in judge(good, None)}}
    table = glance(ReportModels((good,)), judged)
    (row,) = table.rows
    cells = dict(zip(table.columns, row, strict=True))
    assert (cells["accuracy"].level, cells["accuracy"].title) == ("green", "good")
    assert cells["perturbed accuracy"].level == ""
    assert set(table.rules) == {
        *("accuracy", "worst class", "class margin", "perturbed accuracy", "calibration error")
    }

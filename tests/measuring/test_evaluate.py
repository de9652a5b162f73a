"""``evaluate`` as a whole: its parts agree with the functions they stand for."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Evaluation,
    EvaluationConfig,
    Search,
    accuracy_of,
    cross_camera,
    detect_ood,
    evaluate,
    head_inputs_of,
    perturbation_suite,
    perturbed_accuracy,
    retrieval_of,
    wilson,
)
from largemargin.measuring.calibration import calibration

N, SIZE, CLASSES = 90, 6, ("cat", "dog", "eel")
QUICK = EvaluationConfig(
    gaussian=(0.2,), uniform=(), draws=2, attacks=(), batch_size=32, recall_at=(1, 4)
)


def data(n: int = N, seed: int = 0) -> Samples:
    """Images whose brightest third says what they show, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    pixels = 0.5 * torch.rand(n, 1, SIZE, SIZE, generator=generator)
    for image, label in zip(pixels, labels, strict=True):
        image[:, 2 * label : 2 * label + 2] += 0.3
    labels[::10] = (labels[::10] + 1) % 3
    return Samples(labels, [f"test/{i}" for i in range(n)], pixels.clamp(0, 1))


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(SIZE * SIZE, 3, bias=False))
    rows = torch.zeros(3, SIZE, SIZE)
    for label in range(3):
        rows[label, 2 * label : 2 * label + 2] = 1.0
    model[2].weight.data = rows.flatten(1)
    return model


def test_parts_are_what_their_functions_find() -> None:
    samples, others, model = data(), data(40, seed=1), net()
    got = evaluate(model, samples, class_names=CLASSES, config=QUICK, ood=others)
    assert got.clean == accuracy_of(model, samples, batch_size=32)
    assert got.interval == wilson(round(got.clean.accuracy * N), N)
    suite = perturbation_suite("auto", (SIZE, SIZE), gaussian=[0.2])
    assert got.perturbed == perturbed_accuracy(model, samples, suite, draws=2)
    assert got.ood == detect_ood(model, samples, others)
    assert got.retrieval == retrieval_of(*head_inputs_of(model, samples), at=(1, 4))
    assert got.settings == dataclasses.asdict(QUICK)
    assert got.notes == ()
    assert model.training
    assert 0.8 < got.clean.accuracy < 1


def test_calibration_with_a_temperature_is_that_of_divided_logits() -> None:
    samples, model = data(), net().eval()
    got = evaluate(model, samples, config=QUICK, temperature=3.0)
    with torch.no_grad():
        probability = torch.softmax(model(samples.pixels).double() / 3, 1)
    confidence, predicted = probability.max(1)
    want = calibration(confidence, predicted == samples.labels, bins=15)
    assert got.calibrated is not None
    assert got.calibrated.expected_error == pytest.approx(want.expected_error)
    assert got.calibrated.expected_error != pytest.approx(got.clean.calibration.expected_error)


def test_nothing_but_accuracy() -> None:
    config = EvaluationConfig(
        perturbations="none", gaussian=(), uniform=(), attacks=(), retrieval=False
    )
    got = evaluate(net(), data(), config=config)
    assert (got.perturbed, got.attacked, got.retrieval, got.ood) == ({}, (), None, None)
    assert got.classes == ("0", "1", "2")
    assert "perturbations" not in str(got)


def test_saved_and_read_back(tmp_path: Path) -> None:
    got = evaluate(net(), data(), config=QUICK, ood=data(9))
    got.save(tmp_path / "new" / "evaluation.json")
    read = Evaluation.load(tmp_path / "new" / "evaluation.json")
    assert read == got
    assert str(read) == str(got)
    assert math.isnan(read.perturbed["down_up"].std)
    assert read.retrieval is not None
    assert list(read.retrieval.recall) == [1, 4]


def test_the_table_says_it_all() -> None:
    got = evaluate(net(), data(), class_names=CLASSES, config=QUICK, ood=data(40, seed=1))
    text, worst = str(got), CLASSES[got.clean.worst_class]
    for line in (
        f"accuracy                  {100 * got.clean.accuracy:.2f} %   (95 % interval:",
        f"worst class               {100 * got.clean.worst:.2f} %   {worst}",
        "  dog  ",
        "  gaussian 0.2 ",
        "  down up occlusion ",
        "mean ± std of 2 draws",
        "  by margin (distance) ",
        "  recall at 4 ",
        "  mean average precision ",
    ):
        assert line in text, f"{line!r} is not in\n{text}"
    widths = {len(line) for line in text.splitlines()}
    assert max(widths) <= 100


def test_a_loader_gives_the_same_as_a_split() -> None:
    samples = data()
    assert samples.pixels is not None
    loader = list(zip(samples.pixels.split(25), samples.labels.split(25), strict=True))
    one, other = (evaluate(net(), each, config=QUICK) for each in (samples, iter(loader)))
    assert other.perturbed == one.perturbed
    assert other.clean.confusion == one.clean.confusion
    assert other.retrieval == one.retrieval


def test_skipped_labels_are_left_out_everywhere() -> None:
    samples = data()
    labels = samples.labels.clone()
    labels[::3] = -100
    kept = labels != -100
    some = dataclasses.replace(samples, labels=labels)
    got = evaluate(net(), some, config=QUICK)
    want = evaluate(net(), samples.subset(kept.nonzero()[:, 0]), config=QUICK)
    assert got.clean.confusion == want.clean.confusion
    assert got.retrieval == want.retrieval
    assert got.perturbed["down_up"] == want.perturbed["down_up"]
    assert got.notes == ("30 samples labelled -100 were skipped",)


def test_inputs_that_are_no_images() -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    got = evaluate(nn.Linear(4, 2), [(x, y)])
    assert got.perturbed == {}
    assert got.notes == ("the inputs are no images: perturbations and attacks left out",)
    alone = evaluate(nn.Linear(4, 2), [(x[:2], y[:2])])
    assert "no class has two samples: retrieval left out" in alone.notes
    assert alone.retrieval is None
    assert evaluate(nn.Linear(4, 2), [(x[:3], y[:3])]).retrieval is not None  # one class has two


def test_attached_cosine_head() -> None:
    model = net()
    lm.attach(model, lm.CosFace(scale=8.0))
    got = evaluate(model, data(), config=QUICK, ood=data(9))
    assert got.ood is not None
    assert got.ood.margin == "cosine"


def test_search_across_cameras() -> None:
    def people(n: int, seed: int) -> Samples:
        samples = data(n, seed)
        cameras = torch.arange(n) % 3
        return dataclasses.replace(samples, labels=samples.labels + 1, extra={"camera": cameras})

    query, gallery = people(10, 3), people(50, 4)
    model = net()
    got = evaluate(model, data(), config=QUICK, search=Search(query, gallery))
    mine, theirs = head_inputs_of(model, query), head_inputs_of(model, gallery)
    want = cross_camera(*mine, query.extra["camera"], *theirs, gallery.extra["camera"])
    assert got.cross_camera == want
    assert "rank 1, rank 5" in str(got)
    with pytest.raises(LargeMarginError, match="query images have no cameras"):
        evaluate(model, data(), config=QUICK, search=Search(data(5), gallery))


def test_the_table_by_hand() -> None:
    """Two cats taken for dogs, an eel for a cat; what is right is not among the confused."""
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    said = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 2])
    true = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2])
    config = EvaluationConfig(perturbations="none", gaussian=(), uniform=(), attacks=())
    got = evaluate(
        model,
        [(2 * torch.eye(3)[said], true)],
        class_names=CLASSES,
        config=dataclasses.replace(config, recall_at=(2,)),
        ood=[torch.ones(5, 3)],
    )
    rows = [re.split(r"\s{2,}", row.strip(), maxsplit=1) for row in str(got).splitlines()]
    found = {row[0]: row[1] for row in rows if len(row) == 2}
    assert found["most confused"] == "cat as dog (2x), eel as cat (1x)"
    assert found["accuracy"].startswith("66.67 %   (95 % interval: 35.42 to 87.94 %)")
    assert found["worst class"] == "50.00 %   eel"
    assert [found[name] for name in CLASSES] == [
        "60.00 %   of 5",
        "100.00 %   of 2",
        "50.00 %   of 2",
    ]
    assert found["by margin (distance)"] == "1.0000   (0.00 %)"
    assert found["by max logit"] == "1.0000   (0.00 %)"
    # Cats find cats; others have two cats before them: equal ones come in their order.
    assert found["recall at 2"] == "55.56 %"


def test_uniform_noise_alone() -> None:
    config = dataclasses.replace(QUICK, gaussian=(), uniform=(0.1,), perturbations="none")
    got = evaluate(net(), data(), config=config)
    assert list(got.perturbed) == ["uniform 0.1"]
    suite = perturbation_suite("none", (SIZE, SIZE), uniform=[0.1])
    assert got.perturbed == perturbed_accuracy(net(), data(), suite, draws=2)


class Sum(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        logits: Tensor = self.head(one + other)
        return logits


def test_inputs_that_are_no_images_are_told() -> None:
    labels = torch.arange(12) % 3
    one, other = torch.rand(12, 4), torch.rand(12, 4)
    got = evaluate(Sum(), [((one, other), labels)], config=QUICK)
    assert (got.clean.samples, got.perturbed) == (12, {})
    assert got.notes == ("the inputs are no images: perturbations and attacks left out",)


class Broken(nn.Module):
    """NaN for dark images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = net()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return torch.where(x.mean((1, 2, 3))[:, None] < 0.33, math.nan, logits)


def test_nan_logits_are_counted_and_told() -> None:
    got = evaluate(Broken(), data(), config=QUICK)
    assert 0 < got.clean.broken < N
    assert got.notes == (f"{got.clean.broken} samples have NaN logits and count as wrong",)
    assert Evaluation.from_json(got.to_json()) == got


def test_features_that_are_no_numbers_leave_out_the_search_alone() -> None:
    samples = data()
    assert samples.pixels is not None
    samples.pixels[3] = math.nan
    got = evaluate(
        net(), samples, config=dataclasses.replace(QUICK, gaussian=(), perturbations="none")
    )
    assert (got.clean.broken, got.retrieval) == (1, None)
    assert "the features of 1 samples are not finite: retrieval left out" in got.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draws": 0}, "draws must be"),
        ({"gaussian": (-1.0,)}, "every level of gaussian noise"),
        ({"perturbations": "road"}, "at most 6"),
        ({"perturbations": "many"}, "perturbations must be one of"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"bins": 0}, "bins must be"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"recall_at": (0,)}, "every k"),
        ({"similarity": "dot"}, "similarity must be one of"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        evaluate(net(), data(), config=dataclasses.replace(QUICK, **change))


def test_bad_data() -> None:
    samples = data()
    assert samples.pixels is not None
    normalised = dataclasses.replace(samples, pixels=(samples.pixels - 0.5) / 0.25)
    with pytest.raises(LargeMarginError, match=r"of \[0, 1\] pixels, but the images reach"):
        evaluate(net(), normalised, config=QUICK)
    with pytest.raises(LargeMarginError, match="data is empty"):
        evaluate(net(), [], config=QUICK)
    with pytest.raises(LargeMarginError, match="given as ood is empty"):
        evaluate(net(), samples, config=QUICK, ood=[])
    with pytest.raises(LargeMarginError, match="logits of 2 classes"):
        evaluate(net(), samples, class_names=["a", "b"], config=QUICK)
    wrong: Any = {"draws": 2}
    with pytest.raises(LargeMarginError, match=r"must be an EvaluationConfig, .* but dict was"):
        evaluate(net(), samples, config=wrong)


def test_progress_shows_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(net(), data(), config=QUICK, progress=True)
    # Three batches: one clean pass, seven perturbations, six of them twice.
    assert "/42 [" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_the_device() -> None:
    """All but random draws, which another kind of device makes otherwise, is as on the CPU."""
    people = dataclasses.replace(data(30), labels=data(30).labels + 1)
    people = dataclasses.replace(people, extra={"camera": torch.arange(30) % 3})
    config = dataclasses.replace(QUICK, attacks=("fgsm",))
    options: dict[str, Any] = {
        "config": config,
        "ood": data(20, 1),
        "search": Search(people, people),
    }
    here = evaluate(net(), data(), **options)
    there = evaluate(net().cuda(), data(), **options)
    assert there.clean.confusion == here.clean.confusion
    assert there.clean.loss == pytest.approx(here.clean.loss, rel=1e-5)
    assert there.perturbed["down_up"] == here.perturbed["down_up"]
    assert there.attacked == here.attacked
    assert there.retrieval == here.retrieval
    assert there.cross_camera == here.cross_camera
    assert there.ood is not None
    assert here.ood is not None
    assert there.ood.auroc == pytest.approx(here.ood.auroc, abs=1e-3)

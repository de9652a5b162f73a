"""Accuracy against scikit-learn and NumPy, for every kind of output, label and loader."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, log_loss, recall_score
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Accuracy,
    accuracy_of,
    attacked_accuracy,
    calibrate_temperature,
    calibrate_threshold,
    perturbed_accuracy,
)
from largemargin.measuring.accuracy import Counts
from largemargin.measuring.batches import ImageBatch
from largemargin.measuring.calibration import calibration
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, columns_of, count_over
from largemargin.measuring.robust import Attack, Perturbation

N, C, D = 61, 5, 7


def problem(classes: int = C) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(D, classes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(classes, (N,), generator=generator)


def batched(x: Tensor, y: Tensor, size: int = 9) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def test_equals_scikit_learn() -> None:
    model, x, y = problem()
    got = accuracy_of(model, batched(x, y))
    probabilities = model(x).softmax(1).detach().numpy()
    predicted, true = probabilities.argmax(1), y.numpy()
    recalls = recall_score(true, predicted, average=None)
    assert got.samples == N
    assert got.accuracy == np.mean(predicted == true)
    assert got.balanced == pytest.approx(balanced_accuracy_score(true, predicted), abs=1e-15)
    assert got.per_class == pytest.approx(tuple(recalls), abs=1e-15)
    assert got.worst == min(got.per_class)
    assert got.worst_class == int(np.argmin(recalls))
    assert np.array_equal(np.array(got.confusion), confusion_matrix(true, predicted))
    assert got.counts == tuple(np.bincount(true))
    assert got.loss == pytest.approx(log_loss(true, probabilities), rel=1e-12)


def test_it_prints_as_a_line_without_the_confusion() -> None:
    model, x, y = problem()
    y[:3], x[3] = -100, math.nan
    got = accuracy_of(model, batched(x, y))
    shown = str(got)
    assert shown.startswith("58 samples, 3 skipped, 1 with NaN logits: accuracy ")
    assert f"worst class {got.worst_class} with {100 * got.worst:.2f} %, cross entropy" in shown
    assert "\n" not in shown
    assert "confusion" not in shown


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_is_that_of_all_samples_at_once(bins: int) -> None:
    model, x, y = problem()
    got = accuracy_of(model, batched(x, y), bins=bins)
    confidence, predicted = model(x).detach().softmax(1).max(1)
    want = calibration(confidence, predicted == y, bins=bins)
    assert got.ece == pytest.approx(want.expected_error, abs=1e-14)
    assert got.calibration.largest_error == pytest.approx(want.largest_error, abs=1e-14)
    assert got.calibration.counts == want.counts
    assert got.calibration.edges == want.edges
    assert got.calibration.accuracy == pytest.approx(want.accuracy, nan_ok=True)
    assert got.calibration.confidence == pytest.approx(want.confidence, nan_ok=True)


@pytest.mark.parametrize("classes", [2, 3, 6, 7, 14])
def test_even_odds_on_a_border_belong_below_it(classes: int) -> None:
    model = nn.Linear(2, classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    data = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))]
    got = accuracy_of(model, data, bins=2 * classes).calibration
    assert got.counts[1] == 4  # (1 / 2C, 2 / 2C]
    assert got.confidence[1] == 1 / classes


@pytest.mark.parametrize("size", [1, 10, N, 1000])
def test_batches_do_not_matter(size: int) -> None:
    model, x, y = problem()
    one, other = accuracy_of(model, [(x, y)]), accuracy_of(model, batched(x, y, size))
    assert other.confusion == one.confusion
    assert other.loss == pytest.approx(one.loss, rel=1e-13)
    assert other.ece == pytest.approx(one.ece, rel=1e-12)


@dataclass
class Out:
    hidden: Tensor
    logits: Tensor


class Returning(nn.Module):
    """A linear model on features as wide as there are classes, with outputs of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = nn.Linear(D, C)
        self.head = nn.Linear(C, C)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        features = self.body(x).tanh()
        logits = self.head(features)
        return {
            "tensor": logits,
            "dict": {"loss": logits.sum(), "logits": logits, "hidden": features},
            "unnamed": {"a": features[:, :2], "b": logits},
            "ambiguous": (features, logits),
            "dataclass": Out(features, logits),
        }[self.kind]


@pytest.mark.parametrize("kind", ["dict", "unnamed", "ambiguous", "dataclass"])
def test_any_kind_of_output(kind: str) -> None:
    _, x, y = problem()
    plain, model = Returning("tensor"), Returning(kind)
    model.load_state_dict(plain.state_dict())
    want = accuracy_of(plain, batched(x.float(), y))
    assert accuracy_of(model, batched(x.float(), y)) == want
    assert accuracy_of(model, batched(x.float(), y), layer="head", num_classes=C) == want


def test_attached_wrapped_and_dict_batches() -> None:
    model, x, y = problem()
    net = nn.Sequential(nn.Identity(), nn.Dropout(0.9), model)
    want = accuracy_of(net, batched(x, y))
    assert accuracy_of(net, [{"input": x, "labels": y}]).confusion == want.confusion
    lm.attach(net, lm.CosFace(scale=8.0))
    cosine = accuracy_of(net, batched(x, y))
    with torch.no_grad():
        predicted = nn.functional.normalize(x) @ nn.functional.normalize(model.weight).T
    assert cosine.accuracy == float((predicted.argmax(1) == y).double().mean())
    assert net.training
    assert all(module.training for module in net.modules())


def test_sequences_and_skipped_labels() -> None:
    model, x, y = problem()
    steps = x[:60].reshape(12, 5, D)
    labels = y[:60].clone()
    labels[::7] = -100
    got = accuracy_of(model, [(steps, labels.view(12, 5))])
    kept = labels != -100
    want = accuracy_of(model, [(x[:60][kept], labels[kept])])
    assert got.confusion == want.confusion
    assert got.loss == pytest.approx(want.loss, rel=1e-13)
    assert (got.samples, got.skipped) == (int(kept.sum()), 9)


def test_a_class_without_samples_is_left_out_of_the_mean() -> None:
    model, x, _ = problem()
    labels = torch.arange(N) % 2 * 3
    got = accuracy_of(model, [(x, labels)])
    assert [math.isnan(each) for each in got.per_class] == [False, True, True, False, True]
    assert got.balanced == pytest.approx((got.per_class[0] + got.per_class[3]) / 2)
    assert got.worst_class in (0, 3)
    assert Accuracy.from_json(got.to_json()) == got


def test_a_diverged_model_is_wrong_not_lucky() -> None:
    model, x, y = problem()
    nn.init.constant_(model.weight, math.nan)
    got = accuracy_of(model, [(x, y)])
    assert got.accuracy == 0
    assert got.broken == N
    assert math.isnan(got.loss)
    assert sum(map(sum, got.confusion or ())) == 0
    counts = Counts(3)  # one NaN is enough
    counts.add(torch.tensor([[2.0, math.nan, 0.0], [2.0, 1.0, 0.0]]), torch.tensor([1, 0]))
    assert (counts.result().broken, counts.result().accuracy) == (1, 0.5)


def test_progress_is_counted_in_batches(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    model, x, y = problem()
    accuracy_of(model, [(x, y), (x, y)], progress=True)
    assert "/2 " in capsys.readouterr().err


@pytest.mark.parametrize("one_pass", [count_over, columns_of])
def test_options_that_are_not_given_are_those_of_the_documentation(one_pass: Any) -> None:
    given = {name: each.default for name, each in inspect.signature(one_pass).parameters.items()}
    wanted = {"batch_size": 256, "device": None, "workers": 0, "sync": True, "progress": False}
    assert {name: given[name] for name in wanted} == wanted
    assert set(wanted) == set(ReadingOptions.__annotations__)
    model, x, y = problem()
    (read,) = columns_of(LogitModel(model), [(x, y)], lambda batch: (batch.labels,), "reading", "")
    assert torch.equal(read, y)


def test_infinite_logits_are_no_nan() -> None:
    counts = Counts(2)
    counts.add(torch.tensor([[1.0, -math.inf], [-math.inf, 1.0]]), torch.tensor([0, 0]))
    got = counts.result()
    assert (got.accuracy, got.broken, got.loss) == (0.5, 0, math.inf)


def test_many_classes_keep_no_table() -> None:
    model, x, y = problem(3000)
    got = accuracy_of(model, batched(x, y))
    assert got.confusion is None
    assert got.accuracy == float((model(x).argmax(1) == y).double().mean())


def test_autocast_reaches_the_model() -> None:
    model, x, y = problem()
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        got = accuracy_of(model, [(x.float(), y)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(x.float())
    assert logits.dtype == torch.bfloat16
    assert got.loss == pytest.approx(float(nn.functional.cross_entropy(logits.double(), y)))


def test_modes_are_restored_after_a_failure() -> None:
    model, x, y = problem()
    net = nn.Sequential(nn.Dropout(), model)
    net[0].eval()
    with pytest.raises(LargeMarginError, match=r"\[0, 5\) but row 0 holds 5"):
        accuracy_of(net, [(x, torch.full_like(y, C))])
    assert net.training
    assert not net[0].training


def endless() -> Iterator[Tensor]:
    yield torch.zeros(3, D).double()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "the data is empty"),
        ([(torch.zeros(3, D).double(), torch.full((3,), -100))], "labelled -100"),
        (endless(), "without labels"),
        ([(torch.zeros(3, D).double(), torch.tensor([0, 1]))], "3 rows and 2 labels"),
        ([(torch.zeros(3, D).double(), torch.tensor([0.0, 1.0, 2.0]))], "integers"),
        ([(torch.zeros(3, D).double(), torch.eye(3, C))], "soft targets"),
    ],
)
def test_bad_data(loader: Any, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        accuracy_of(problem()[0], loader)


def test_bad_models() -> None:
    model, x, y = problem()
    with pytest.raises(LargeMarginError, match=r"must be an nn\.Module"):
        accuracy_of([(x, y)], model)  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match=r"logits of 7 classes have shape \(N, 7\)"):
        accuracy_of(model, [(x, y)], num_classes=7)
    with pytest.raises(LargeMarginError, match="num_classes must be an integer >= 2"):
        accuracy_of(model, [(x, y)], num_classes=1)
    with pytest.raises(LargeMarginError, match="no layer 'fc'"):
        accuracy_of(model, [(x, y)], layer="fc")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    model, x, y = problem()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    want = accuracy_of(model.cpu(), [(x.cpu(), y.cpu())])
    model.cuda()
    counts = Counts(C, device="cuda")
    with torch.no_grad():
        logits = model(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            counts.add(logits, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert counts.result().confusion == want.confusion
    assert counts.result().loss == pytest.approx(want.loss, rel=1e-10)


@pytest.mark.gpu
def test_strange_labels_on_the_device_are_told_at_the_end() -> None:
    model, x, y = problem()
    y[3] = C
    with pytest.raises(LargeMarginError, match="but 1 of them do not"):
        accuracy_of(model.cuda(), [(x.cuda(), y.cuda())])


@pytest.mark.parametrize("strange", [-1, C, C + 1])
def test_strange_labels_count_nowhere(strange: int) -> None:
    """On a device they are found when all is counted, not before."""
    counts = Counts(C)
    logits, labels = torch.randn(5, C), torch.zeros(5).long()
    labels[2] = strange
    counts._count(logits.double(), labels, labels != -100)
    assert int(counts.sums()["class_size"][:C].sum()) == 4
    with pytest.raises(LargeMarginError, match=r"but 1 of them do not\."):
        counts.result()


@pytest.mark.parametrize("strange", [-1, 3])
def test_labels_that_are_no_classes_are_refused_everywhere(strange: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images, labels = torch.rand(40, 1, 2, 2), torch.arange(40) % 3
    labels[7] = strange
    data = [(images, labels)]
    asked: list[Callable[[], object]] = [
        lambda: accuracy_of(model, data),
        lambda: calibrate_threshold(model, data),
        lambda: calibrate_temperature(model, data),
        lambda: perturbed_accuracy(model, data, {"noise": Perturbation(sigma=0.1)}, draws=1),
        lambda: attacked_accuracy(model, data, [Attack("fgsm")]),
    ]
    for each in asked:
        with pytest.raises(LargeMarginError, match=f"holds {strange}.*label them -100"):
            each()


def test_one_batch_is_no_data() -> None:
    """Its images, or its images and labels, would be taken for the batches."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images, labels = torch.rand(40, 1, 2, 2), torch.arange(40) % 3
    given: Any
    for given in (images, (images, labels)):
        with pytest.raises(LargeMarginError, match=r"one batch was given.*\[\(inputs, labels\)\]"):
            accuracy_of(model, given)
    given = None  # as the validation part of data that has none
    with pytest.raises(LargeMarginError, match="but there is none: it is None"):
        accuracy_of(model, given)
    assert accuracy_of(model, ((images, labels), (images, labels))).samples == 80


def test_batches_have_at_least_one_sample() -> None:
    split = Samples(torch.arange(3), list("abc"), torch.rand(3, 1, 2, 2))
    with pytest.raises(LargeMarginError, match="batch_size must be a finite number >= 1, but 0"):
        accuracy_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), split, batch_size=0)


def test_nothing_but_labels_to_skip() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    data = [(torch.rand(40, 1, 2, 2), torch.full((40,), -100))]
    asked: list[Callable[[], object]] = [
        lambda: calibrate_threshold(model, data),
        lambda: calibrate_temperature(model, data),
        lambda: perturbed_accuracy(model, data, {"noise": Perturbation(sigma=0.1)}, draws=1),
        lambda: attacked_accuracy(model, data, [Attack("fgsm")]),
    ]
    for each in asked:
        with pytest.raises(LargeMarginError, match="all of it is labelled -100"):
            each()


@dataclass
class Rows:
    """A split that is not of the application: images by number."""

    images: Tensor
    labels: Tensor
    ids: tuple[str, ...]
    extra: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Sequence[int]) -> "Rows":
        rows = list(indices)
        return Rows(self.images[rows], self.labels[rows], tuple(self.ids[row] for row in rows))

    def read(
        self, batch_size: int, *, device: torch.device | str = "cpu", workers: int = 0
    ) -> Iterator[ImageBatch]:
        for rows in torch.arange(len(self)).split(batch_size):
            yield ImageBatch(self.images[rows].to(device), self.labels[rows].to(device), rows)


def test_a_split_of_ones_own_is_read_like_one_of_the_library() -> None:
    x, y = torch.rand(7, 1, 3, 3), torch.arange(7) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    names = tuple("abcdefg")
    own = accuracy_of(model, Rows(x, y, names), batch_size=3)
    assert own == accuracy_of(model, Samples(y, names, x), batch_size=3)
    assert own.correct is not None
    assert own.correct.samples == 7

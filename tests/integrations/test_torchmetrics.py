"""The torchmetrics say what ``measure_arrays`` says, however the data is cut."""

import copy
import doctest
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.metric_checks import CHECKS, METRICS, all_wanted, data, wanted
from torch import Tensor, nn
from two_ranks import NEEDS_GLOO, run_checks

import largemargin as lm

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

from largemargin.integrations import torchmetrics as feature_metrics  # noqa: E402
from largemargin.integrations import torchmetrics as ours  # noqa: E402

NEVER_UPDATED = "ignore:The ``compute`` method of metric:UserWarning"


@pytest.mark.parametrize("head", ["dot", "cosine", "euclidean"])
@pytest.mark.parametrize("cut", [1, 7, 40])
def test_equals_measure_arrays(head: str, cut: int) -> None:
    features, labels, layer = data(head)
    expected = all_wanted(features, labels, layer)
    for name, make in METRICS.items():
        metric = make()
        for x, y in zip(features.split(cut), labels.split(cut), strict=True):
            metric.update(x, y, layer)
        assert metric.compute().dtype == torch.float64
        assert float(metric.compute()) == pytest.approx(expected[name], rel=1e-9), name


@pytest.mark.parametrize("name", METRICS)
def test_forward_gives_the_batch_and_keeps_all(name: str) -> None:
    features, labels, layer = data()
    metric = METRICS[name]()
    for x, y in zip(features.split(20), labels.split(20), strict=True):
        assert float(metric(x, y, layer)) == pytest.approx(wanted(name, x, y, layer), nan_ok=True)
    assert float(metric.compute()) == pytest.approx(wanted(name, features, labels, layer))
    metric.reset()
    metric.update(features[:20], labels[:20], layer)
    expected = wanted(name, features[:20], labels[:20], layer)
    assert float(metric.compute()) == pytest.approx(expected)


def test_a_sum_of_many_forward_calls_stays_one_part() -> None:
    features, labels, layer = data()
    metric = ours.NeuralCollapse(4)
    for x, y in zip(features.split(4), labels.split(4), strict=True):
        metric(x, y, layer)
    assert [len(getattr(metric, name)) for name in metric.metric_state] == [1] * 6


@pytest.mark.parametrize("name", METRICS)
def test_parts_merge(name: str) -> None:
    features, labels, layer = data()
    one, other = METRICS[name](), METRICS[name]()
    one.update(features[:13], labels[:13], layer)
    other.update(features[13:], labels[13:], layer)
    one.merge_state(other)
    assert float(one.compute()) == pytest.approx(wanted(name, features, labels, layer))
    one.update(features[:5], labels[:5], layer)
    joined = torch.cat([features, features[:5]]), torch.cat([labels, labels[:5]])
    assert float(one.compute()) == pytest.approx(wanted(name, *joined, layer))


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("carry", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_goes_on(name: str, carry: Callable[[Any], Any]) -> None:
    features, labels, layer = data()
    metric = METRICS[name]()
    metric.update(features[:13], labels[:13], layer)
    metric = carry(metric)
    metric.update(features[13:], labels[13:], layer)
    assert float(metric.compute()) == pytest.approx(wanted(name, features, labels, layer))


@pytest.mark.parametrize("name", METRICS)
def test_half_precision_counts_as_its_numbers(name: str) -> None:
    features, labels, layer = data()
    features, layer = features.bfloat16(), copy.deepcopy(layer).bfloat16()
    metric = METRICS[name]().half()
    metric.update(features, labels, layer)
    expected = wanted(name, features.double(), labels, copy.deepcopy(layer).double())
    assert float(metric.compute()) == pytest.approx(expected)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings(NEVER_UPDATED)
def test_without_samples_there_is_no_number(name: str) -> None:
    features, _, layer = data()
    metric = METRICS[name]()
    assert math.isnan(metric.compute())
    if name != "class_margin":
        metric.update(features[:3], torch.full((3,), -100), layer)
        assert math.isnan(metric.compute())


def test_torchmetrics_warns_where_nothing_was_seen() -> None:
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        ours.SampleMargin().compute()


@pytest.mark.parametrize("name", METRICS)
def test_ignored_samples_are_left_out(name: str) -> None:
    features, labels, layer = data()
    ignored = labels.clone()
    ignored[::3] = -100
    metric = METRICS[name]()
    metric.update(features, ignored, layer)
    keep = ignored != -100
    assert float(metric.compute()) == pytest.approx(
        wanted(name, features[keep], labels[keep], layer)
    )


def test_a_collection_keeps_each_state_once() -> None:
    features, labels, layer = data()
    collection = torchmetrics.MetricCollection({name: make() for name, make in METRICS.items()})
    for x, y in zip(features.split(9), labels.split(9), strict=True):
        collection.update(features=x, labels=y, head=layer)
    found = collection.compute()
    for name in METRICS:
        expected = wanted(name, features, labels, layer)
        assert float(found[name]) == pytest.approx(expected), name
    groups = sorted(sorted(group) for group in collection.compute_groups.values())
    assert ["cosine_mean", "cosine_quantile", "cosine_ratio"] in groups
    assert ["dispersion", "ideal_ratio", "separation"] in groups
    assert ["raw_min"] in groups


def test_class_156_of_bytes_is_none_to_skip() -> None:
    """In uint8, torch takes -100 for 156."""
    metric, labels = ours.SampleMargin("raw"), torch.tensor([156, 0])
    features, weight = 3 * torch.eye(200)[labels], torch.eye(200)
    metric.update(2 * features[:1], labels[:1].to(torch.uint8), weight)
    metric.update(features[1:], labels[1:].to(torch.uint8), weight)
    assert float(metric.compute()) == 4.5


def test_margins_alike_in_the_first_batch_are_not_taken_for_each_other() -> None:
    """Unit features and class vectors: cosine and raw margins differ only from the second batch."""
    collection = torchmetrics.MetricCollection(
        {kind: ours.SampleMargin(kind) for kind in ("raw", "cosine")}
    )
    for size in (1.0, 3.0):
        collection.update(size * torch.eye(2), torch.tensor([0, 1]), torch.eye(2))
    found = collection.compute()
    assert (float(found["raw"]), float(found["cosine"])) == (2.0, 1.0)


@pytest.mark.parametrize("name", ["raw_min", "bias", "auroc_raw", "auroc_confidence"])
def test_logits_will_do(name: str) -> None:
    features, labels, layer = data()
    metric = METRICS[name]()
    for x, y in zip(features.split(9), labels.split(9), strict=True):
        metric.update(logits=layer(x), labels=y)
    assert float(metric.compute()) == pytest.approx(wanted(name, features, labels, layer))


def test_every_form_of_a_head() -> None:
    features, labels, layer = data()
    model = nn.Sequential(nn.Identity(), layer)
    criterion = lm.attach(model, lm.CrossEntropy())
    expected = wanted("distance_min", features, labels, layer)
    for arguments in ((layer,), (layer.weight, layer.bias), (criterion,), (criterion.head,)):
        metric = METRICS["distance_min"]()
        metric.update(features, labels, *arguments)
        assert float(metric.compute()) == pytest.approx(expected)


def test_a_head_that_learns_is_read_again() -> None:
    features, labels, layer = data()
    metric = ours.SampleMargin("raw")
    metric.update(features, labels, layer)
    with torch.no_grad():
        layer.weight.data.mul_(3)
        layer.bias.data.mul_(3)
    metric.update(features, labels, layer)
    assert float(metric.compute()) == pytest.approx(
        2 / 3 * lm.measure_arrays(features, labels, layer.weight, layer.bias).margins["raw"]
        .overall.mean
    )  # fmt: skip
    margin = ours.ClassMargin()
    margin.update(head=torch.eye(2))
    margin.update(head=torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert float(margin.compute()) == pytest.approx(180)


def test_sequences_are_rows() -> None:
    features, labels, layer = data()
    metric = METRICS["cosine_mean"]()
    metric.update(features.view(10, 4, -1), labels.view(10, 4), layer)
    assert float(metric.compute()) == pytest.approx(wanted("cosine_mean", features, labels, layer))


def test_nothing_is_kept_for_gradients() -> None:
    features, labels, layer = data()
    for make in METRICS.values():
        metric = make()
        metric.update(features.clone().requires_grad_(), labels, layer)
        assert not metric.compute().requires_grad
        for state in metric.metric_state.values():
            assert not any(part.requires_grad for part in state)


X, Y, W = torch.randn(4, 3), torch.tensor([0, 1, 1, 0]), torch.randn(2, 3)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda: ours.SampleMargin().update(X, Y), "needs the head"),
        (lambda: ours.SampleMargin().update(logits=X, labels=Y), "needs the head"),
        (lambda: ours.SampleMargin().update(head=W), "needs features and labels"),
        (lambda: ours.SampleMargin().update(X, Y, nn.ReLU()), "classification layer itself"),
        (lambda: ours.SampleMargin().update(X, Y, W, torch.zeros(3)), "bias must have one number"),
        (lambda: ours.SampleMargin().update(X[:, :2], Y, W), "must have 3 columns"),
        (lambda: ours.SampleMargin().update(X, Y + 1, W), r"lie in \[0, 2\)"),
        (lambda: ours.SampleMargin().update(X, Y[:3], W), "one entry per row"),
        (lambda: ours.SampleMargin().update(X, Y.tolist(), W), "labels must be a tensor"),  # type: ignore[arg-type]
        (lambda: ours.SampleMargin().update(X.tolist(), Y, W), "features must"),  # type: ignore[arg-type]
        (lambda: ours.SampleMargin().update(X * math.nan, Y, W), "must be finite"),
        (lambda: ours.Dispersion(2).update(X * math.inf, Y), "must be finite"),
        (lambda: ours.VarianceSplit(2).update(X * math.nan, Y), "must be finite"),
        (lambda: ours.VarianceSplit(2).update(X, Y + 1), r"lie in \[0, 2\)"),
        (lambda: ours.NeuralCollapse(3).update(X, Y, W), "made for 3 classes"),
        (lambda: ours.ClassMargin().update(X, Y), "needs the head"),
        (lambda: ours.ClassMargin().update(head=W * math.nan), "must be finite"),
        (lambda: ours.ImplicitBias().update(logits=X * math.inf, labels=Y), "must be finite"),
        (lambda: ours.ImplicitBias().update(logits=X), "needs logits and labels"),
        (lambda: ours.SampleMargin("euclid"), "kind must be one of"),
        (lambda: ours.SampleMargin(statistic="q05"), "statistic must be one of"),
        (lambda: ours.SampleMargin(statistic=5), "quantile"),
        (lambda: ours.MarginRejectionAUROC("margin"), "score must be one of"),
        (lambda: ours.VarianceSplit(1), "at least 2 classes"),
        (lambda: ours.Dispersion(0), "num_classes must be"),
    ],
)
def test_wrong_use_says_what_to_do(update: Callable[[], None], message: str) -> None:
    with pytest.raises(lm.LargeMarginError, match=message):
        update()


@pytest.mark.parametrize("make", [lambda: ours.Dispersion(2), lambda: ours.VarianceSplit(2)])
def test_features_keep_their_width(make: Callable[[], Any]) -> None:
    metric = make()
    metric.update(X, Y)
    with pytest.raises(lm.LargeMarginError, match="3 columns, as those before had"):
        metric.update(X[:, :2], Y)


def test_examples_print_what_they_say() -> None:
    for module in (ours, feature_metrics):
        found = doctest.testmod(module, extraglobs={"torch": torch})
        assert found.attempted > 3
        assert found.failed == 0


def test_a_plot_is_drawn() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    features, labels, layer = data()
    metric = ours.SampleMargin()
    metric.update(features, labels, layer)
    figure, _ = metric.plot()
    assert figure.axes


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightning_logs_them(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    features, labels, layer = data()

    class Validated(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.metrics = torchmetrics.MetricCollection(
                {name: make() for name, make in METRICS.items()}
            )

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.metrics.update(*batch, self.layer)
            self.log_dict(self.metrics)

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    pairs = list(zip(features, labels, strict=True))
    module = Validated()
    trainer.validate(module, torch.utils.data.DataLoader(pairs, batch_size=9), verbose=False)
    for name, expected in all_wanted(features, labels, layer).items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(expected, rel=1e-6), name
    assert not any("metrics" in name for name in module.state_dict())


@pytest.mark.slow  # importing torchmetrics twice
@NEEDS_GLOO
def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_checks("integrations.metric_checks", CHECKS, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METRICS)
def test_on_an_accelerator_and_back(name: str) -> None:
    features, labels, layer = data()

    def there(tensor: Tensor) -> Tensor:
        return tensor.cuda()

    metric = METRICS[name]()
    metric.update(features[:13], labels[:13], layer)
    metric = metric.cuda()
    metric.update(there(features[13:30]), there(labels[13:30]), copy.deepcopy(layer).cuda())
    assert metric.compute().device.type == "cuda"
    metric = metric.cpu()
    metric.update(features[30:], labels[30:], layer)
    assert float(metric.compute()) == pytest.approx(wanted(name, features, labels, layer))

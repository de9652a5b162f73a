"""Options around all losses: what was forgotten, what is refused, rows that do not count."""

import importlib
from typing import ClassVar

import pytest
import torch

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.losses.base.class_counts import ldam_margins

FEATURES = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
LABELS = torch.tensor([0, 1])


class Deaf(lm.CosFace):
    """Says that it refuses weights, and looks at none."""

    refuses: ClassVar[dict[str, str]] = {"sample_weight": "it is a test."}

    def forward(self, *given, sample_weight=None):
        return super().forward(*given)


class WithoutWeights(lm.CrossEntropy):
    refuses: ClassVar[dict[str, str]] = {"sample_weight": "it is a test."}


def test_ranks_are_asked_by_losses_on_centroids_unless_told_otherwise():
    assert lm.CosFace().sync is False
    assert lm.CentroidMargin().sync is True


@pytest.mark.parametrize(
    ("loss", "prototypes"),
    [(lm.CosFace(), torch.eye(2)), (lm.CrossEntropy(), torch.nn.Linear(2, 2))],
    ids=["no logits", "no tensor"],
)
def test_labels_may_be_left_out_beside_logits_alone(loss, prototypes):
    with pytest.raises(LargeMarginError, match="two of them were given"):
        loss(FEATURES, prototypes)


@pytest.mark.parametrize(
    ("loss", "shape"),
    [(lm.CrossEntropy(), "logits .*\\(N, C\\)"), (lm.CenterLoss(2, 2), "features .*\\(N, D\\)")],
    ids=["logits", "features"],
)
def test_inputs_alone_are_called_by_name_and_shape(loss, shape):
    with pytest.raises(LargeMarginError, match=shape):
        loss._check((torch.ones(2),), LABELS, 2, None)


def test_weights_of_samples_that_a_loss_does_not_know_are_refused():
    with pytest.raises(LargeMarginError, match="does not support sample_weight: it is a test"):
        WithoutWeights()(FEATURES, LABELS, sample_weight=torch.ones(2))


def test_rows_are_only_masked_where_one_does_not_count():
    loss = lm.CrossEntropy()
    inputs, labels, ignored = loss._drop_ignored((FEATURES,), LABELS, 2, None)
    assert inputs[0] is FEATURES
    assert labels is LABELS
    assert ignored is None
    inputs, labels, ignored = loss._drop_ignored((FEATURES,), torch.tensor([-100, 1]), 2, None)
    assert inputs[0].tolist() == [[0, 0], [0, 2]]
    assert labels.tolist() == [0, 1]
    assert ignored.tolist() == [True, False]
    elsewhere = [x.to("meta") for x in (FEATURES, LABELS)]  # asking would wait for a GPU
    assert loss._drop_ignored((elsewhere[0],), elsewhere[1], 2, None)[2] is not None


def test_smoothed_labels_that_do_not_exist_have_no_value():
    loss = lm.CrossEntropy(label_smoothing=0.1, validate=False, reduction="none")
    values = loss(torch.ones(4, 3), torch.tensor([-1, 3, 0, 2]))
    assert values.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("sample_weight", [None, torch.tensor([1.0, 3.0])])
def test_ranks_add_up_values_and_counts(monkeypatch, sample_weight):
    """Two ranks with the same batch have the mean of one."""
    module = importlib.import_module("largemargin.losses.base.loss")
    alone = lm.CrossEntropy()(FEATURES, LABELS, sample_weight=sample_weight)
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module, "all_reduce_sum", lambda x: 2 * x)
    together = lm.CrossEntropy(sync=True)
    assert together(FEATURES, LABELS, sample_weight=sample_weight) == alone
    total = lm.CrossEntropy(sync=True, reduction="sum")
    assert total(FEATURES, LABELS) == 2 * lm.CrossEntropy(reduction="sum")(FEATURES, LABELS)
    assert together.eval()(FEATURES, LABELS, sample_weight=sample_weight) == alone
    assert total.eval()(FEATURES, LABELS) == lm.CrossEntropy(reduction="sum")(FEATURES, LABELS)


def test_margins_of_classes_are_copies_without_a_gradient():
    given = torch.tensor([0.1, 0.2], requires_grad=True)
    loss = lm.CosFace(margin=given)
    assert not loss.margin.requires_grad
    assert loss.margin.data_ptr() != given.data_ptr()


def test_heads_of_logits_have_a_bias_beside_dot_products():
    assert lm.CrossEntropy(similarity="dot").head_form(3).bias is True
    assert lm.CrossEntropy(similarity="cosine").head_form(3).bias is False
    assert lm.CosFace().head_form(3).bias is False


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        ([5], "at least 2"),
        ([[1, 2], [3, 4]], "at least 2"),
        ([3.0, float("inf")], "class 1 has inf"),
        ([3, 0, 5], "class 1 has 0"),
    ],
    ids=str,
)
def test_counts_of_classes_are_two_or_more_positive_numbers(counts, match):
    with pytest.raises(LargeMarginError, match=match):
        ldam_margins(counts)


def test_terms_refuse_weights_of_samples_before_they_are_called():
    objective = lm.Objective(deaf=Deaf())
    given = FEATURES, torch.eye(2), LABELS
    assert objective(*given).total.isfinite()
    with pytest.raises(LargeMarginError, match="does not support sample_weight: it is a test"):
        objective(*given, sample_weight=torch.ones(2))


def test_weights_of_terms_multiply_those_of_their_parts():
    loss = lm.Discriminative(2, 2, alpha=3.0, beta=5.0, gamma_reg=7.0)
    assert lm.Objective(softmax=4 * lm.CrossEntropy(), lmd=2 * loss).term_weights == {
        "softmax": 4,
        "lmd.compact": 6,
        "lmd.margin": 10,
        "lmd.reg": 14,
    }


def test_whole_numbers_are_settings_as_they_are():
    assert lm.MaxHinge(margin=1).margin == 1
    assert isinstance(lm.MaxHinge(margin=1).margin, int)


def test_margins_by_count_are_made_again_in_double():
    counts = [7, 3]
    loss = lm.CosFace(margin=0.3, class_counts=counts).double()
    exact = torch.tensor([0.3 * (3 / n) ** 0.25 for n in counts], dtype=torch.float64)
    assert (loss.class_margins - exact).abs().max() < 1e-15

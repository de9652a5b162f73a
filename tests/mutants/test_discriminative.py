"""Terms of the discriminative losses: weights, labels that do not count, whose bias is used."""

import pytest
import torch

import largemargin as lm
from largemargin.errors import LargeMarginError

FEATURES = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
PROTOTYPES = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
LABELS = torch.tensor([0, 0, 1])


def robust(**options):
    return lm.RobustDiscriminative(2, 2, **options)


def test_the_softmax_term_has_its_weight():
    given = FEATURES, PROTOTYPES, LABELS, FEATURES + 1
    without, once, thrice = (robust(softmax_weight=w).named_terms(*given) for w in (0.0, 1.0, 3.0))
    softmax = once.terms["softmax"].item()
    assert softmax > 0.01
    assert once.total.item() == pytest.approx(without.total.item() + softmax)
    assert thrice.total.item() == pytest.approx(without.total.item() + 3 * softmax)
    assert thrice.terms["softmax"].item() == pytest.approx(softmax)
    assert without.terms.keys() == robust(softmax_weight=0.0).part_weights.keys()
    assert thrice.terms.keys() == robust(softmax_weight=3.0).part_weights.keys()
    assert robust(softmax_weight=3.0).part_weights["softmax"] == 3


@pytest.mark.parametrize("ignore_index", [-100, None])
def test_noisy_features_that_count_must_be_finite(ignore_index):
    loss = robust(check_finite=True, ignore_index=ignore_index)
    noisy = FEATURES.clone()
    assert loss(FEATURES, PROTOTYPES, LABELS, noisy).isfinite()
    noisy[2] = torch.nan
    with pytest.raises(LargeMarginError, match="noisy must be finite, but row 2"):
        loss(FEATURES, PROTOTYPES, LABELS, noisy)


def test_a_bias_that_is_given_counts_before_that_of_the_head():
    head = torch.nn.Linear(2, 2)
    bias = head.bias.detach() + torch.tensor([4.0, -4.0])
    loss = lm.CentroidMargin(reduction="sum", margin=9.0, weight=[1.0, 2.0])
    given, own, none = (loss(FEATURES, head, LABELS, bias=b) for b in (bias, head.bias, None))
    assert given == loss(FEATURES, head.weight, LABELS, bias=bias)
    assert own == none
    assert abs(given - own) > 0.1

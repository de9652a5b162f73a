"""What people who know other libraries write first is answered with what to write."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import largemargin as lm
from contract.zoo import NAMES
from largemargin import LargeMarginError
from largemargin.losses import LOSSES
from largemargin.losses.base.constructor_arguments import (
    CALLED,
    ELSEWHERE,
    WrongArguments,
    arguments_of,
)

MADE = {"class_counts": [3, 2, 1], "num_classes": 3, "dim": 4}


def message_of(make):
    with pytest.raises(LargeMarginError) as caught:
        make()
    return str(caught.value)


WORDS = [
    (lambda: lm.CosFace(s=30, m=0.4), ["'s' or 'm'", "s is called scale", "m is called margin"]),
    (lambda: lm.ArcFace(num_classes=10, embedding_size=64), ["lm.attach(model, ArcFace(", "head"]),
    (lambda: lm.ArcFace(10, 64), ["by name, ArcFace(margin=..., scale=...)", "10, 64", "attach"]),
    (lambda: lm.CosFace(0.35), ["CosFace(margin=..., scale=...)", "got 0.35"]),
    (lambda: lm.CrossEntropy(torch.ones(99)), ["CrossEntropy(weight=...)", "got a Tensor"]),
    (lambda: lm.CosFace(class_weights=[1, 2]), ["class_weights is called weight"]),
    (
        lambda: lm.LDAM(cls_num_list=[2, 1], max_m=0.5, s=30),
        ["cls_num_list is called class_counts", "max_m is called max_margin", "needs class_counts"],
    ),
    (lambda: lm.CenterLoss(num_classes=4, feat_dim=2), ["feat_dim is called dim", "needs dim"]),
    (lambda: lm.CenterLoss(4, 2, num_classes=4), ["multiple values", "'num_classes'"]),
    (lambda: lm.Kobayashi(reg_lambda=0.3), ["reg_lambda is called strength"]),
    (
        lambda: lm.AdaFace(h=0.3, t_alpha=1.0),
        ["h is called concentration", "t_alpha is called rate"],
    ),
    (lambda: lm.CurricularFace(alpha=0.1), ["alpha is called rate"]),
    (lambda: lm.CosFace(alpha=[1, 2]), ["alpha is called weight"]),
    (
        lambda: lm.MagFace(l_a=10, u_margin=0.8, lambda_g=35),
        ["l_a is called min_norm", "u_margin is called max_margin", "lambda_g is called strength"],
    ),
    (lambda: lm.ElasticFace(sigma=0.1), ["sigma is called std"]),
    (lambda: lm.SymmetricCrossEntropy(A=-4), ["A is called log_zero"]),
    (lambda: lm.SampleMargin(strength=0.3), ["0.5 * SampleMargin(...)"]),
    (lambda: lm.ArcFace(easy_margin=True), ['mode="easy"']),
    (lambda: lm.CosFace(smoothing=0.1), ["smoothing is called label_smoothing"]),
    (lambda: lm.LabelSmoothing(eps=0.1), ["eps is called smoothing"]),
    (lambda: lm.CosFace(temperature=0.1), ["1 / scale"]),
    (lambda: lm.CosFace(size_average=False), ["size_average is called reduction"]),
    (lambda: lm.CosFace(device="cpu"), ["CosFace(...).to(device)"]),
    (lambda: lm.CosFace(sample_weight=[1.0]), ["loss(..., sample_weight=weights)"]),
    (lambda: lm.NormFace(cls_num_list=[2, 1]), ["balanced_weights(counts)"]),
    (lambda: lm.ZeroCentroid(class_weights=[1, 2]), ["does not support weight: the penalty"]),
    (lambda: lm.CosFace(margn=0.2), ["'margn'", "Did you mean margin?"]),
    (lambda: lm.Objective(lm.CosFace()), ["by name, Objective(softmax=...)", "got CosFace()"]),
]


@pytest.mark.parametrize(("make", "told"), WORDS)
def test_words_of_other_libraries(make, told):
    message = message_of(make)
    for part in told:
        assert part in message


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_lists_what_there_is(name):
    kind = LOSSES[name]
    known = arguments_of(kind)
    given = {
        key: MADE[key] for key in known if key in MADE and known[key].default is inspect._empty
    }
    with pytest.raises(TypeError) as caught:  # as Python's own error is
        kind(**given, banana=1)
    assert isinstance(caught.value, WrongArguments)
    message = str(caught.value)
    assert f"{kind.__name__} has no argument 'banana'. It takes: " in message
    assert all(key in message for key in known)
    assert "needs" not in message


def test_every_word_is_known_once_and_names_an_argument():
    everything = {key for kind in LOSSES.values() for key in arguments_of(kind)}
    assert CALLED.keys() <= everything
    assert not {"banana"} & {*CALLED, *ELSEWHERE}


def test_a_loss_of_ones_own_may_take_arguments_as_it_likes():
    class Own(lm.CosFace):
        def __init__(self, **kwargs):
            self.extra = kwargs.pop("banana")
            super().__init__(**kwargs)

    assert Own(banana=3, margin=0.1).margin == 0.1
    assert "'apple'" in message_of(lambda: Own(banana=3, apple=1))


def test_losses_with_required_arguments_are_copied():
    loss = lm.LDAM([3, 2, 1])
    for other in (copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other.class_counts == [3, 2, 1]
    assert "class_counts" in inspect.signature(lm.LDAM).parameters
    assert "reduction" in inspect.signature(lm.Loss).parameters


F, W, Y = torch.randn(6, 5), torch.randn(4, 5), torch.tensor([0, 1, 2, 3, 0, 1])
CALLS = [
    (lambda: lm.CosFace()(F, Y), ["(features, prototypes, labels)", "nn.Linear", "lm.attach"]),
    (lambda: lm.CosFace()(F, nn.Linear(5, 4)(F), Y), ["pass the head itself"]),
    (lambda: lm.CosFace()(W, F, Y), ["4 rows and 6 labels", "features, prototypes, labels"]),
    (lambda: lm.Kobayashi()(Y, F), ["look like labels; the order is logits, labels"]),
    (lambda: lm.CosFace()(Y, W, F), ["the order is features, prototypes, labels"]),
    (lambda: lm.CosFace()(F, W.numpy(), Y), ["ndarray", "torch.as_tensor"]),
    (lambda: lm.CosFace()(F, nn.Sequential(nn.Linear(5, 4)), Y), ["Sequential", "that layer"]),
    (
        lambda: lm.CosFace()(F, W, Y, sample_weight=[1.0] * 6),
        ["sample_weight", "list", "as_tensor"],
    ),
    (lambda: lm.Stability()(F, F, sample_weight=np.ones(6)), ["sample_weight", "ndarray"]),
    (lambda: lm.CosFace()(F, W[:1], Y), ["a head of two outputs"]),
    (lambda: lm.CosFace(weight="balanced"), ["lm.functional.balanced_weights(counts)"]),
    (lambda: lm.ArcFace(margin=28.6), ["radians", "28.6"]),
    (lambda: lm.CosFace(margin="auto"), ["margin must be numbers, one per class, but 'auto'"]),
    (lambda: lm.geometry.class_margin(nn.Linear(3, 2)), ["Linear was given", "pass its weight"]),
]


@pytest.mark.parametrize(("call", "told"), CALLS)
def test_calls_that_people_try_first(call, told):
    message = message_of(call)
    for part in told:
        assert part in message


@pytest.mark.parametrize("index", [[-1], "-1", 0.5, True, torch.tensor([-1, -2])])
def test_the_ignored_label_is_one_number(index):
    message = message_of(lambda: lm.CosFace(ignore_index=index))
    assert "ignore_index must be one whole number" in message
    assert repr(index) in message


@pytest.mark.parametrize("index", [torch.tensor(-1), torch.tensor([-1]), np.int64(-1)])
def test_the_ignored_label_may_be_any_whole_number(index):
    loss = lm.CosFace(ignore_index=index)
    assert type(loss.ignore_index) is int
    assert "ignore_index=-1" in repr(loss)


@pytest.mark.parametrize("kind", [lm.CosFace, lm.ArcFace, lm.BiasedSoftmax])
@pytest.mark.parametrize("as_given", [list, tuple, np.array])
def test_margins_by_class_may_be_a_list_or_an_array(kind, as_given):
    margins = [0.1, 0.2, 0.3, 0.4]
    value = kind(margin=as_given(margins))(F, W, Y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, kind(margin=torch.tensor(margins))(F, W, Y))


def test_a_sum_of_losses_has_a_backward_pass():
    features = F.clone().requires_grad_()
    (lm.CosFace() + 0.5 * lm.SampleMargin())(features, W, Y).backward()
    assert features.grad is not None
    assert features.grad.abs().sum() > 0


def test_names_of_losses_elsewhere():
    with pytest.raises(AttributeError, match=r"It is lm\.functional\.balanced_weights$"):
        _ = lm.balanced_weights
    with pytest.raises(AttributeError, match=r"'ArcFaceLoss'\. Did you mean ArcFace\?"):
        _ = lm.ArcFaceLoss
    with pytest.raises(AttributeError, match=r"'banana'$"):
        _ = lm.banana

"""What people try first with ``attach``: what is wrong says what to write."""

import pytest
import torch
from dropin.nets import LABELS, C, ConvNet, D, images
from torch import nn

import largemargin as lm


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("cosface", r"'cosface' was given\. Make it: lm\.CosFace\(\.\.\.\)"),
        ("cosface + 0.5*sample_margin", r"lm\.CosFace\(\.\.\.\) \+ lm\.SampleMargin\(\.\.\.\)"),
        ("banana", r"'banana' was given\.$"),
        (nn.CrossEntropyLoss(), r"CrossEntropyLoss was given.*is lm\.CrossEntropy\("),
        (nn.CrossEntropyLoss, r"the class CrossEntropyLoss was given.*is lm\.CrossEntropy\("),
        (nn.MSELoss(), r"MSELoss was given.*criterion\(outputs, labels\) \+"),
        ([lm.CosFace(), lm.SampleMargin()], r"list was given.*lm\.CosFace\(\) \+ 0\.5 \*"),
        ({"face": lm.CosFace()}, r"dict was given.*lm\.CosFace\(\) \+ 0\.5 \*"),
        (None, r"NoneType was given\.$"),
    ],
)
def test_what_is_no_objective(given: object, told: str) -> None:
    with pytest.raises(lm.LargeMarginError, match=told):
        lm.attach(ConvNet(), given)  # type: ignore[arg-type]


def test_outputs_and_labels_in_the_wrong_order() -> None:
    model = ConvNet()
    criterion = lm.attach(model, lm.CosFace())
    outputs = model(images())
    with pytest.raises(lm.LargeMarginError, match=r"The order is criterion\(outputs, labels\)\."):
        criterion(LABELS, outputs)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_sample_weights_as_a_list(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(D, C))
    criterion = lm.attach(model, lm.CosFace())
    outputs = model(torch.randn(*shape, D))
    with pytest.raises(lm.LargeMarginError, match=r"sample_weight must be a tensor.*list"):
        criterion(outputs, torch.zeros(shape, dtype=torch.long), sample_weight=[1.0] * 4)


@pytest.mark.parametrize("how", ["layer", "features", "layers"])
def test_a_layer_in_place_of_its_name(how: str) -> None:
    model = ConvNet()
    given = {how: [model.fc] if how == "layers" else model.fc}
    with pytest.raises(lm.LargeMarginError, match=r"but Linear was given\. Its name is 'fc'\.$"):
        lm.attach(model, lm.CosFace(), **given)  # type: ignore[arg-type]
    with pytest.raises(lm.LargeMarginError, match=r"but int was given\.$"):
        lm.measure(model, [], layer=-1)  # type: ignore[arg-type]


def test_a_model_that_returns_features() -> None:
    model = nn.Sequential(nn.Linear(4, D), nn.ReLU())
    criterion = lm.attach(model, lm.CosFace())
    with pytest.raises(lm.LargeMarginError, match=r"nn\.Sequential\(model, lm\.ClassHead\(dim"):
        criterion(model(torch.randn(3, 4)), torch.tensor([0, 1, 2]))

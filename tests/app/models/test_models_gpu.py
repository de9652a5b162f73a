"""Networks on a GPU: half precision, channels last, a step that reaches every weight."""

import pytest
import torch
from app.models.expected import side_of, small

import largemargin as lm
from largemargin.app.models import MODELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    model = small(name, feature_dim=7).cuda().to(memory_format=torch.channels_last)
    side = side_of(name)
    images = torch.rand(8, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    with torch.autocast("cuda", torch.bfloat16):
        loss = criterion(model(images), torch.arange(8, device="cuda") % 5)
    loss.backward()
    assert loss.isfinite()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("name", ["resnet18", "wrn28_10", "mobilenet"])
def test_the_gpu_agrees_with_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    model = small(name).eval()
    images = torch.rand(4, 3, side_of(name), side_of(name))
    plain = model(images)
    there = model.cuda()(images.cuda()).cpu()
    torch.testing.assert_close(there, plain, rtol=1e-2, atol=1e-2)

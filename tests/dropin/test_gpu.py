"""``attach`` on a CUDA device: it follows the model there, in half precision and compiled."""

import copy

import pytest
import torch
from dropin.nets import LABELS, ConvNet, images
from torch import nn

import largemargin as lm

pytestmark = [
    pytest.mark.gpu,
    # dynamo looks at .grad of every tensor that enters compiled code; torch warns about that.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def both(C: int, D: int) -> lm.Objective:
    return lm.Objective(cosface=lm.CosFace(scale=8.0), lmd=0.1 * lm.Discriminative(C, D, margin=2))


def train(model: nn.Module, criterion: lm.Criterion, device: str, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(images(step).to(device)), LABELS.to(device))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("first", ["attached", "moved"])
def test_the_criterion_follows_the_model(first: str) -> None:
    model = ConvNet()
    want = train(*_on_cpu(model), "cpu")
    if first == "attached":
        criterion = lm.attach(model, both)
        model.cuda()
    else:
        criterion = lm.attach(model.cuda(), both)
    torch.testing.assert_close(train(model, criterion, "cuda"), want, rtol=1e-3, atol=1e-4)
    assert criterion.banks[0].centroids.is_cuda
    criterion.undo()
    assert model.fc.bias.is_cuda
    model(images().cuda())


def _on_cpu(model: nn.Module) -> tuple[nn.Module, lm.Criterion]:
    twin = copy.deepcopy(model)
    return twin, lm.attach(twin, both)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler(dtype: torch.dtype) -> None:
    model = ConvNet()
    want = train(*_on_cpu(model), "cpu")
    model.cuda()
    criterion = lm.attach(model, both)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    # The usual first scale would skip a step or two until it fits, and the losses would lag.
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, enabled=dtype == torch.float16)
    for step, expected in enumerate(want):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = criterion(model(images(step).cuda()), LABELS.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert loss.dtype == torch.float32
        assert abs(loss.item() - expected) < 0.1


# torch's own, where a part of the step has nothing to run on the device.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(mode: str) -> None:
    model = ConvNet()
    want = train(*_on_cpu(model), "cpu")
    criterion = lm.attach(model.cuda(), both)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    got = train(compiled, criterion, "cuda")
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)

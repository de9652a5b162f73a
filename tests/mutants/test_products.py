"""Products of matrices: in which precision, by whose settings, and of what shape."""

import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from largemargin.ops import matmul

A = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
B = torch.tensor([[1.0, 0.0, 1.0, 0.0, 2.0]]).expand(3, 5)


class Setting:
    """Of torch, and what it was set to."""

    def __init__(self, value):
        self.history = [value]

    @property
    def fp32_precision(self):
        return self.history[-1]

    @fp32_precision.setter
    def fp32_precision(self, value):
        self.history.append(value)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("before", ["tf32", "ieee"])
def test_products_on_the_cpu_are_exact_whatever_the_settings_are(monkeypatch, before, tf32):
    """Set for the product and put back; not touched where they are right."""
    setting = Setting(before)
    monkeypatch.setattr(torch.backends, "mkldnn", types.SimpleNamespace(matmul=setting))
    assert torch.equal(matmul._matmul_fp32(A, B, tf32), A @ B)
    assert setting.history == ([before] if before == "ieee" else [before, "ieee", before])


def test_shapes_of_products_are_known_before_they_are_computed():
    with FakeTensorMode():
        found = matmul._matmul_fp32(torch.empty(2, 3), torch.empty(3, 5), True)
    assert found.shape == (2, 5)


def test_only_float32_has_a_precision_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        matmul, "_matmul_fp32", lambda a, b, tf32: asked.append((a.dtype, tf32)) or a @ b
    )
    for precision in ("highest", "tf32"):
        for dtype in (torch.float32, torch.float64):
            found = matmul.multiply(A.to(dtype), B.to(dtype), precision)
            assert torch.equal(found, (A @ B).to(dtype))
    assert asked == [(torch.float32, False), (torch.float32, True)]


def test_factors_are_rounded_where_that_was_asked_for():
    third = torch.full((1, 1), 1 / 3)
    assert torch.equal(matmul.matmul(third, third, None), third * third)
    rounded = third.bfloat16().float()
    assert torch.equal(matmul.matmul(third, third, "bf16"), rounded * rounded)


def test_the_precision_of_one_tensor():
    assert matmul.resolve_precision(None, A) is None
    assert matmul.resolve_precision(None, A.bfloat16()) == "bf16"
    with torch.autocast("cpu"):
        assert matmul.resolve_precision(None, A) == "bf16"

"""Norms at the origin, and rows that are read before they are written."""

import torch

from largemargin.ops import norms, safe_norm


def test_the_norm_has_no_slope_and_no_curvature_at_the_origin():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(safe_norm(x).sum(), x, create_graph=True)
    assert torch.allclose(slope, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x)
    assert torch.allclose(curvature, torch.tensor([[0.0, 0.0], [0.128, -0.096]]))


def test_compiled_code_reads_rows_by_an_operator_of_its_own(monkeypatch):
    table, index = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])
    asked = []
    operator = norms._read_rows
    monkeypatch.setattr(norms, "_read_rows", lambda *given: asked.append(given) or operator(*given))
    for eager in (True, False):
        monkeypatch.setattr(norms, "plain_eager", lambda known=eager: known)
        assert norms.read_rows(table, index).flatten().tolist() == [3, 1]
        whole = norms.read_rows(table, None)
        assert torch.equal(whole, table)
        assert whole.data_ptr() != table.data_ptr()
        assert len(asked) == (0 if eager else 2)

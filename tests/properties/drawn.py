"""Random classification problems for the property tests: hypothesis draws the sizes and a seed."""

from typing import NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import largemargin.functional as LF

CHECKED = settings(deadline=None, max_examples=40, derandomize=True, database=None)
BRIEFLY = settings(CHECKED, max_examples=15)

SCALES = st.floats(0.5, 64.0)
SEEDS = st.integers(0, 2**31)


class Problem(NamedTuple):
    """float64 tensors: one row per sample, then one row per class."""

    features: Tensor
    noisy: Tensor
    labels: Tensor
    share: Tensor
    """(N,) positive numbers."""
    prototypes: Tensor
    bias: Tensor
    margins: Tensor
    """(C,) in [0.05, 0.45]."""
    log_variances: Tensor
    bank: Tensor
    seen: Tensor
    counts: Tensor
    """(C,) integers >= 1."""

    @property
    def num_classes(self):
        return len(self.prototypes)

    @property
    def inputs(self):
        """(features, prototypes, labels), the arguments of most losses."""
        return self.features, self.prototypes, self.labels

    @property
    def logits(self):
        return LF.similarity_logits(self.features, self.prototypes, bias=self.bias)

    def rivals(self, logits):
        """(N, C-1) logits of the classes other than the label."""
        others = torch.ones_like(logits, dtype=torch.bool)
        return logits[others.scatter(1, self.labels[:, None], False)].view(len(logits), -1)

    def shuffled(self, order):
        """The samples in another order."""
        return self._replace(
            features=self.features[order],
            noisy=self.noisy[order],
            labels=self.labels[order],
            share=self.share[order],
        )

    def relabelled(self, new_label):
        """Class c is called new_label[c], and everything a class owns moves with it."""
        old_label = new_label.argsort()
        moved = {
            name: getattr(self, name)[old_label]
            for name in ("prototypes", "bias", "margins", "log_variances", "bank", "seen", "counts")
        }
        return self._replace(labels=new_label[self.labels], **moved)


def make_problem(N, C, D, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def uniform(*shape):
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    features = 2 * normal(N, D)
    return Problem(
        features=features,
        noisy=features + normal(N, D),
        labels=torch.randint(C, (N,), generator=generator),
        share=0.1 + uniform(N),
        prototypes=normal(C, D),
        bias=normal(C) / 2,
        margins=0.05 + 0.4 * uniform(C),
        log_variances=normal(C, D) / 3,
        bank=normal(C, D),
        seen=uniform(C) < 0.6,
        counts=torch.randint(1, 200, (C,), generator=generator),
    )


def problems(N=(1, 6), C=(2, 8), D=(1, 6)):
    return st.builds(make_problem, st.integers(*N), st.integers(*C), st.integers(*D), SEEDS)


def close(found, expected, rtol=1e-9, atol=1e-10):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def gradients(function, *tensors):
    """Gradients of the sum of ``function(*tensors)`` to every tensor, zeros where there is none."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(function(*leaves).sum(), leaves, materialize_grads=True)
    return tuple(gradient.detach() for gradient in found)  # zeros require grad in torch 2.9

"""Cases for losses as nobody would choose them: any size of numbers, any shape, any dtype."""

from dataclasses import dataclass
from typing import Any

import torch
from contract.problems import Problem, Sizes, call, random_problem, restore
from contract.zoo import ZOO, build, implementations
from hypothesis import strategies as st

from largemargin.losses import LOSSES

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ORDINARY = {torch.float64: 30.0, torch.float32: 8.0, torch.bfloat16: 8.0, torch.float16: 1.0}
"""Powers of ten up to which, and down to whose inverse, inputs must give finite numbers.

Squares of products of two inputs stay in the range of the dtype, for float16 the gradients.
"""
HUNGRY = {"super_symmetry": 1500, "layer_margin": 400}
"""Losses whose cost is that of a C x C matrix, or of a backward pass for each class: largest C of
most cases."""


def plain(p: Problem) -> Problem:
    return p


def one_point(p: Problem) -> Problem:
    """All samples are copies of one, under their own labels."""
    row = p.features[:1].expand_as(p.features).clone()
    return p.but(features=row, noisy=row.clone())


def copies_of_prototypes(p: Problem) -> Problem:
    """Every second prototype is its neighbour, and so is its bias."""
    index = torch.arange(p.sizes.classes) // 2 * 2
    return p.but(prototypes=p.prototypes[index], bias=p.bias[index])


def on_prototypes(p: Problem) -> Problem:
    rows = p.prototypes[p.labels]
    return p.but(features=rows, noisy=rows.clone(), bank=p.prototypes.clone())


def one_class(p: Problem) -> Problem:
    return p.but(labels=torch.full_like(p.labels, p.sizes.classes - 1))


def some_zeros(p: Problem) -> Problem:
    """Every third sample and prototype is zero."""
    kept, classes = torch.arange(p.sizes.samples) % 3 > 0, torch.arange(p.sizes.classes) % 3 > 0
    return p.but(
        features=p.features * kept[:, None],
        noisy=p.noisy * kept[:, None],
        prototypes=p.prototypes * classes[:, None],
    )


def rows_of_all_sizes(p: Problem) -> Problem:
    """A factor of a thousand between the first row and the last."""
    rows = torch.logspace(-1.5, 1.5, p.sizes.samples, dtype=torch.float64)[:, None]
    classes = torch.logspace(1.5, -1.5, p.sizes.classes, dtype=torch.float64)[:, None]
    return p.but(
        features=p.features * rows, noisy=p.noisy * rows, prototypes=p.prototypes * classes
    )


SITUATIONS = (
    plain,
    one_point,
    copies_of_prototypes,
    on_prototypes,
    one_class,
    some_zeros,
    rows_of_all_sizes,
)


@dataclass(frozen=True)
class Case:
    """One evaluation of a loss; ``features`` and ``prototypes`` are powers of ten."""

    setting: int
    dtype: torch.dtype
    samples: int
    classes: int
    dim: int
    features: float
    prototypes: float
    situation: Any
    soft: bool
    impl: int
    seed: int

    @property
    def ordinary(self) -> bool:
        limit = ORDINARY[self.dtype]
        return max(abs(self.features), abs(self.prototypes)) <= limit

    @property
    def targets_are_soft(self) -> bool:
        return self.soft and self.classes <= 500  # hinges of every class against every other

    def problem(self) -> Problem:
        """Inputs in the case's dtype, every one of them finite."""
        problem = random_problem(Sizes(self.samples, self.classes, self.dim), seed=self.seed)
        largest = torch.finfo(self.dtype).max / 1e4
        f, w = (min(10.0**power, largest) for power in (self.features, self.prototypes))
        problem = self.situation(problem)
        problem = problem.but(
            features=problem.features * f,
            noisy=problem.noisy * f,
            bank=problem.bank * f,
            prototypes=problem.prototypes * w,
            bias=problem.bias * min(f * w, largest),
        )
        return problem.to(self.dtype)


def cases(name: str) -> st.SearchStrategy[Case]:
    """Any case of this loss."""
    settings = len(_settings(name))
    powers = st.floats(-30, 30) | st.floats(-2, 2)
    few, more = st.integers(2, 12), st.integers(13, HUNGRY.get(name, 5000) // 5)
    most = st.integers(201, HUNGRY.get(name, 5000)) | st.just(5000 if name not in HUNGRY else 1500)
    return st.builds(
        Case,
        setting=st.integers(0, settings - 1),
        dtype=st.sampled_from(DTYPES),
        samples=st.integers(1, 12),
        classes=few | few | few | more | most,
        dim=st.integers(1, 8),
        features=powers,
        prototypes=powers,
        situation=st.sampled_from(SITUATIONS),
        soft=st.booleans() if "soft_targets" not in LOSSES[name].refuses else st.just(False),
        impl=st.integers(0, 1),
        seed=st.integers(0, 999),
    )


def _settings(name: str) -> list[dict[str, Any]]:
    return [*ZOO[name].settings, *ZOO[name].stopped, {}]


def setting_of(name: str, case: Case) -> dict[str, Any]:
    return _settings(name)[case.setting]


def evaluate(
    name: str, case: Case, problem: Problem, dtype: torch.dtype, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Value and gradients, of a loss whose own state is of this dtype."""
    soft = case.targets_are_soft
    if not soft and len(implementations(name)) > 1:
        options["impl"] = implementations(name)[case.impl]
    loss = build(name, problem, setting_of(name, case), dtype=dtype, **options)
    restore(loss, problem)
    given, leaves = problem.leaves(loss)
    value = call(loss, given, problem.soft if soft else None)
    found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    gradients = {key: g for key, g in zip(leaves, found, strict=True) if g is not None}
    return value.detach(), gradients


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a loss computes in for inputs of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nearby(problem: Problem, size: float, seed: int) -> Problem:
    """The problem with every number moved by up to ``size`` of itself."""
    draw = torch.Generator().manual_seed(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        signs = 2 * torch.rand(x.shape, generator=draw, dtype=torch.float64) - 1
        return x * (1 + size * signs)

    names = ("features", "noisy", "prototypes", "bias", "bank")
    return problem.but(**{name: moved(getattr(problem, name)) for name in names})

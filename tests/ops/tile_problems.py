"""Problems for the tiled statistics, what three implementations make of them, and the budget."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from largemargin import class_stats

INPUTS = ("features", "prototypes", "bias", "scale")
STATISTICS = ("target", "rival", "rest", "spread", "mean")
ROUNDING = {"highest": 2.0**-20, "tf32": 2.0**-10, "bf16": 2.0**-8}
"""Of a sum of products at each precision, relative to its size."""


@dataclass(frozen=True)
class Problem:
    """Inputs of ``class_stats``; ``scale`` is a tensor, so that it has a gradient."""

    features: Tensor
    prototypes: Tensor
    labels: Tensor
    bias: Tensor | None
    scale: Tensor

    def to(self, *, features: Any = None, prototypes: Any = None, rest: Any = None) -> "Problem":
        """Features, prototypes, and bias and scale in other dtypes (None keeps one)."""
        return replace(
            self,
            features=self.features.to(features),
            prototypes=self.prototypes.to(prototypes),
            bias=None if self.bias is None else self.bias.to(rest),
            scale=self.scale.to(rest),
        )

    def double(self) -> "Problem":
        double = torch.float64
        return self.to(features=double, prototypes=double, rest=double)

    def leaves(self) -> dict[str, Tensor]:
        given = {
            "features": self.features,
            "prototypes": self.prototypes,
            "bias": self.bias,
            "scale": self.scale,
        }
        return {name: tensor for name, tensor in given.items() if tensor is not None}


def made(
    samples: int,
    classes: int,
    dim: int,
    *,
    seed: int = 0,
    scale: float = 2.0,
    bias: bool = True,
    device: str = "cpu",
) -> Problem:
    """Features that lean towards the prototypes of their classes; logits of a few units."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    prototypes = normal(classes, dim) * dim**-0.25
    labels = torch.randint(classes, (samples,), generator=draw, device=device)
    features = normal(samples, dim) * dim**-0.25 + 0.5 * prototypes[labels]
    return Problem(
        features,
        prototypes,
        labels,
        0.3 * normal(classes) if bias else None,
        torch.tensor(scale, device=device),
    )


def outcome(
    problem: Problem,
    want: tuple[str, ...] = STATISTICS,
    *,
    frozen: tuple[str, ...] = (),
    needs: tuple[str, ...] = INPUTS,
    **how: Any,
) -> dict[str, Tensor]:
    """The statistics, and the gradients ("d features", ...) of a sum of them with all signs.

    Statistics in ``frozen`` are left out of the sum: rounded logits may choose another rival,
    whose gradient is another one altogether.
    """
    leaves = {
        name: tensor.detach().requires_grad_(name in needs)
        for name, tensor in problem.leaves().items()
    }
    options = {"bias": leaves.get("bias"), "scale": leaves["scale"], "validate": False} | how
    stats = class_stats(
        leaves["features"], leaves["prototypes"], problem.labels, want=want, **options
    )
    found = {name: value for name, value in stats._asdict().items() if value is not None}
    count = len(problem.labels)
    factors = torch.linspace(-1.5, 1, count, dtype=torch.float64, device=problem.labels.device)
    used = [name for name in want if name not in frozen]
    if not used:
        return {name: tensor.detach() for name, tensor in found.items()}
    terms = [((1 + STATISTICS.index(name)) * found[name] * factors).sum() for name in used]
    needed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(sum(terms), list(needed.values()), allow_unused=True)
    for (name, leaf), gradient in zip(needed.items(), gradients, strict=True):
        found[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        assert found[f"d {name}"].dtype == leaf.dtype
    return {name: tensor.detach() for name, tensor in found.items()}


def size(x: Tensor) -> tuple[float, float]:
    """Root mean square and largest of the entries."""
    if not x.numel():
        return 0.0, 0.0
    return float(x.square().mean().sqrt()), float(x.abs().max())


def assert_within_budget(
    got: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    precision: str,
    what: str = "",
) -> None:
    """|kernel - float64| <= |eager torch at the same precision - float64| + tolerance.

    Of every statistic and gradient, in root mean square with two roundings as tolerance, and in
    the largest entry with four: that of the precision, or of the tensor's dtype where that is
    coarser. Gradients are sums of terms of a few units, which may cancel, and exponentials of
    logits that are computed a second time: a last bit of these is theirs too. Where everything
    cancels, as for cosines in one dimension, there is a unit for each sample.
    """
    logits = [size(exact[name])[1] for name in STATISTICS if name in exact]
    for name, true in exact.items():
        if name == "rival_index":
            continue
        assert got[name].shape == true.shape, f"{what} {name}"
        assert got[name].dtype == eager[name].dtype, f"{what} {name}"
        kernel = size(got[name].double().to(true.device) - true)
        plain = size(eager[name].double().to(true.device) - true)
        unit = max(ROUNDING[precision], 2 * torch.finfo(got[name].dtype).eps)
        least = 1e-6
        if name.startswith("d "):
            least, unit = 4.0, unit + ROUNDING["highest"] * max(logits)
            if size(true)[1] < 1e-9:
                least = max(least, float(len(exact["target"])))
        for kind, factor, mine, theirs, entry in zip(
            ("rms", "max"), (2, 4), kernel, plain, size(true), strict=True
        ):
            limit = theirs + factor * unit * max(entry, least)
            assert mine <= limit, (
                f"{what} {name}: {kind} error {mine:.3g}, eager {theirs:.3g}, allowed {limit:.3g}"
            )


def check_budget(
    problem: Problem,
    want: tuple[str, ...] = STATISTICS,
    precision: str = "highest",
    *,
    plain: str = "dense",
    **how: Any,
) -> dict[str, Tensor]:
    """The kernels' outcome, after a comparison with plain torch and float64.

    ``plain="chunked"`` where the (N, C) logits would not fit.
    """

    def three(frozen: tuple[str, ...]) -> list[dict[str, Tensor]]:
        given = {"want": want, "frozen": frozen, **how}
        return [
            outcome(problem, impl="triton", precision=precision, **given),
            outcome(problem, impl=plain, precision=precision, **given),
            outcome(problem.double(), impl=plain, **given),
        ]

    found = three(())
    if "rival" in want:
        rivals = [one["rival_index"] for one in found]
        if not torch.equal(rivals[0], rivals[2]) or not torch.equal(rivals[1], rivals[2]):
            found = three(("rival",))
    got, eager, exact = found
    assert got.keys() == eager.keys() == exact.keys()
    assert_within_budget(got, eager, exact, precision, f"{precision} {how}")
    return got

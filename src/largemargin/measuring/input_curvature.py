"""The loss in input space: its curvature, sample by sample, and its values on a plane.

``CurvatureRobustness``: does low curvature go with robustness? (ROB 7.3). ``FeatureStability``: the
bounds of ROB Theorem 6.1 between curvature and stability of the features. ``LossSurface``: the loss
around an input, along its gradient and a random direction across it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_labels, check_number
from largemargin.geometry.curvature import (
    curvature,
    curvature_bounds,
    curvature_by_robustness,
    curvature_ceiling,
    curvature_limit,
    low_curvature_accuracy,
)
from largemargin.geometry.input_gradients import (
    PRECISIONS,
    evaluation,
    input_gradient,
    sample_groups,
)
from largemargin.geometry.pairs import blocks
from largemargin.measuring.batches import device_for
from largemargin.measuring.distributions import (
    ClassDistribution,
    Distribution,
    describe,
    describe_classes,
)
from largemargin.measuring.input_space import (
    ChosenRows,
    InputSpace,
    Normalization,
    need_tensor,
    read_columns,
)
from largemargin.measuring.plots import class_name, plot_surface, row_of_axes
from largemargin.measuring.probe import Probe
from largemargin.measuring.records import Record
from largemargin.measuring.robust.perturbations import add_gaussian, add_uniform
from largemargin.measuring.sample_draws import SampleDraws

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("differences", "products")

NOISES = ("gaussian", "uniform")

SHARES = tuple(round(0.1 * step, 1) for step in range(1, 11))

CIFAR_NOISE = 0.06
"""Standard deviation of the noise of ROB on CIFAR-10, which sets the default extent."""

ASSUMES = (
    "the loss equals its second-order expansion for noise of this sigma, which no network with "
    "bounded logits does: a heuristic for small sigma, not a theorem (erratum R3)"
)


@dataclass(frozen=True)
class CurvatureSettings(Record):
    """What to measure about curvature, and how. Defaults are those of ROB section 7."""

    method: str = "differences"
    """"differences" of gradients over a finite step (NGR-21), or Hessian-vector "products": its
    limit, which sees no kinks of ReLU networks."""
    step: float = 1e-2
    num_directions: int = 20
    seed: int = 0
    precision: str = "highest"
    """Of float32 products on NVIDIA GPUs; "high" is faster: see ``geometry.curvature``."""
    noise: dict[str, float] = field(default_factory=lambda: {"gaussian": 0.06, "uniform": 0.06})
    """Standard deviation or amplitude of the noise of the robustness curves; {} for none."""
    draws: int = 10
    """Noisy copies of each sample."""
    shares: tuple[float, ...] = SHARES
    """Shares of low-curvature samples at which accuracy under noise is given."""
    sigma: float | None = None
    """Standard deviation of the noise in Theorem 6.1; None leaves its bounds out."""
    radius: float = 1.0
    """delta of Theorem 6.1: 2 delta_v."""
    stability_draws: int = 100
    exact: bool = False
    """Whether to compute the left sides of Theorem 6.1 from the whole Hessian: small inputs."""

    def check(self) -> None:
        check_choice("method", self.method, METHODS)
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_number("step", self.step, above=0)
        check_number("num_directions", self.num_directions, at_least=1)
        check_number("draws", self.draws, at_least=1)
        for name, size in self.noise.items():
            check_choice("noise", name, NOISES)
            check_number(f"noise[{name!r}]", size, at_least=0)
        if self.sigma is not None:
            check_number("sigma", self.sigma, above=0)
        check_number("radius", self.radius, above=0)
        check_number("stability_draws", self.stability_draws, at_least=1)


@dataclass(frozen=True)
class CurvatureRobustness(Record):
    """Accuracy under noise on samples of low curvature, and curvature by robustness (NGR-7.3)."""

    noise: str
    amount: float
    """Standard deviation of Gaussian noise, amplitude of uniform noise."""
    draws: int
    accuracy: float
    """Under noise, mean over the draws."""
    accuracy_std: float
    """Standard deviation of the accuracy over the draws."""
    shares: tuple[float, ...]
    """p: the share of samples of lowest curvature that is kept."""
    strict: tuple[float, ...]
    """Accuracy on {curvature < quantile p}, as printed; NaN where that is empty."""
    weak: tuple[float, ...]
    """Accuracy on {curvature <= quantile p}."""
    kept_strict: tuple[int, ...]
    kept_weak: tuple[int, ...]
    group_curvature: tuple[float, ...]
    """Mean curvature of the samples that k = 0, 1, ... draws leave right; NaN for no sample."""
    group_size: tuple[int, ...]
    correlation: float
    """Pearson's, of k and the group means: negative where flat samples are robust ones."""


@dataclass(frozen=True)
class FeatureStability(Record):
    """Both bounds of Theorem 6.1 and what enters them (NGR-T6.1)."""

    sigma: float
    radius: float
    draws: int
    logit_bound: float
    """K: the largest absolute logit met, clean or noisy."""
    prototype_norm: float
    """Largest length of a class vector."""
    eta: Distribution
    """Share of draws whose features stay within the radius of the clean ones."""
    l_out: Distribution
    """Mean loss of the draws that leave, over the samples that have any."""
    never_left: int
    """Samples without such a draw: l_out is not defined for them."""
    upper: Distribution
    """Bound on the curvature."""
    lower: Distribution
    """Bound on 2 sum of squares + (sum of absolutes)^2 of the eigenvalues."""
    upper_kept: float
    """Share of samples whose curvature (exact where asked for, else as measured) is below it."""
    lower_kept: float
    """The same for the lower bound; NaN unless exact."""
    lower_informative: float
    """Share of samples whose lower bound is above 0: below, it says nothing."""
    exact: bool
    assumes: str


@dataclass(frozen=True)
class Curvature(Record):
    """Sum of squared eigenvalues of the loss's input Hessian, estimated for each sample."""

    settings: CurvatureSettings
    units: str
    """Units of the inputs: noise and curvature are relative to them."""
    samples: int
    relative_error: float
    """Largest relative standard deviation of one sample's estimate, sqrt(2 / num_directions)."""
    overall: Distribution
    classes: ClassDistribution
    index: tuple[int, ...]
    """Which samples were measured."""
    values: tuple[float, ...]
    """Their curvatures."""
    robustness: dict[str, CurvatureRobustness]
    """How curvature goes with accuracy under noise (NGR-7.3), by kind of noise."""
    stability: FeatureStability | None
    """The bounds of Theorem 6.1, where asked for."""


def measure_curvature(
    model: nn.Module,
    loader: Iterable[Any],
    settings: CurvatureSettings | None = None,
    *,
    layer: str | None = None,
    max_samples: int | None = None,
    batch_size: int | None = None,
    normalization: Normalization | None = None,
    bins: int = 50,
    device: torch.device | str | None = None,
    progress: bool = False,
    notes: list[str] | None = None,
) -> Curvature:
    r"""Input-loss curvature of every sample (NGR-21), and how it goes with robustness (NGR-7.3).

    .. math:: \hat\Lambda(x) = \frac1K\sum_{j=1}^K
        \frac{\|\nabla l(x + t\varepsilon_j) - \nabla l(x)\|^2}{t^2} \approx \sum_i\lambda_i^2

    The cost is K + 1 forward and backward passes to the inputs (parameters are frozen), and one
    forward pass per noisy copy. Random numbers belong to the seed and the sample's index: neither
    batch size nor the number of processes changes them.

    Args:
        model: any model :func:`largemargin.attach` can read, of one floating point input tensor.
        loader: yields (inputs, labels).
        settings: see :class:`CurvatureSettings`.
        batch_size: rows per pass, memory and speed only; default as many as the loader's batch.
        normalization: as in :func:`largemargin.measure`: noise is added, and curvature measured,
            in units before it, as the paper does (O6).
        layer, max_samples, bins, device, progress: as there.
        notes: gets what could not be measured.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> data = [(torch.rand(4, 2), torch.tensor([0, 1, 0, 1]))]
        >>> measure_curvature(model, data, CurvatureSettings(num_directions=5)).samples
        4
    """
    collector = CurvatureCollector(
        InputSpace(Probe(model, layer=layer), normalization),
        settings or CurvatureSettings(),
        batch_size=batch_size,
    )
    columns = read_columns(collector, loader, max_samples, device, progress)
    return collector.result(columns, [] if notes is None else notes, bins)


class CurvatureCollector:
    """The curvature of each sample, and whether it is predicted right under noise."""

    def __init__(
        self, space: InputSpace, settings: CurvatureSettings, *, batch_size: int | None = None
    ) -> None:
        settings.check()
        if batch_size is not None:
            check_number("batch_size", batch_size, at_least=1)
        self.space, self.settings, self.batch_size = space, settings, batch_size

    def columns(self, rows: ChosenRows) -> dict[str, Tensor]:
        images = self.space.raw(need_tensor(rows.inputs, "curvature"))
        labels, index, size = rows.labels, rows.indices, self.batch_size or rows.batch_size
        parts = [
            self._curvature(images[part], labels[part], index[part], size)
            for part in sample_groups(images, self.settings.num_directions, size)
        ]
        found = {"curvature": torch.cat(parts)}
        for kind in self.settings.noise:
            with evaluation(self.space, images), torch.no_grad():
                found[kind] = self._correct(images, labels, index, kind, size)
        if self.settings.sigma is not None:
            found |= self._stability(images, labels, index, self.settings.sigma, size)
        return found

    def _stability(
        self, images: Tensor, labels: Tensor, index: Tensor, sigma: float, size: int
    ) -> dict[str, Tensor]:
        """What both bounds of Theorem 6.1 are made of; K is known only after the last batch."""
        weight, bias = self.space.linear_head()
        draws = self.settings.stability_draws
        source = SampleDraws(self.settings.seed, "stability noise")
        found = []
        with evaluation(self.space, images):
            for part in sample_groups(images, draws, size):
                x = images[part]
                bounds = curvature_bounds(
                    self.space.backbone,
                    weight,
                    x,
                    labels[part],
                    sigma=sigma,
                    radius=self.settings.radius,
                    bias=bias,
                    noise=source.normal(index[part], draws, x),
                    left_sides=self.settings.exact,
                    chunk_size=size,
                )
                values = bounds._asdict().items()
                found.append(
                    {name: each.expand(len(x)) for name, each in values if each is not None}
                )
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}

    def _bounds(self, columns: dict[str, Tensor], sigma: float, bins: int) -> FeatureStability:
        radius, exact = self.settings.radius, self.settings.exact
        eta, l_out, lower = (columns[name].double() for name in ("eta", "l_out", "lower"))
        largest, longest = (columns[name].double().max() for name in ("logit_bound", "w_2inf"))
        upper = curvature_ceiling(eta, longest, largest, sigma=sigma, radius=radius)
        measured = columns["lhs_upper"] if exact else columns["curvature"]
        lower_kept = math.nan
        if exact:
            lower_kept = float((columns["lhs_lower"] >= lower).double().mean())
        left = ~l_out.isnan()
        return FeatureStability(
            sigma,
            radius,
            self.settings.stability_draws,
            float(largest),
            float(longest),
            describe(eta, bins=bins),
            describe(l_out[left], bins=bins),
            int((~left).sum()),
            describe(upper, bins=bins),
            describe(lower, bins=bins),
            float((measured <= upper).double().mean()),
            lower_kept,
            float((lower > 0).double().mean()),
            exact,
            ASSUMES,
        )

    def _curvature(self, x: Tensor, y: Tensor, index: Tensor, size: int) -> Tensor:
        source = SampleDraws(self.settings.seed, "directions")
        how: dict[str, Any] = {
            "directions": source.normal(index, self.settings.num_directions, x),
            "chunk_size": size,
            "precision": self.settings.precision,
        }
        if self.settings.method == "products":
            return curvature_limit(self.space, x, y, **how)
        return curvature(self.space, x, y, step=self.settings.step, **how)

    def _correct(
        self, images: Tensor, labels: Tensor, index: Tensor, kind: str, size: int
    ) -> Tensor:
        """(n, draws) booleans: whether each noisy copy is classified right."""
        source = SampleDraws(self.settings.seed, f"{kind} noise")
        gaussian = kind == "gaussian"
        draw = source.normal if gaussian else source.uniform
        amount, draws = self.settings.noise[kind], self.settings.draws
        parts = []
        for samples in sample_groups(images, draws, size):
            x = images[samples]
            noise = draw(index[samples], draws, x).flatten(0, 1)
            row = torch.arange(len(noise), device=x.device) // draws
            right = []
            for part in blocks(len(noise), size):
                clean, moves = x[row[part]], noise[part]
                if gaussian:
                    noisy = add_gaussian(clean, moves, sigma=amount)
                else:
                    noisy = add_uniform(clean, moves, amplitude=amount)
                right.append(self.space(noisy).argmax(1) == labels[samples][row[part]])
            parts.append(torch.cat(right).view(len(x), draws))
        return torch.cat(parts)

    def result(self, columns: dict[str, Tensor], notes: list[str], bins: int) -> Curvature:
        values, labels, index = columns["curvature"], columns["label"], columns["index"]
        if not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).nonzero()[0])
            raise LargeMarginError(
                f"curvatures must be finite, but that of sample {int(index[bad])} is "
                f"{float(values[bad])}. Look for a diverged model, broken inputs or a larger step."
            )
        sigma = self.settings.sigma
        return Curvature(
            self.settings,
            self.space.units,
            len(values),
            math.sqrt(2 / self.settings.num_directions),
            describe(values, bins=bins),
            describe_classes(values, labels, self.space.num_classes),
            tuple(index.tolist()),
            tuple(values.tolist()),
            {
                kind: self._robustness(values, columns[kind], kind, notes)
                for kind in self.settings.noise
            },
            None if sigma is None else self._bounds(columns, sigma, bins),
        )

    def _robustness(
        self, values: Tensor, correct: Tensor, kind: str, notes: list[str]
    ) -> CurvatureRobustness:
        """Curves and correlation of curvatures and of (N, draws) right predictions under noise."""
        hits, draws = correct.double(), self.settings.draws
        curve = low_curvature_accuracy(values.double(), hits.mean(1), self.settings.shares)
        groups = curvature_by_robustness(values.double(), correct.sum(1), draws=draws)
        correlation = float(groups.pearson)
        if math.isnan(correlation):
            notes.append(
                f"curvature and robustness to {kind} noise have no correlation: "
                f"{int((groups.size > 0).sum())} group(s) of samples, or no spread between them"
            )
        return CurvatureRobustness(
            kind,
            float(self.settings.noise[kind]),
            draws,
            float(hits.mean()),
            float(hits.mean(0).std(correction=0)),
            tuple(float(share) for share in self.settings.shares),
            tuple(curve.strict.tolist()),
            tuple(curve.weak.tolist()),
            tuple(curve.size_strict.tolist()),
            tuple(curve.size_weak.tolist()),
            tuple(groups.mean.tolist()),
            tuple(groups.size.tolist()),
            correlation,
        )


@dataclass(frozen=True)
class LossSurface(Record):
    """Loss at x + a u + b v: u along the gradient, v random and orthogonal to it, both of length 1.

    ``losses[i][j]`` and ``predicted[i][j]`` belong to ``along[i]`` and ``across[j]``.
    """

    index: int
    label: int
    units: str
    loss: float
    """At the input itself."""
    gradient_norm: float
    """0 where the loss is flat: u is then random too."""
    along: tuple[float, ...]
    across: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    predicted: tuple[tuple[int, ...], ...]
    seed: int

    def plot(self, ax: "Axes | None" = None, *, class_names: Sequence[str] | None = None) -> "Axes":
        """Draw the loss as colours, with the classes that are predicted there. Needs matplotlib.

        White lines show where the predicted class changes; the input itself is in the middle.

        Args:
            ax: matplotlib axes to draw on; default a new figure of pyplot's.
            class_names: in the order of the labels.

        Returns:
            The axes.
        """
        grid = self.along, self.across, self.losses, self.predicted
        ax = plot_surface(ax, *grid, class_names)
        label = class_name(self.label, class_names)
        title = f"Loss around input {self.index} of class {label}\nwhite: classes predicted there"
        ax.set(title=title, xlabel=f"along the gradient (inputs {self.units})", ylabel="across it")
        return ax


class LossSurfaces(tuple[LossSurface, ...]):
    """What ``measure_surface`` returns: a tuple of one surface per input, which can be drawn."""

    __slots__ = ()

    def plot(
        self,
        ax: "Axes | Sequence[Axes] | None" = None,
        *,
        class_names: Sequence[str] | None = None,
    ) -> "tuple[Axes, ...]":
        """Draw all of them, each as :meth:`LossSurface.plot` does. Needs matplotlib.

        Args:
            ax: matplotlib axes to draw on, one for each surface; default a new figure of pyplot's
                with all of them side by side.
            class_names: in the order of the labels.

        Returns:
            The axes.
        """
        given = row_of_axes(ax, len(self), 5.6, 4.6)
        for surface, each in zip(self, given, strict=True):
            surface.plot(each, class_names=class_names)
        return given


def measure_surface(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    extent: float | None = None,
    points: int = 21,
    seed: int = 0,
    layer: str | None = None,
    normalization: Normalization | None = None,
    batch_size: int = 256,
) -> LossSurfaces:
    """Cross entropy on a square grid of the input space around each input (ROB Fig. 11).

    Args:
        model: any model :func:`largemargin.attach` can read, of one floating point input tensor.
        inputs: (N, ...); each gets a surface of its own.
        labels: (N,).
        extent: half the side of the square, in units of the inputs. Default the length of Gaussian
            noise of standard deviation 0.06, 3.3 for CIFAR images.
        points: per side, odd, so that the input itself is the middle one.
        seed: of the random directions; the n-th input's do not depend on the others.
        layer: name of the head; default the last linear layer.
        normalization: (mean, std) of the inputs, per channel, to move in units before it.
        batch_size: rows per pass; memory only.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> (surface,) = measure_surface(model, torch.rand(1, 2), torch.tensor([0]), points=3)
        >>> surface.losses[1][1] == surface.loss
        True
    """
    check_number("points", points, at_least=3)
    if points % 2 == 0:
        raise LargeMarginError(f"points must be odd, but {points} was given.")
    if extent is not None:
        check_number("extent", extent, above=0)
    space = InputSpace(Probe(model, layer=layer), normalization)
    inputs = need_tensor(inputs, "a loss surface").to(device_for(model))
    labels = labels.to(inputs.device)
    check_labels(
        labels, len(inputs), space.num_classes, soft=False, skip="leave them out", validate=True
    )
    raw = space.raw(inputs.detach())
    size = extent or CIFAR_NOISE * math.sqrt(raw.shape[1:].numel())
    steps = torch.linspace(-size, size, points, dtype=torch.float64)
    steps[points // 2] = 0
    random = SampleDraws(seed, "surface")
    found = input_gradient(space, raw, labels, chunk_size=batch_size)
    surfaces = []
    for number, (x, gradient) in enumerate(zip(raw, found.gradient, strict=True)):
        draws = random.normal(torch.tensor([number]), 2, x[None])[0].double().flatten(1)
        u, v = _axes(gradient.double().flatten(), draws)
        a, b = (each.to(x.device).flatten() for each in torch.meshgrid(steps, steps, indexing="ij"))
        moves = a[:, None] * u + b[:, None] * v
        losses, classes = [], []
        with evaluation(space, raw), torch.no_grad():
            for part in blocks(len(moves), batch_size):
                logits = space((x + moves[part].view(-1, *x.shape)).to(x.dtype))
                target = labels[number].long().expand(len(logits))
                losses.append(F.cross_entropy(logits, target, reduction="none"))
                classes.append(logits.argmax(1))
        grid, predicted = (
            tuple(tuple(row) for row in torch.cat(parts).view(points, points).tolist())
            for parts in (losses, classes)
        )
        surfaces.append(
            LossSurface(
                number,
                int(labels[number]),
                space.units,
                grid[points // 2][points // 2],
                float(gradient.double().norm()),
                tuple(steps.tolist()),
                tuple(steps.tolist()),
                grid,
                predicted,
                seed,
            )
        )
    return LossSurfaces(surfaces)


def _axes(gradient: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors along the gradient (random where it is 0) and across it."""
    length = gradient.norm()
    first = gradient / length if float(length) > 0 else draws[1] / draws[1].norm()
    second = draws[0]
    for _ in range(2):  # once more, for what rounding left of the first
        second = second - (second @ first) * first
    if float(second.norm()) == 0:
        raise LargeMarginError(
            "a loss surface needs inputs of two numbers at least: there is no direction across "
            "the gradient."
        )
    return first, second / second.norm()

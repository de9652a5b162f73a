"""Generalization quantities, each with what it assumes and whether it says anything here.

None is printed as if it held: a quantity whose assumptions the model breaks is NaN, and one that
exceeds what it bounds is called so. ``ClassBalls`` holds what margin bounds need of the features of
every class. ``FullyConnected`` tells whether a model is a ReLU network without biases, which some
bounds are about.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import check_number
from largemargin.geometry.bounds import (
    NoiseCushions,
    ball_bound,
    cushion_complexity,
    jsd_lower_bound,
    linear_margin_bound,
    noise_cushions,
    pac_bayes_quantities,
    ramp_loss,
    spectral_complexity,
)
from largemargin.geometry.pairs import blocks, distances, widen
from largemargin.heads.head_spec import boundary_form
from largemargin.measuring.input_space import InputSpace
from largemargin.measuring.records import Record
from largemargin.measuring.stream import Stream

MET, BROKEN, OPEN = "met", "broken", "cannot be checked"


@dataclass(frozen=True)
class BoundSettings(Record):
    """Constants of the generalization quantities; they have to be chosen before seeing the data."""

    trained_on: bool | None = None
    """Whether the model was trained on the measured data; None where that is not known."""
    rho: float = 1.0
    """Margin of (5.2) and (5.3), in units of logits."""
    radius: float = 0.5
    """delta_v: radius of the balls of (5.4), (6.1)."""
    r: float = 1.2
    theta: float = 0.7
    """Of the margin distribution loss (ODN Table 1, without batch norm)."""
    delta: float = 0.05
    """Bounds hold with probability 1 - delta."""

    def check(self) -> None:
        check_number("rho", self.rho, above=0)
        check_number("radius", self.radius, above=0)
        check_number("theta", self.theta, at_least=0)
        check_number("r", self.r, above=self.theta)
        check_number("delta", self.delta, above=0, below=1)


@dataclass(frozen=True)
class Assumption(Record):
    """One condition of a statement, and whether it is met, broken, or cannot be checked."""

    text: str
    state: str
    found: str = ""
    """What was found instead, where it is broken."""


@dataclass(frozen=True)
class Bound(Record):
    """One quantity with its label. ``value`` is NaN where it is not defined for the model."""

    name: str
    bounds: str
    """What it is about."""
    value: float
    informative: bool
    """Whether no assumption is known to be broken and the value says more than is known anyway."""
    verdict: str
    """In words, why or why not."""
    assumptions: tuple[Assumption, ...]
    parts: dict[str, float]
    """What the value is made of."""

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.4g}, {self.verdict}"


ROWS = 8192


@dataclass
class ClassBalls:
    """Numbers by class (as lists) and by pair of classes (as arrays) of a stream's features."""

    curved: bool
    """The head's boundaries are no planes: there are no pairwise margins."""
    present: list[int]
    sizes: list[int]
    norms: list[float]
    """Lengths of the class means."""
    reach: list[float]
    """Largest distance of a sample from the mean of its class."""
    inside: list[float]
    """Share of samples within the radius of the mean of their class."""
    ball_ramp: list[float]
    """Mean ramp loss of leaving the ball, with r^2 = 2 radius^2 and rho = radius^2."""
    longest: float
    """Length of the longest feature."""
    closest: float
    """Smallest distance between class means."""
    ramps: Tensor
    """(C, C) sums of ramp losses of the samples of a class against a rival."""
    gaps: Tensor
    """(C, C) lengths of differences of (class vector, bias)."""


def class_balls(stream: Stream, radius: float, rho: float) -> ClassBalls:
    """Measure the kept features of a stream, in one pass over them."""
    assert stream.kept is not None
    rows, labels = stream.kept, stream.column("label")
    head, count = stream.head, stream.num_classes
    weight, bias = (
        None if each is None else widen(each.cpu())
        for each in boundary_form(head, head.weight.detach(), head.bias)
    )
    assert weight is not None
    means = stream.sums.means.cpu()
    reach, inside, leaving = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
    ramps = torch.zeros(count, count, dtype=torch.float64)
    longest = 0.0
    for part in blocks(len(rows), ROWS):
        features, own = widen(rows[part]), labels[part]
        longest = max(longest, float(features.norm(dim=1).max()))
        apart = (features - means[own]).norm(dim=1)
        reach.scatter_reduce_(0, own, apart, "amax")
        inside.index_add_(0, own, (apart <= radius).double())
        ball = 2 * radius**2 - apart.square()
        leaving.index_add_(0, own, ramp_loss(ball, rho=radius**2))
        scores = features @ weight.T
        scores = scores if bias is None else scores + bias
        margins = scores.gather(1, own[:, None]) - scores
        ramps.index_add_(0, own, ramp_loss(margins, rho=rho))
    sizes = stream.sums.counts.cpu()
    present = (sizes > 0).nonzero()[:, 0]
    between = distances(means[present], means[present]).fill_diagonal_(torch.inf)
    full = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    n = sizes.clamp_min(1).double()
    return ClassBalls(
        stream.scores.curved,
        present.tolist(),
        sizes.tolist(),
        means.norm(dim=1).tolist(),
        reach.tolist(),
        (inside / n).tolist(),
        (leaving / n).tolist(),
        longest,
        float(between.min()) if len(present) > 1 else torch.inf,
        ramps,
        distances(full, full),
    )


class FullyConnected:
    """The weights of a model in the order they are used, and whether they are all there is to it.

    Recognised by what the model does, not by how it is written: the chain of its linear layers
    with ReLU between has to give the head's output on every batch.
    """

    def __init__(self, space: InputSpace) -> None:
        self.space = space
        self.reason = _not_fully_connected(space.model, space.head)
        """Why the model is something else."""
        self.weights: list[Tensor] = []
        self.cushions: NoiseCushions | None = None
        self.samples = 0
        """Over which the cushions were taken."""

    def add(self, inputs: Any) -> None:
        """Check the network on a batch and update its cushions; without gradients."""
        if self.reason is not None:
            return
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            self.reason = "its inputs are not vectors"
            return
        order: list[Any] = []
        modules = self.space.model.named_modules()
        linear = (name for name, each in modules if isinstance(each, nn.Linear))
        hooks = dict.fromkeys(linear, lambda module, output: order.append(module))
        logits = self.space.read(inputs, hooks).logits
        self.weights = [module.weight.detach() for module in order]
        rows = self.space.normalized(inputs).flatten(1)
        if not self._explains(rows, logits):
            self.reason = "it is not a chain of linear layers with ReLU between them"
            return
        self.samples += len(rows)
        self._take(noise_cushions(self.weights, rows))

    def merge(self, others: list[tuple[str | None, int, NoiseCushions | None]]) -> None:
        """What all processes found, this one among them."""
        self.reason = next((reason for reason, _, _ in others if reason is not None), None)
        self.samples, self.cushions = sum(samples for _, samples, _ in others), None
        for _, _, cushions in others:
            if cushions is not None:
                self._take(cushions)

    def mine(self) -> tuple[str | None, int, NoiseCushions | None]:
        """What this process found."""
        found = self.cushions
        if found is not None:
            values = found._asdict().items()
            moved: dict[str, Any] = {
                name: each.cpu() for name, each in values if isinstance(each, Tensor)
            }
            found = found._replace(**moved)
        return self.reason, self.samples, found

    def _take(self, found: NoiseCushions) -> None:
        old = found if self.cushions is None else self.cushions
        self.cushions = found._replace(
            layer_cushion=torch.minimum(old.layer_cushion, found.layer_cushion),
            minimal_interlayer_cushion=torch.minimum(
                old.minimal_interlayer_cushion, found.minimal_interlayer_cushion
            ),
            activation_contraction=torch.maximum(
                old.activation_contraction, found.activation_contraction
            ),
        )

    def _explains(self, below: Tensor, logits: Tensor) -> bool:
        for position, weight in enumerate(self.weights):
            if weight.shape[1] != below.shape[1]:
                return False
            below = torch.relu(below) if position else below
            below = below @ weight.T
        if below.shape != logits.shape:
            return False
        scale = float(logits.abs().max())
        return bool(torch.allclose(below, logits, rtol=1e-4, atol=1e-5 * max(scale, 1e-30)))


def _not_fully_connected(model: nn.Module, head: nn.Module) -> str | None:
    """Why a model cannot be a chain of linear layers without biases; None where it may be one."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    known = {id(p) for module in linear for p in (module.weight, module.bias) if p is not None}
    others = [name for name, p in model.named_parameters() if id(p) not in known]
    if others:
        kinds = {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in others}
        return f"it has other layers than linear ones: {', '.join(sorted(kinds))}"
    if not isinstance(head, nn.Linear):
        return f"its head is a {type(head).__name__}"
    if any(bool(module.bias.any()) for module in linear if module.bias is not None):
        return "its layers have biases"
    return None


def measure_bounds(
    stream: Stream, network: FullyConnected, settings: BoundSettings
) -> tuple[Bound, ...]:
    """All quantities of a stream that kept its features, and of the network they came through."""
    balls = class_balls(stream, settings.radius, settings.rho)
    return (
        _pairwise(balls, settings, learned=False),
        _pairwise(balls, settings, learned=True),
        _ball(balls, settings),
        _divergence(balls, settings),
        *_network_bounds(stream, network, settings),
    )


def _pairwise(balls: ClassBalls, settings: BoundSettings, *, learned: bool) -> Bound:
    """(5.2) or (5.3) of every pair of classes that have samples; the worst one is reported."""
    name = "NGY-5.3 pairs, learned features" if learned else "NGY-5.2 pairs, fixed features"
    about = "error of telling two classes apart, for the worst pair of classes"
    assumptions = [
        Assumption("every input's features lie in a ball of radius r around a class mean", OPEN),
        Assumption("rho, r, R and Gamma were fixed before seeing the data", OPEN),
    ]
    if not learned:
        text = "features were learned from other data than these"
        state = {None: OPEN, True: BROKEN, False: MET}[settings.trained_on]
        found = "the features were learned from these data"
        assumptions.insert(0, Assumption(text, state, found))
    if balls.curved:
        text = "the head is linear in the features"
        assumptions.append(Assumption(text, BROKEN, "the head is a cosine head with a bias"))
    pairs = () if balls.curved else itertools.combinations(balls.present, 2)
    bounds = (_of_pair(balls, settings, *pair, learned=learned) for pair in pairs)
    nothing: tuple[float, dict[str, float]] = (math.nan, {})
    value, worst = max(bounds, key=lambda each: each[0], default=nothing)
    says, verdict = _error_verdict(value)
    if learned and not math.isnan(value):
        says, verdict = False, "never informative: above 1 for every network (erratum N7)"
    return _conclude(name, about, value, assumptions, worst, says=says, verdict=verdict)


def _of_pair(
    balls: ClassBalls, settings: BoundSettings, first: int, second: int, *, learned: bool
) -> tuple[float, dict[str, float]]:
    """The bound of two classes and what it is made of."""
    count = balls.sizes[first] + balls.sizes[second]
    # The ramp loss is averaged already, so its mean stands for all margins of the pair.
    empirical = float(balls.ramps[first, second] + balls.ramps[second, first]) / count
    sizes = {
        "weight_norm": float(balls.gaps[first, second]),
        "radius": max(balls.reach[first], balls.reach[second]),
        "centroid_norm": max(balls.norms[first], balls.norms[second]),
    }
    made = linear_margin_bound(
        torch.tensor([settings.rho * (1 - empirical)], dtype=torch.float64),
        rho=settings.rho,
        delta=settings.delta,
        num_samples=count,
        **sizes,
    )
    classes = {"class": float(first), "rival": float(second), "empirical": empirical}
    rest = {"confidence": float(made.confidence), "samples": float(count)}
    return float(made.union if learned else made.fixed), {**classes, **sizes, **rest}


def _ball(balls: ClassBalls, settings: BoundSettings) -> Bound:
    """(5.4) of every class, with r^2 = 2 delta_v^2 and rho = delta_v^2; the worst is reported."""
    rho, radius = settings.radius**2, math.sqrt(2) * settings.radius
    found = []
    for label in balls.present:
        empirical = balls.ball_ramp[label]
        sizes = {
            "feature_norm": balls.longest,
            "centroid_norm": balls.norms[label],
            "radius": radius,
            "rho": rho,
        }
        made = ball_bound(
            torch.tensor([rho * (1 - empirical)], dtype=torch.float64),
            delta=settings.delta,
            num_samples=balls.sizes[label],
            **sizes,
        )
        parts = {"class": float(label), "empirical": empirical, **sizes}
        parts["confidence"] = float(made.confidence)
        found.append((float(made.bound), made.informative, parts))
    nothing: tuple[float, bool, dict[str, float]] = (math.nan, True, {})
    value, condition, worst = max(found, key=lambda each: each[0], default=nothing)
    says, verdict = _error_verdict(value)
    if not condition:
        verdict += ", and r^2 <= 2 Lambda^2 + 4 R Lambda rules out less (erratum N8)"
    return _conclude(
        "NGY-5.4 leaving the ball",
        "probability that a sample's features leave the ball of its class, for the worst class",
        value,
        [
            Assumption("no input's features are longer than the longest seen", OPEN),
            Assumption("rho, r, R and Lambda were fixed before seeing the data", OPEN),
        ],
        worst,
        says=says,
        verdict=verdict,
    )


def _divergence(balls: ClassBalls, settings: BoundSettings) -> Bound:
    """(6.1) and its sharper form: a statement about the distribution of the measured samples."""
    shares = [balls.inside[label] for label in balls.present]
    tau, apart = min(shares, default=math.nan), balls.closest
    enough, disjoint = tau >= 0.5, apart > 2 * settings.radius
    several = len(balls.present) > 1
    assumptions = [
        Assumption("two classes have samples", MET if several else BROKEN, "one class only"),
        Assumption(
            "every class keeps at least half its mass in its ball",
            MET if enough else BROKEN,
            f"a class keeps {100 * tau:.3g} % of its samples within delta_v of its mean",
        ),
        Assumption(
            "the balls are disjoint",
            MET if disjoint else BROKEN,
            f"two class means are {apart:.4g} apart, 2 delta_v = {2 * settings.radius:g}",
        ),
    ]
    parts = {"tau": tau, "closest_means": apart, "radius": settings.radius}
    value, verdict = math.nan, "not defined here"
    if enough and disjoint and several:
        found = jsd_lower_bound(tau)
        value = found.tight
        parts |= {"paper": found.paper, "sharper": found.tight, "largest_possible": math.log(2)}
        verdict = f"informative: above 0, of at most {math.log(2):.4g}"
        if value <= 0:
            verdict = "not informative: a divergence is at least 0 anyway"
    return _conclude(
        "NGY-6.1 divergence of classes",
        "smallest Jensen-Shannon divergence of two classes at any earlier layer, for the "
        "distribution of these samples (the sharper form; the paper's is in the parts)",
        value,
        assumptions,
        parts,
        says=value > 0,
        verdict=verdict,
    )


def _network_bounds(
    stream: Stream, network: FullyConnected, settings: BoundSettings
) -> tuple[Bound, Bound]:
    shape = Assumption(
        "the model is a fully connected ReLU network without biases",
        MET if network.reason is None else BROKEN,
        f"about fully connected ReLU networks without biases, but {network.reason}",
    )
    complexity = "not a bound: a size to compare networks of one architecture by"
    value = math.nan
    parts: dict[str, float] = {}
    if network.reason is None:
        found = spectral_complexity(network.weights)
        value = float(found.complexity)
        parts = {"product_of_spectral_norms": float(found.product)}
    spectral = _conclude(
        "ODN-SPEC spectral complexity",
        "complexity of the network (Bartlett et al. 2017), reference identity",
        value,
        [shape],
        parts,
        says=False,
        verdict=complexity,
    )
    return spectral, _cushions(stream, network, settings, shape)


def _cushions(
    stream: Stream, network: FullyConnected, settings: BoundSettings, shape: Assumption
) -> Bound:
    assumptions = [
        shape,
        Assumption(
            "the data are those the model was trained on",
            {None: OPEN, True: MET, False: BROKEN}[settings.trained_on],
            "the model was trained on other data",
        ),
        Assumption("the constants that the theorem hides are 1", OPEN),
    ]
    value, says, verdict = math.nan, False, "not defined here"
    parts: dict[str, float] = {}
    cushions = network.cushions
    if network.reason is None and cushions is not None:
        assumptions.append(
            Assumption(
                "cushions are minima over all samples",
                MET if network.samples == stream.seen else BROKEN,
                f"cushions were taken over {network.samples} of {stream.seen} samples",
            )
        )
        if math.isnan(float(cushions.activation_contraction)):
            text = "no sample switches a whole layer off"
            assumptions.append(Assumption(text, BROKEN, "a sample switches a whole layer off"))
        else:
            value, parts = _cushion_bound(stream.column("raw"), network, settings)
            says, verdict = _error_verdict(value)
    return _conclude(
        "ODN-BOUND cushions",
        "error: share of raw margins outside (r - theta, r + theta) plus the complexity term that "
        "the proof of ODN Theorem 1 supports",
        value,
        assumptions,
        parts,
        says=says,
        verdict=verdict,
    )


def _cushion_bound(
    margins: Tensor, network: FullyConnected, settings: BoundSettings
) -> tuple[float, dict[str, float]]:
    cushions = network.cushions
    assert cushions is not None
    how = {"r": settings.r, "theta": settings.theta, "delta": settings.delta}
    count = max(2, len(margins))
    complexity = cushion_complexity(cushions, num_samples=count, **how)
    norms = spectral_complexity(network.weights).spectral_norms
    # Factors can be moved between the layers of a ReLU network, so that all have one norm.
    level = float(norms.double().log().mean().exp())
    layers = [
        (level / norm * weight.double()).flatten()
        for norm, weight in zip(norms.double(), network.weights, strict=True)
    ]
    step = pac_bayes_quantities(
        margins.double(),
        torch.cat(layers).cpu(),
        cushions.layer_cushion.double().cpu(),
        cushions.minimal_interlayer_cushion.double().cpu(),
        num_samples=count,
        width=cushions.width,
        contraction=float(cushions.activation_contraction),
        spectral_norm=level,
        **how,
    )
    value = float(step.emp_margin) + float(complexity.derived)
    return value, {
        "empirical": float(step.emp_margin),
        "complexity": float(complexity.derived),
        "complexity_as_printed": float(complexity.printed),
        "pac_bayes_bound": float(step.bound_pac_bayes),
        "lemma_1_bound": float(step.bound_lemma1),
        "contraction": float(cushions.activation_contraction),
        "smallest_layer_cushion": float(cushions.layer_cushion.min()),
        "smallest_interlayer_cushion": float(cushions.minimal_interlayer_cushion.min()),
    }


def _error_verdict(value: float) -> tuple[bool, str]:
    if math.isnan(value):
        return False, "not defined here"
    if value < 1:
        return True, "informative: below 1"
    return False, "not informative: an error is at most 1 anyway"


def _conclude(
    name: str,
    bounds: str,
    value: float,
    assumptions: list[Assumption],
    parts: dict[str, float],
    *,
    says: bool,
    verdict: str,
) -> Bound:
    broken = [each.found for each in assumptions if each.state == BROKEN]
    if broken:
        verdict = f"does not apply: {'; '.join(broken)}"
    elif says and any(each.state == OPEN for each in assumptions):
        verdict += " (if assumptions hold that cannot be checked)"
    return Bound(name, bounds, value, says and not broken, verdict, tuple(assumptions), parts)

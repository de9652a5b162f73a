"""Linearised margins in input space and at layers: how far a sample is from another decision."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.dropin.find_head import find_module
from largemargin.dropin.model_outputs import tensors_in
from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.geometry.input_gradients import evaluation
from largemargin.losses.layer_margin import NORMS, dual_norm
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
    read_columns,
)
from largemargin.measuring.probe import LayerHook, Probe
from largemargin.measuring.records import Record
from largemargin.measuring.scores import check_logits_finite
from largemargin.ops.norms import promote

INPUT = "input"
"""Stands for the model's input among names of layers."""

ODN = "odn"
"""Name of the column of input margins with the rival of the largest logit."""


@dataclass(frozen=True)
class LinearizedMargins(Record):
    """Distances to the decision boundary of the linearised network, negative for errors.

    Exact for a model that is linear from there on; elsewhere a first-order estimate.
    """

    where: str
    """"input" or the name of the layer whose output is moved."""
    norm: float
    """p of the l_p distance."""
    rival: str
    """Which classes compete: "largest logit" (ODN-G) or "closest of k" (Elsayed et al. 2018)."""
    eps: float
    samples: int
    dead: int
    """Samples whose gradient is exactly 0: no distance, so they are in no number below."""
    overall: Distribution
    """``overall.ratio`` is the mean over standard deviation of ODN."""
    classes: ClassDistribution


@dataclass(frozen=True)
class InputMarginResult(Record):
    """Margins at the input (ODN-G) and, by name, at layers (Elsayed et al. 2018)."""

    input: LinearizedMargins | None
    layers: dict[str, LinearizedMargins] | None


class MarginCollector:
    """One margin per sample and place."""

    def __init__(
        self,
        space: InputSpace,
        *,
        input_margins: bool,
        layer_margins: Sequence[str],
        norm: float = 2,
        topk: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        check_choice("norm", norm, NORMS)
        check_number("eps", eps, at_least=0)
        if topk is not None:
            check_number("topk", topk, at_least=1)
        if isinstance(layer_margins, str):
            raise LargeMarginError(
                f"layer_margins must be a list of names, but {layer_margins!r} was given. Write "
                f"[{layer_margins!r}]."
            )
        self.space, self.norm, self.eps = space, norm, eps
        self.input_margins, self.places = input_margins, list(dict.fromkeys(layer_margins))
        for name in self.places:
            if name != INPUT:
                find_module(space.model, name)
        others = space.num_classes - 1
        self.rivals = min(topk or others, others) if self.places else 1

    def columns(self, rows: ChosenRows) -> dict[str, Tensor]:
        inputs, labels = rows.inputs, rows.labels
        with evaluation(self.space, labels):
            if isinstance(inputs, Tensor):
                at_input = self.input_margins or INPUT in self.places
                inputs = self.space.raw(inputs, checked=at_input)
            source, inputs = _differentiable(inputs)
            logits, points = self._pass(inputs, source)
            values = promote(logits)
            own = values.gather(1, labels[:, None])
            order = values.detach().scatter(1, labels[:, None], -torch.inf)
            order = order.topk(self.rivals, dim=1).indices
            best: dict[str, Tensor] = {}
            for rank, rival in enumerate(order.unbind(1)):
                gap = (own - values.gather(1, rival[:, None]))[:, 0]
                last = rank + 1 == self.rivals
                for name, distance in self._distances(gap, points, keep_graph=not last):
                    if name == INPUT and rank == 0 and self.input_margins:
                        best[ODN] = distance
                    if name in self.places:
                        # NaN (no distance to this rival) gives way to the others.
                        best[name] = torch.fmin(best.get(name, distance), distance)
        return {_column(name): each.detach() for name, each in best.items()}

    def _pass(self, inputs: Any, source: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and what they depend on at the places asked for."""
        points: dict[str, Tensor] = {}
        hooks = {name: _keep_in(points, name) for name in self.places if name != INPUT}
        logits = self.space.read(inputs, hooks).logits
        missing = [name for name in hooks if name not in points]
        if missing:
            raise LargeMarginError(f"the model did not call {missing}. Name layers that it uses.")
        check_logits_finite(logits)
        if self.input_margins or INPUT in self.places:
            if source is None:
                raise LargeMarginError(
                    "margins in input space need a floating point input, but the loader gives "
                    "none. For token ids name a layer: layer_margins=['embeddings']."
                )
            points[INPUT] = source
        return logits, points

    def _distances(
        self, gap: Tensor, points: dict[str, Tensor], *, keep_graph: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """At every place the distance to where the linearised gap, (N,), is closed."""
        gradients = torch.autograd.grad(
            gap.sum(), list(points.values()), retain_graph=keep_graph, allow_unused=True
        )
        for (name, point), gradient in zip(points.items(), gradients, strict=True):
            if gradient is None:
                raise LargeMarginError(
                    f"the logits do not depend on {name!r}, of shape {tuple(point.shape)}. Name a "
                    "layer on the way to the head."
                )
            yield name, self._distance(gap.detach(), gradient, point, len(gap))

    def _distance(self, gap: Tensor, gradient: Tensor, point: Tensor, count: int) -> Tensor:
        if point.dim() == 0 or point.shape[0] != count:
            raise LargeMarginError(
                f"a place to measure margins at must hold one entry per sample, {count}, but its "
                f"shape is {tuple(point.shape)}."
            )
        length = dual_norm(promote(gradient).flatten(1), self.norm)
        return torch.where(length > 0, gap / (length + self.eps), torch.nan)

    def result(self, columns: dict[str, Tensor], notes: list[str], bins: int) -> InputMarginResult:
        layers = {name: self._described(columns, name, bins, notes) for name in self.places}
        own = self._described(columns, ODN, bins, notes) if self.input_margins else None
        return InputMarginResult(own, layers or None)

    def _described(
        self, columns: dict[str, Tensor], name: str, bins: int, notes: list[str]
    ) -> LinearizedMargins:
        values, labels = columns[_column(name)], columns["label"]
        where = INPUT if name == ODN else name
        alive = ~values.isnan()
        dead = int((~alive).sum())
        if dead:
            notes.append(
                f"{dead} of {len(values)} samples have no linearised margin at {where!r}: their "
                "gradient is 0 (dead units), and they are left out"
            )
        rival = "largest logit" if name == ODN else f"closest of {self.rivals}"
        return LinearizedMargins(
            where,
            float(2 if name == ODN else self.norm),
            rival,
            self.eps,
            len(values),
            dead,
            describe(values[alive], bins=bins),
            describe_classes(values[alive], labels[alive], self.space.num_classes),
        )


def _column(name: str) -> str:
    """What the margins at a place are called among other columns, whatever the place is called."""
    return f"margin at {name}"


def measure_input_margins(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layer: str | None = None,
    layer_margins: Sequence[str] = (),
    norm: float = 2,
    topk: int | None = None,
    eps: float = 1e-6,
    max_samples: int | None = None,
    normalization: Normalization | None = None,
    bins: int = 50,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> InputMarginResult:
    r"""Linearised margins at the input (ODN-G) and at named layers (BAS-ELSAYED).

    .. math:: \gamma = \frac{f_y - f_{c^*}}{\|\nabla_x f_y - \nabla_x f_{c^*}\|_2 + \epsilon},
        \quad c^* = \arg\max_{i\ne y} f_i; \qquad
        \gamma_\ell = \min_{i\ne y}
            \frac{f_y - f_i}{\|\nabla_{h_\ell} f_y - \nabla_{h_\ell} f_i\|_q + \epsilon}

    At the input one backward pass per batch; at layers one per rival, for all layers together.
    Evaluation mode, parameters frozen, nothing of the model changes.

    Args:
        model: any model :func:`largemargin.attach` can read, one row of logits per sample.
        layer_margins: names of modules whose output is moved, "input" for the input itself.
        norm: p of the distance at layers: 1, 2 (default) or inf; q is its dual.
        topk: only the k rivals with the largest logits at layers; default all C - 1.
        eps: default 1e-6 (both papers say "small").
        loader, layer, max_samples, normalization, bins, device, progress: as in
            :func:`largemargin.measure`.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> data = [(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))]
        >>> round(measure_input_margins(model, data).input.overall.mean, 3)
        1.414
    """
    collector = MarginCollector(
        InputSpace(Probe(model, layer=layer), normalization),
        input_margins=True,
        layer_margins=layer_margins,
        norm=norm,
        topk=topk,
        eps=eps,
    )
    columns = read_columns(collector, loader, max_samples, device, progress)
    return collector.result(columns, [], bins)


def _keep_in(points: dict[str, Tensor], name: str) -> LayerHook:
    """Keeps a layer's output. What follows gets a copy, since it may write into it."""

    def keep(module: nn.Module, output: Any) -> Any:
        if name in points:
            raise LargeMarginError(
                f"the model calls the layer {name!r} several times, so that its output is not one "
                "point. Name another layer."
            )
        found = tensors_in(output)
        if not found or not found[0].is_floating_point():
            raise LargeMarginError(
                f"the layer {name!r} must give a floating point tensor, but it gives "
                f"{type(output).__name__}."
            )
        points[name] = found[0]
        if torch.is_grad_enabled() and not found[0].requires_grad:
            found[0].requires_grad_()  # behind an integer input, with parameters frozen
        return found[0].clone() if found[0] is output else None

    return keep


def _differentiable(inputs: Any) -> tuple[Tensor | None, Any]:
    """The first floating point tensor of a model's inputs as a leaf, and the inputs with it."""
    if isinstance(inputs, Tensor):
        leaf, (inputs,) = _differentiable((inputs,))
        return leaf, inputs
    given = dict(inputs) if isinstance(inputs, dict) else dict(enumerate(inputs))
    for name, each in given.items():
        if isinstance(each, Tensor) and each.is_floating_point():
            leaf = given[name] = each.detach().clone().requires_grad_()
            return leaf, given if isinstance(inputs, dict) else tuple(given.values())
    return None, inputs

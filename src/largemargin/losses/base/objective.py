"""``Objective``: named, weighted terms added up."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, refuse_script
from largemargin.heads.head_spec import HeadSpec
from largemargin.losses.base.loss import Loss, LossValue, Summand, Weighted
from largemargin.ops.scheduled_values import followed
from largemargin.ops.similarity import similarity_logits


class Objective(Summand, nn.Module):
    """A weighted sum of named losses: the paper's L = L_S + alpha L_compact + ...

    Example:
        >>> objective = Objective(softmax=CrossEntropy(), margin=0.5 * SampleMargin())
        >>> value = objective(torch.eye(2), torch.eye(2), torch.tensor([0, 1]))
        >>> sorted(value.terms)
        ['margin', 'softmax']

    A sum is one, with the names of ``LOSSES``:
        >>> sorted((CrossEntropy() + 0.5 * SampleMargin()).terms)
        ['sample_margin', 'softmax']

    A factor before it is one before each term:
        >>> (2 * (CrossEntropy() + 0.5 * SampleMargin())).weights
        {'softmax': 2.0, 'sample_margin': 1.0}

    Every loss takes what it needs from the call: features, prototypes and labels always; ``noisy``
    features, ``inputs`` or ``layers`` when a term asks for them. ``logits`` are made from features
    and prototypes when they are not given. The result is a ``LossValue``: ``total``, and ``terms``
    with the unweighted value of each term (a composite term's parts as ``name.part``, and so what
    a term has only observed, its ``observed``).
    """

    __call__: Callable[..., LossValue]

    def __init__(self, **terms: Loss | Weighted) -> None:
        super().__init__()
        if not terms:
            raise LargeMarginError(
                "an Objective needs at least one term, as in Objective(softmax=CrossEntropy())."
            )
        self.terms = nn.ModuleDict()
        self.weights: dict[str, float] = {}
        for name, term in terms.items():
            if isinstance(term, Weighted):
                self.terms[name], self.weights[name] = term.loss, term.weight
            elif isinstance(term, Loss):
                self.terms[name], self.weights[name] = term, 1.0
            else:
                raise LargeMarginError(
                    f"the term {name!r} must be a loss or `weight * loss`, but "
                    f"{type(term).__name__} was given."
                )
            if self.terms[name].reduction == "none":
                raise LargeMarginError(
                    f'the term {name!r} has reduction="none"; terms of an Objective are added up, '
                    'so give it "mean" or "sum".'
                )

    __prepare_scriptable__ = refuse_script

    def forward(
        self,
        features: Tensor,
        prototypes: Tensor | nn.Module,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
        logits: Tensor | None = None,
        noisy: Tensor | None = None,
        inputs: Tensor | None = None,
        layers: list[Tensor] | None = None,
        own: Mapping[str, Mapping[str, Tensor]] | None = None,
        ready: Mapping[str, Tensor] | None = None,
    ) -> LossValue:
        """``own`` replaces arguments for single terms: ``{"center": {"features": hidden}}``.

        ``ready`` holds terms that have been computed already.
        """
        call: dict[str, Any] = {
            "features": features,
            "prototypes": prototypes,
            "labels": labels,
            "logits": logits,
            "noisy": noisy,
            "inputs": inputs,
            "layers": layers,
            "bias": bias,
            "sample_weight": sample_weight,
        }
        values: dict[str, Tensor] = {}
        terms = dict(ready or {})
        for name, loss in self.terms.items():
            assert isinstance(loss, Loss)
            if name in terms:
                values[name] = terms[name]
            else:
                terms[name] = self._value(name, loss, call, own, values)
            for what, share in loss.observed.items():
                values[f"{name}.{what}"] = share
        return LossValue(self._total(terms), values)

    def _total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of the terms' values."""
        compiling, total = torch.compiler.is_compiling(), None
        for name in self.weights:
            moved = followed(self, name) if compiling else None
            weight: float | Tensor = self.weights[name] if moved is None else moved
            plain = isinstance(weight, float) and weight == 1
            weighted = terms[name] if plain else weight * terms[name]
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    def _value(
        self,
        name: str,
        loss: Loss,
        call: dict[str, Any],
        own: Mapping[str, Mapping[str, Tensor]] | None,
        values: dict[str, Tensor],
    ) -> Tensor:
        """One term; it and its parts are added to ``values``."""
        if "logits" in loss.needs and call["logits"] is None:
            call["logits"] = _logits(call["features"], call["prototypes"], call["bias"])
        term_call = call if own is None else {**call, **own.get(name, {})}
        arguments, options = self._arguments(name, loss, term_call)
        composite = loss.named_terms
        if composite is None:
            values[name] = loss(*arguments, **options)
            return values[name]
        value: LossValue = composite(*arguments, **options)
        values |= {f"{name}.{part}": each for part, each in value.terms.items()}
        return value.total

    def head_form(self, num_classes: int, similarity: str | None = None) -> HeadSpec | None:
        """How a head must make its logits to predict as these terms train; None: any way.

        Terms may ask for one similarity at most, unless ``similarity`` says whose form counts.
        """
        forms: dict[str, HeadSpec] = {}
        for name, loss in self.terms.items():
            assert isinstance(loss, Loss)
            form = loss.head_form(num_classes)
            if form is not None and similarity in (None, form.similarity):
                forms[name] = form
        if len({form.similarity for form in forms.values()}) > 1:
            listed = ", ".join(f"{name!r} {form.similarity}" for name, form in forms.items())
            raise LargeMarginError(
                f"the terms train classifiers of different geometry: {listed}. A model predicts "
                "with one of them; say which: similarity=..."
            )
        return next(iter(forms.values()), None)

    @property
    def term_weights(self) -> dict[str, float]:
        """What each reported term is multiplied by in the total."""
        weights: dict[str, float] = {}
        for name, loss in self.terms.items():
            parts: Any = loss.part_weights
            if parts is None:
                weights[name] = self.weights[name]
            else:
                weights |= {f"{name}.{part}": self.weights[name] * w for part, w in parts.items()}
        return weights

    def _arguments(
        self, term: str, loss: Loss, call: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """What a loss takes of a call of the objective: in its order, and by name."""
        arguments: list[Any] = []
        for name in loss.needs:
            if call[name] is None:
                raise LargeMarginError(
                    f"the term {term!r} ({type(loss).__name__}) needs {name}, which was "
                    f"not given. Call objective(features, prototypes, labels, {name}=...)."
                )
            arguments.append(call[name])
        options: dict[str, Any] = {}
        if loss.uses_bias and call["bias"] is not None:
            options["bias"] = call["bias"]
        if call["sample_weight"] is not None and loss.needs != ("prototypes",):
            loss._refuse("sample_weight", True)
            options["sample_weight"] = call["sample_weight"]
        return arguments, options

    def __mul__(self, factor: float) -> "Objective":
        return Objective(**{name: factor * term for name, term in _named(self).items()})

    __rmul__ = __mul__

    def __repr__(self) -> str:
        listed = ", ".join(
            f"{name}={self.weights[name]!r} * {loss!r}" for name, loss in self.terms.items()
        )
        return f"Objective({listed})"


def _logits(features: Tensor, prototypes: Tensor | nn.Module, bias: Tensor | None) -> Tensor:
    if isinstance(prototypes, Tensor):
        return similarity_logits(features, prototypes, bias=bias)
    made: Tensor = prototypes(features)
    return made


def added(*summands: Summand) -> Objective:
    """The objective of ``loss + 0.5 * loss``; terms are named as in ``LOSSES``."""
    terms: dict[str, Loss | Weighted] = {}
    for summand in summands:
        for name, term in _named(summand).items():
            if name in terms:
                raise LargeMarginError(
                    f"the sum has two terms that would be called {name!r}. Give them names of "
                    "their own: Objective(first=..., second=...)."
                )
            terms[name] = term
    return Objective(**terms)


def _named(summand: Summand) -> dict[str, Loss | Weighted]:
    if isinstance(summand, Objective):
        parts = {name: loss for name, loss in summand.terms.items() if isinstance(loss, Loss)}
        return {name: summand.weights[name] * loss for name, loss in parts.items()}
    assert isinstance(summand, Loss | Weighted)
    loss = summand.loss if isinstance(summand, Weighted) else summand
    return {loss.term: summand}

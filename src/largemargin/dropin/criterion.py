"""``Criterion``: what ``attach`` returns, a loss on a model's outputs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.dropin.feature_hooks import FeatureHooks, ForwardRecord, Pass
from largemargin.dropin.fsdp import reach
from largemargin.dropin.model_outputs import (
    check_rows,
    first_half,
    flat_beside,
    has_gradient,
    named_rows,
    rows,
    tensors_in,
)
from largemargin.dropin.training_warnings import Watch
from largemargin.errors import LargeMarginError, refuse_script
from largemargin.heads.centroid_bank import CentroidBank, recomputing
from largemargin.heads.class_head import ClassHead
from largemargin.heads.head_spec import HeadView
from largemargin.losses.base.classwise import collectors
from largemargin.losses.base.loss import Loss, is_hard
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.schedules import Schedule, check_schedules
from largemargin.losses.base.settings import settle
from largemargin.losses.base.terms import matrix_of
from largemargin.ops.scheduled_values import ScheduledValue, current, move
from largemargin.ops.shards import gathered
from largemargin.ops.similarity import HeadLogits
from largemargin.tracing import plain_eager, value_range


class Criterion(nn.Module):
    """A loss called as ``criterion(model(x), labels)``; made by :func:`attach`.

    It returns a 0-dim tensor. After a call ``terms`` holds the named terms, detached and
    unweighted; where that was asked for ``gradient_norms`` holds the norm of each weighted term's
    gradient on the features, and ``gradient_conflicts`` the cosine of the gradients of every two
    terms on the same features: -1 where one undoes what the other does, 0 also for a zero gradient.

    Its own state (centroid banks, parameters of losses, schedules) is in ``state_dict``, its
    parameters in ``parameters()``: pass those to the optimizer too where there are any, see
    :meth:`param_groups`. Model and head are not part of it. It follows the head's device and its
    training or evaluation mode.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        objective: Objective,
        hooks: FeatureHooks,
        *,
        undo: Sequence[Any] = (),
        schedules: Sequence[Schedule] = (),
        accumulate: int = 1,
        automatic: bool = True,
        gradient_norms: bool = False,
        watch: Watch | None = None,
        owns_head: bool = False,
    ) -> None:
        super().__init__()
        self.objective = objective
        self.schedules = list(schedules)
        self.accumulate = accumulate
        self.automatic = automatic
        self.measures_gradients = gradient_norms
        self.terms: dict[str, Tensor] = {}
        self.gradient_norms: dict[str, Tensor] = {}
        self.gradient_conflicts: dict[tuple[str, str], Tensor] = {}
        self.steps = 0
        self._micro = 0
        self._hooks = hooks
        self._noisy_term = next(iter(terms_that_need(objective, "noisy")), None)
        self._inputs_term = next(iter(terms_that_need(objective, "inputs")), None)
        self._undo = list(undo)
        self._watch = watch
        self._owns_head = owns_head
        settle(objective, hooks.layer)
        losses: list[tuple[str, Any]] = [*objective.terms.items()]
        usual = self._noisy_term is None and self._inputs_term is None
        self._row_losses = [
            (name, loss)
            for name, loss in losses
            if usual and type(loss).row_loss is not Loss.row_loss
        ]
        self._parts = [*objective.modules()]  # walking through them takes as long as a small loss
        check_schedules(self.schedules, objective, matrix_of(hooks.layer).shape[0])
        if schedules:
            self._apply_schedules()

    __prepare_scriptable__ = refuse_script

    def forward(
        self,
        outputs: Any,
        labels: Tensor,
        *,
        noisy: Any = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """The loss of one batch.

        Args:
            outputs: what ``model(x)`` returned: logits, or a tuple, dict or dataclass with them.
            labels: (N,) class indices or (N, C) soft targets; (N, T) for a head on sequences.
            noisy: what ``model(x_noisy)`` returned, for robust training; or "second half" when
                ``outputs`` are those of ``model(torch.cat([x, x_noisy]))``.
            sample_weight: (N,).
        """
        again = recomputing()
        if again:
            self._check_replayed()
        usual = None if noisy is not None else self._usual_record(outputs, labels, sample_weight)
        if usual is None:
            return self._of_any(outputs, labels, noisy, sample_weight, again)
        layer, features, objective = self._hooks.layer, usual.features, self.objective
        if self.training != layer.training or objective.training != layer.training:
            self.train(layer.training)
        head = self._head(usual.head, outputs)
        terms = self._row_terms(head, features, labels)
        if len(terms) == len(objective.weights):
            total = objective._total(terms)
        else:
            self._follow(features)
            how: Any = {"logits": outputs, "layers": list(usual.layers) or None, "ready": terms}
            total, terms = objective(features, head, labels, **how)
        self._show(terms)
        self._count_call(features, labels, head, again)
        return total

    def _of_any(
        self, outputs: Any, labels: Tensor, noisy: Any, sample_weight: Tensor | None, again: bool
    ) -> Tensor:
        """The loss of any outputs, wherever their features and logits are found."""
        found = self.read(outputs)
        self._follow(found.features)
        arguments = self._arguments(found, noisy)
        features = arguments["features"]
        labels, sample_weight = _flat(found.features, labels, sample_weight)
        check_rows(features, labels, half=isinstance(noisy, str))
        logits = arguments["logits"] if found.untouched and not found.own else None
        head = self._head(found.swapped, None if logits is None else _wide(logits))
        value = self.objective(
            prototypes=head, labels=labels, sample_weight=sample_weight, **arguments
        )
        self._show(value.terms)
        if self.measures_gradients:
            self._measure_gradients(value.terms, arguments)
        self._count_call(features, labels, head, again)
        if outputs is logits and not self._hooks.is_fsdp:
            return value.total
        made = tensors_in(outputs if noisy is None else (outputs, noisy))
        return reach(value.total, made, fsdp=self._hooks.is_fsdp)

    def _usual_record(
        self, outputs: Any, labels: Any, sample_weight: Tensor | None
    ) -> ForwardRecord | None:
        """The pass that made the outputs, in ordinary training of one vector and one label each.

        None also where no loss is one of rows of logits.
        """
        if sample_weight is not None or self.measures_gradients or not self._row_losses:
            return None
        if type(outputs) is not Tensor or type(labels) is not Tensor or not plain_eager():
            return None
        record = self._hooks.usual_record(outputs)
        if record is None or self._hooks.is_fsdp:
            return None
        return record if is_hard(labels, outputs) else None

    def _row_terms(self, head: HeadView, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Terms that rows of the head's logits determine, in a few calls."""
        made = head.made
        assert made is not None
        held = head.label_range = value_range(labels) if labels.is_cpu else None
        found: dict[str, Tensor] = {}
        for name, loss in self._row_losses:
            if loss.is_usual():
                term = loss._of_rows(made, features, head.weight, labels, held)
                if term is not None:
                    found[name] = term
        if made.logits.dtype is torch.bfloat16:
            head.made = made._replace(logits=_wide(made.logits))
        return found

    def _check_replayed(self) -> None:
        """Activation checkpointing runs the criterion again, in the backward pass."""
        if self.training and self.schedules and self.automatic:
            raise LargeMarginError(
                "activation checkpointing runs this criterion again in the backward pass, when its "
                "schedules have moved on: gradients would be those of the next step. Call the "
                'criterion outside of the checkpoint, or attach with stepping="manual" and call '
                "criterion.step() after optimizer.step()."
            )

    def _arguments(self, found: Pass, noisy: Any) -> dict[str, Any]:
        """What the objective is called with beside prototypes and labels."""
        if noisy is not None or self._noisy_term or self._inputs_term:
            self._check_needs(found, noisy)
        features, logits = found.features, found.logits
        if features.dim() > 2:  # a head on sequences
            features, logits = rows(features), None if logits is None else rows(logits)
        arguments: dict[str, Any] = {
            "features": features,
            "logits": logits,
            "inputs": found.inputs,
            "layers": list(found.layers) or None,
        }
        if found.own:
            arguments["own"] = self._own_features(found)
        if noisy is not None:
            self._add_noisy(arguments, found, noisy)
        return arguments

    def _check_needs(self, found: Pass, noisy: Any) -> None:
        """What the terms need beside features and labels, and what none of them uses."""
        if noisy is None and self._noisy_term is not None:
            raise LargeMarginError(
                f"the term {self._noisy_term!r} compares with noisy features: call "
                "criterion(model(x), labels, noisy=model(x_noisy))."
            )
        if noisy is not None and self._noisy_term is None:
            raise LargeMarginError(
                "noisy was given, but no term of the objective uses it. Leave it out, or add a "
                "term that does: RobustDiscriminative, Stability."
            )
        if self._inputs_term is not None and found.inputs is None:
            raise LargeMarginError(
                f"the term {self._inputs_term!r} differentiates by the model's input, but the "
                "model ran under torch.no_grad() or torch.inference_mode(). Run model and "
                "criterion outside of them, also for validation."
            )

    def _own_features(self, found: Pass) -> dict[str, dict[str, Tensor]]:
        """Features that single terms have of their own."""
        width = found.features.shape[-1]
        own: dict[str, dict[str, Tensor]] = {}
        for term, output in found.own.items():
            features = named_rows(output, found.features)
            needs: Any = self.objective.terms[term].needs
            if "prototypes" in needs and features.shape[1] != width:
                raise LargeMarginError(
                    f"the term {term!r} compares features with prototypes of width {width}, but "
                    f"the module named as features gives {features.shape[1]}. Name it for the "
                    "terms that work there only: attach(..., features={'center': 'layer3'})."
                )
            own[term] = {"features": features}
        return own

    def _add_noisy(self, arguments: dict[str, Any], found: Pass, noisy: Any) -> None:
        """Features of the noisy inputs: of a pass of their own, or the second half of this one."""
        own: dict[str, dict[str, Tensor]] = arguments.get("own", {})
        if not isinstance(noisy, str):
            second = self._hooks.find(noisy, "noisy")
            arguments["noisy"] = rows(second.features)
            for term, features in own.items():
                features["noisy"] = named_rows(second.own[term], second.features)
            return
        if found.inputs is not None or found.layers:
            raise LargeMarginError(
                'losses on gradients of inputs or layers do not go with noisy="second half": '
                "half of those would belong to other logits. Call the model twice and pass "
                "noisy=model(x_noisy)."
            )
        for features in (arguments, *own.values()):
            features["features"], features["noisy"] = first_half(noisy, features["features"])
        if found.logits is not None:
            arguments["logits"] = arguments["logits"].chunk(2)[0]

    def _show(self, terms: dict[str, Tensor]) -> None:
        """Keep the terms to be looked at, without their graph.

        A compiler may find that the loss and its only term are the same number and return one
        tensor for both. torch marks that one as having no gradient then, and the loss has none.
        The maximum of a number and itself is one that compilers do not see through.
        """
        compiling = torch.compiler.is_compiling()
        shown: dict[str, Tensor] = {}
        for name, term in terms.items():
            value = term.detach()
            shown[name] = torch.maximum(value, value) if compiling else value
        vars(self)["terms"] = shown

    def _count_call(self, features: Tensor, labels: Tensor, head: HeadView, again: bool) -> None:
        """A training call, unless it is run ``again``: warnings look at it, schedules count it."""
        if again or not self.training:
            return
        if torch.compiler.is_compiling():
            if self.schedules and self.automatic:
                raise LargeMarginError(
                    "schedules count calls in Python, which torch.compile would freeze. Attach "
                    'with stepping="manual", call criterion.step() after optimizer.step(), outside '
                    "the compiled function."
                )
            return
        if self._watch is not None:
            self._watch(self, features, labels, head)
        if self.automatic:
            state = vars(self)  # a module's own way of setting attributes is slow
            state["_micro"] += 1
            if self._micro >= self.accumulate:
                state["_micro"] = 0
                self.step()

    @property
    def head(self) -> HeadView:
        """The head as it is now: class vectors, bias, and how logits are made from them."""
        return self._head(None, None)

    def _head(
        self, swapped: tuple[Tensor, Tensor | None] | None, logits: Tensor | None
    ) -> HeadView:
        """It, or it with the parameters of a pass; ``logits`` are those of the features at hand."""
        layer = self._hooks.layer
        if swapped is None:
            swapped = matrix_of(layer), getattr(layer, "bias", None)
        weight, bias = swapped
        if hasattr(weight, "full_tensor"):
            weight, bias = gathered(weight), None if bias is None else gathered(bias)
        if weight.dim() < 2:
            raise LargeMarginError(
                f"the head's weight has the shape {tuple(weight.shape)}: something has flattened "
                "or partitioned it (FullyShardedDataParallel, ZeRO stage 3). Use "
                "torch.distributed.fsdp.fully_shard, or ZeRO up to stage 2."
            )
        similarity, scale = "dot", 1.0
        if type(layer) is not nn.Linear:  # looking for what a module has not takes long
            similarity, scale = getattr(layer, "similarity", "dot"), current(layer, "scale", 1.0)
        made = None if logits is None else HeadLogits(logits, similarity, scale, bias)
        return HeadView(weight, bias, similarity, scale, made)

    @property
    def model(self) -> nn.Module:
        """The model it was attached to, without DDP or compile wrappers."""
        return self._hooks.model

    @property
    def layer(self) -> nn.Module:
        """The model's classification layer."""
        return self._hooks.follow()

    def read(self, outputs: Any) -> Pass:
        """Features, logits, inputs and layers of the forward pass that made these outputs."""
        if self._hooks.removed:
            raise LargeMarginError(
                "this criterion was taken off its model by undo(). Call attach(model, objective) "
                "again."
            )
        found = self._hooks.find(outputs)
        if found.blind and torch.is_grad_enabled() and has_gradient(outputs):
            raise LargeMarginError(
                "the outputs have gradients, but the features were made without, so nothing below "
                "the head would train. Reentrant activation checkpointing does this: pass "
                "use_reentrant=False."
            )
        return found

    def step(self) -> None:
        """Advance the schedules by one optimisation step (automatic unless attached otherwise).

        Called by hand it also ends a step that had fewer micro-batches than ``accumulate``: banks
        write what they have collected.
        """
        vars(self)["steps"] += 1
        if not self.automatic:
            for each in collectors(self.objective):
                if each.accumulate != 1:
                    each.commit()
        if self.schedules:
            self._apply_schedules()

    def undo(self) -> None:
        """Take the hooks off the model and put its original head back, with the trained weight."""
        self._hooks.remove()
        for restore in reversed(self._undo):
            restore()
        self._undo = []

    def param_groups(
        self,
        model: nn.Module,
        *,
        head: Mapping[str, Any] | None = None,
        loss: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Optimizer groups: the model without its head, the head, the losses' own parameters.

        Args:
            head: settings of the head's group, as ``{"lr": 1.0, "weight_decay": 0.0}``.
            loss: settings of the group of the losses' parameters.

        Groups without parameters are left out, so nothing is trained twice or forgotten.
        """
        own = list(self.layer.parameters())
        chosen = {id(parameter) for parameter in own}
        chosen |= {id(parameter) for parameter in self.parameters()}  # it may be the model's child
        rest = [each for each in model.parameters() if id(each) not in chosen]
        groups = [
            {"params": rest},
            {"params": own, **(head or {})},
            {"params": list(self.parameters()), **(loss or {})},
        ]
        return [group for group in groups if group["params"]]

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "micro": self._micro,
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if len(state["schedules"]) != len(self.schedules):
            raise LargeMarginError(
                f"the checkpoint holds {len(state['schedules'])} schedules but this criterion has "
                f"{len(self.schedules)}. Attach with the same schedules before loading."
            )
        self.steps, self._micro = state["steps"], state["micro"]
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
        if self.schedules:
            self._apply_schedules()

    def _apply_schedules(self) -> None:
        for schedule in self.schedules:
            schedule.apply(self.objective, self.steps)
        if self._owns_head:
            head = self._hooks.layer
            assert isinstance(head, ClassHead)
            form = self.objective.head_form(head.num_classes, head.similarity)
            if form is not None and form.scale != head.scale:
                # Not in place while a compiled model may wait for its backward pass.
                move(head, "scale", form.scale, in_place=not self.automatic)
        weight = matrix_of(self._hooks.layer)
        for module in (*self.objective.modules(), *self._hooks.layer.modules()):
            if isinstance(module, ScheduledValue):
                module.follow(weight)

    def _follow(self, features: Tensor) -> None:
        """Stay on the model's device, in its mode, and double where it is double."""
        training = self._hooks.layer.training
        if self.training != training or self.objective.training != training:
            # The objective may have another criterion too, on an averaged copy of the model.
            self.train(training)
        if torch.compiler.is_compiling():
            return
        for module in self._parts:
            for tensor in (*module._buffers.values(), *module._parameters.values()):
                if tensor is not None and tensor.is_floating_point():
                    if tensor.device != features.device:
                        self.objective.to(features.device)
                    if features.dtype == torch.float64 and tensor.dtype != torch.float64:
                        self.objective.double()
                    return

    def _measure_gradients(self, terms: dict[str, Tensor], arguments: dict[str, Any]) -> None:
        weights = self.objective.term_weights
        gradients: dict[str, tuple[Tensor, Tensor]] = {}
        for name, term in terms.items():
            if name not in weights:  # only observed
                continue
            own = arguments.get("own", {})
            features = own.get(name.split(".")[0], arguments)["features"]
            gradient = None
            if term.requires_grad and features.requires_grad:
                (gradient,) = torch.autograd.grad(
                    term, features, retain_graph=True, allow_unused=True
                )
            if gradient is None:
                gradient = torch.zeros_like(features)
            gradients[name] = features, weights[name] * gradient.detach()
        self.gradient_norms = {name: each.norm() for name, (_, each) in gradients.items()}
        self.gradient_conflicts = {
            (one, other): F.cosine_similarity(first.flatten(), second.flatten(), dim=0)
            for (one, (place, first)), (other, (elsewhere, second)) in combinations(
                gradients.items(), 2
            )
            if place is elsewhere
        }

    @property
    def banks(self) -> list[CentroidBank]:
        """The centroid banks of the objective."""
        return [module for module in self.objective.modules() if isinstance(module, CentroidBank)]

    def extra_repr(self) -> str:
        layer = self._hooks.layer
        return f"head={type(layer).__name__}, schedules={self.schedules!r}"


def _flat(
    features: Tensor, labels: Tensor, sample_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Labels and weights of a head on sequences, one a row of it."""
    if features.dim() <= 2:
        return labels, sample_weight
    weight = None if sample_weight is None else flat_beside(sample_weight, features)
    return flat_beside(labels, features), weight


def _wide(logits: Tensor) -> Tensor:
    """Logits that a loss reads: of float16, which ends at 65504, it makes them anew."""
    return logits.float() if logits.dtype is torch.bfloat16 else logits


def terms_that_need(objective: Objective, argument: str) -> list[str]:
    return [name for name, loss in objective.terms.items() if argument in loss.needs]  # type: ignore[operator]

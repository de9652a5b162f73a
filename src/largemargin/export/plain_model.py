"""A model as it predicts: a copy in evaluation mode, without hooks, with torch-only heads."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.dropin.find_head import find_layer, parents_of, unwrapped
from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.heads.class_head import ClassHead
from largemargin.heads.simplex import SimplexHead
from largemargin.losses.base.terms import matrix_of
from largemargin.measuring.logit_model import LogitModel
from largemargin.ops.norms import normalize
from largemargin.ops.shards import is_sharded

Outputs: TypeAlias = Literal["logits", "probabilities", "features"]
OUTPUTS: tuple[Outputs, ...] = ("logits", "probabilities", "features")

HOOKS = "largemargin.dropin."
"""The module whose hooks read features for a criterion."""


class HeadFacts(NamedTuple):
    """What a head is, as plain data."""

    layer: str
    kind: str
    similarity: str
    scale: float
    bias: bool
    num_classes: int
    in_features: int


def head_facts(path: str, head: nn.Module) -> HeadFacts:
    weight = matrix_of(head)
    kinds = {ClassHead: "ClassHead", SimplexHead: "SimplexHead"}
    return HeadFacts(
        layer=path,
        kind=next((name for kind, name in kinds.items() if isinstance(head, kind)), "Linear"),
        similarity=str(getattr(head, "similarity", "dot")),
        scale=float(getattr(head, "scale", 1.0)),
        bias=getattr(head, "bias", None) is not None,
        num_classes=int(weight.shape[0]),
        in_features=int(weight.shape[-1]),
    )


def check_class_names(class_names: Sequence[str], facts: HeadFacts) -> None:
    if isinstance(class_names, str) or not all(isinstance(each, str) for each in class_names):
        raise LargeMarginError("class_names must be a list of str, one per class.")
    if len(class_names) != facts.num_classes:
        raise LargeMarginError(
            f"class_names holds {len(class_names)} names, but the head {facts.layer!r} has "
            f"{facts.num_classes} classes."
        )


def check_target(target: Path, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise LargeMarginError(f"there is no folder {target.parent} to write {target.name} to.")
    if target.exists() and not overwrite:
        raise LargeMarginError(f"{target} exists already. Pass overwrite=True to replace it.")


def find_head(model: nn.Module, layer: str | None) -> tuple[str, nn.Module]:
    """The head by name, the one a criterion is attached to, or the last linear layer."""
    attached = {
        path: module
        for path, module in model.named_modules()
        for hook in filter(_is_own, module._forward_hooks.values())
        if hook.owner.layer is module and not hook.owner.removed
    }
    if layer is None and len(attached) == 1:
        return next(iter(attached.items()))
    return find_layer(model, layer)


def _is_own(hook: Any) -> bool:
    return type(hook).__module__.startswith(HOOKS)


def check_whole(model: nn.Module) -> None:
    """Refuse weights that are not all here: shards of FSDP, or tensors without storage."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_sharded(tensor):
            raise LargeMarginError(
                f"{name!r} is sharded over processes. Gather the weights first: "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)) of torch.distributed.checkpoint.state_dict, loaded into a "
                "model that is not sharded."
            )
        if tensor.is_meta:
            raise LargeMarginError(
                f"{name!r} is on the meta device and holds no numbers. Load weights first."
            )


def evaluation_copy(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """A deep copy in evaluation mode without this library's hooks; the model stays as it is."""
    bare = unwrapped(model)[0]
    check_whole(bare)
    copied = deepcopy(bare).eval().requires_grad_(False)
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if _is_own(hook):
                    del hooks[key]
                    for flags in (
                        module._forward_hooks_with_kwargs,
                        module._forward_pre_hooks_with_kwargs,
                    ):
                        flags.pop(key, None)
    return copied if device is None else copied.to(device)


def unit_rows(features: Tensor) -> Tensor:
    """Rows over their length, zero rows staying zero; no square leaves the range of float32."""
    largest = features.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(features.dtype).tiny)
    scaled = features / largest
    length = largest * scaled.square().sum(-1, keepdim=True).sqrt()
    return features / length.clamp_min(1e-12)


class PlainHead(nn.Linear):
    """The logits of a head from torch alone: constants computed once, float32 at least."""

    def __init__(self, head: ClassHead | SimplexHead) -> None:
        weight = matrix_of(head).detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        similarity, scale = head.similarity, head.scale
        bias = None if head.bias is None else scale * head.bias.detach().to(wide)
        weight = weight.to(wide)
        if similarity in ("cosine", "cosine_prototypes"):
            weight = normalize(weight)
        elif similarity == "euclidean":
            half = -0.5 * scale * weight.square().sum(1)
            bias = half if bias is None else bias + half
        super().__init__(
            head.in_features, head.num_classes, bias=bias is not None, device="meta", dtype=wide
        )
        self.weight = nn.Parameter(scale * weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.normalizes = similarity == "cosine"
        self.half_scale = 0.5 * scale if similarity == "euclidean" else None

    def forward(self, features: Tensor) -> Tensor:
        if features.dtype != self.weight.dtype:
            features = features.to(self.weight.dtype)
        if self.normalizes:
            features = unit_rows(features)
        logits = super().forward(features)
        if self.half_scale is not None:
            logits = logits - self.half_scale * features.square().sum(-1, keepdim=True)
        return logits


def plain_head(head: nn.Module) -> nn.Module:
    """The head in torch-only form; a layer that is plain already is returned as it is."""
    if type(head) not in (ClassHead, SimplexHead):
        return head
    return PlainHead(head).train(head.training)  # type: ignore[arg-type]


class Deployed(nn.Module):
    """A model that returns one tensor: the head's logits, their softmax, or its features.

    It takes positional arguments only, the last ones under the names ``keywords`` of the model:
    torch.export handles keyword arguments of wrappers differently from release to release.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        outputs: Outputs,
        keywords: tuple[str, ...] = (),
        temperature: float = 1.0,
        divisor: float = 1.0,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.divisor = divisor
        self.model = model
        self.keywords = keywords
        self.path = path
        self.outputs: Outputs = outputs
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._handle = self.head.register_forward_hook(self._take, with_kwargs=True)

    @property
    def head(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    def _take(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self._taken.append((args[0] if args else next(iter(kwargs.values())), output))

    def forward(self, *args: Any) -> Tensor:
        self._taken.clear()
        count = len(args) - len(self.keywords)
        self.model(*args[:count], **dict(zip(self.keywords, args[count:], strict=True)))
        if len(self._taken) != 1:
            raise LargeMarginError(
                f"the head {self.path!r} ran {len(self._taken)} times in one forward pass, so it "
                "is not clear which of its outputs to export. Name another layer: layer=..."
            )
        features, logits = self._taken.pop()
        if self.outputs == "features":
            return features
        if self.divisor != 1:
            logits = logits / self.divisor
        if self.outputs == "logits":
            return logits
        wide = logits.float()
        return (wide if self.temperature == 1 else wide / self.temperature).softmax(-1)

    def make_plain(self) -> None:
        """Replace every head of this library by its torch-only form."""
        self._handle.remove()
        for module in list(self.model.modules()):
            plain = plain_head(module)
            if plain is not module:
                for parent, name in parents_of(self, module):
                    parent._modules[name] = plain
        self._handle = self.head.register_forward_hook(self._take, with_kwargs=True)


def deployed(
    model: nn.Module,
    *,
    layer: str | None = None,
    outputs: Outputs = "logits",
    temperature: float = 1.0,
    keywords: tuple[str, ...] = (),
    device: torch.device | str | None = None,
) -> tuple[Deployed, HeadFacts]:
    """A copy of the model that returns ``outputs``, its heads still those of the library."""
    check_choice("outputs", outputs, OUTPUTS)
    check_number("temperature", temperature, above=0)
    if temperature != 1 and outputs != "probabilities":
        raise LargeMarginError(
            f"a temperature is for probabilities, but outputs={outputs!r} was given with "
            f"temperature={temperature:g}."
        )
    bare = unwrapped(model)[0]
    path, head = find_head(bare, layer)
    # The one change after a head that is this library's own.
    scaled = isinstance(getattr(bare, "model", None), LogitModel)  # a TemperatureScaled model
    divisor = float(bare.temperature) if scaled else 1.0  # type: ignore[arg-type]
    copied = evaluation_copy(model, device)
    made = Deployed(copied, path, outputs, keywords, float(temperature), divisor)
    return made, head_facts(path, head)

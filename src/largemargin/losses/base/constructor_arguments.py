"""Arguments of constructors: what a wrong one means, and which ones build a module again.

Losses of other libraries call the same things by other names. A loss is told of them here, once,
for all classes: a message that says ``scale`` to whoever wrote ``s`` saves a look at the docs. The
``repr`` of a loss is an expression that builds it again.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_sizes

CALLED: dict[str, tuple[str, ...]] = {
    "scale": ("s", "scaling"),
    "margin": ("m", "margins", "delta"),
    "max_margin": ("m", "max_m", "margin", "u_margin", "u_m"),
    "min_margin": ("l_margin", "l_m"),
    "min_norm": ("l_a",),
    "max_norm": ("u_a",),
    "concentration": ("h",),
    "std": ("sigma",),
    "log_zero": ("A",),
    "rate": ("t_alpha", "alpha"),
    "weight": ("class_weights", "class_weight", "weights", "cls_weights", "alpha", "pos_weight"),
    "class_counts": (
        "cls_num_list",
        "class_count",
        "counts",
        "samples_per_class",
        "samples_per_cls",
    ),
    "smoothing": ("epsilon", "eps"),
    "label_smoothing": ("smoothing", "label_smooth", "smooth", "epsilon", "eps"),
    "reduction": ("reduce", "size_average", "reducer"),
    "ignore_index": ("ignore_label", "ignore", "ignored_index"),
    "prior": ("priors", "class_prior", "cls_prior", "log_prior", "base_probs"),
    "temperature": ("t", "temp", "tau"),
    "strength": ("lam", "lambda_", "lambd", "reg", "reg_lambda", "lambda_g", "coef"),
    "num_classes": ("n_classes", "num_class", "class_num", "classnum", "out_features"),
    "dim": ("embedding_size", "embedding_dim", "feat_dim", "feature_dim", "in_features"),
}
"""Arguments of losses, and what other libraries call them."""

SIZES = frozenset({"num_classes", "dim", *CALLED["num_classes"], *CALLED["dim"]})
FACTORS = frozenset({"strength", "loss_weight", *CALLED["strength"]})
HEAD = (
    "The class vectors are not in the loss but in the model's head: criterion = lm.attach(model, "
    "{loss}(...)), or head = lm.ClassHead(dim, num_classes) and loss(features, head, labels)."
)
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(SIZES, HEAD),
    **dict.fromkeys(FACTORS, "A factor is written before the loss: 0.5 * {loss}(...)."),
    **dict.fromkeys(
        ("device", "dtype", "use_gpu"),
        "A loss is moved like a module, {loss}(...).to(device); with attach it follows the model.",
    ),
    **dict.fromkeys(
        ("sample_weight", "sample_weights"),
        "Weights of samples come with the batch: loss(..., sample_weight=weights).",
    ),
    **dict.fromkeys(
        ("weight_regularizer", "embedding_regularizer", "regularizer"),
        "Losses add up: {loss}(...) + 0.5 * lm.SampleMargin().",
    ),
    **dict.fromkeys(
        ("temperature", "tau"), "A temperature is 1 / scale; that of a prior is counts**tau."
    ),
    "easy_margin": 'Of ArcFace that is mode="easy".',
    "class_counts": "Of counts are made weight=lm.functional.balanced_weights(counts), a factor of "
    "the loss, and prior=counts, a shift of the logits.",
}
"""What is no argument of a loss, and where it goes."""

METHODS: dict[str, str] = {
    "amsoftmax": "CosFace",
    "arcfaceclshead": "SubCenterHead",
    "asoftmax": "SphereFace",
    "balancedsoftmax": "LogitAdjustment",
    "cb": "functional.balanced_weights",
    "ce": "CrossEntropy",
    "classbalanced": "functional.balanced_weights",
    "combinedmargin": "UnifiedMargin",
    "gce": "GeneralizedCrossEntropy",
    "labelsmoothingcrossentropy": "CrossEntropy",
    "largemargininsoftmax": "Kobayashi",
    "largemarginsoftmax": "LSoftmax",
    "mag": "MagFace",
    "maglinear": "MagFace",
    "normalizedsoftmax": "NormFace",
    "partialfc": "ShardedClassHead",
    "partialfcv2": "ShardedClassHead",
    "sce": "SymmetricCrossEntropy",
    "setadaptivemarginshook": "functional.dynamic_margins",
    "softtargetcrossentropy": "CrossEntropy",
    "subcenterarcface": "SubCenterHead",
    "truncated": "GeneralizedCrossEntropy",
    "vs": "VSLoss",
}
"""Methods whose names elsewhere are not like ours, without case, underscores and "loss"."""


def method_called(name: str) -> str:
    """What has this name elsewhere, as ``AMSoftmaxLoss`` or ``am_softmax``; empty if unknown."""
    return METHODS.get(name.lower().replace("_", "").removesuffix("loss"), "")


class WrongArguments(LargeMarginError, TypeError):
    """A loss was made with arguments that it does not have; Python's own error is a TypeError."""


def arguments_of(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """The arguments of a constructor by name, with those that it hands on to its base classes."""
    found: dict[str, inspect.Parameter] = {}
    for cls in kind.__mro__:
        if cls is nn.Module:
            break
        if "__init__" not in cls.__dict__:
            continue
        own = list(inspect.signature(cls.__dict__["__init__"]).parameters.values())[1:]
        for each in own:
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                found.setdefault(each.name, each)
        if all(each.kind is not each.VAR_KEYWORD for each in own):
            break
    return {name: each for name, each in found.items() if name not in _refused(kind)}


SAID: dict[str, type] = {"scale": float, "weight": Tensor}
"""Arguments whose own checks say more."""


def check_call(kind: type[Any], args: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """Refuse what Python itself would refuse, with what to do, and numbers that are none."""
    signature = inspect.signature(kind.__init__)
    try:
        given = signature.bind(None, *args, **settings).arguments
    except TypeError as wrong:
        raise wrong_arguments(kind, settings, args, str(wrong)) from None
    known = arguments_of(kind)
    for name, value in given.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for each in value.keys() & known.keys():
                _check_value(kind, each, value[each], known[each])
        elif name in known:
            _check_value(kind, name, value, known[name])


def _check_value(kind: type[Any], name: str, value: Any, parameter: inspect.Parameter) -> None:
    """A switch is a bool; a number has a size to compute with, and is one where one is meant."""
    named = f"{name} of {kind.__name__}"
    if isinstance(parameter.default, bool):
        if type(value).__name__ not in ("bool", "bool_"):
            raise LargeMarginError(f"{named} must be True or False, but {value!r} was given.")
    elif value is None and isinstance(parameter.default, float):
        raise LargeMarginError(f"{named} must be a number, but None was given.")
    elif isinstance(value, SAID.get(name, ())) or name in getattr(kind, "fixed", ()):
        return
    elif isinstance(value, float | Tensor):
        if isinstance(value, Tensor) and value.dim() and parameter.annotation is float:
            raise LargeMarginError(
                f"{named} is one number, but a tensor of shape {tuple(value.shape)} was given."
            )
        if isinstance(value, Tensor) or not math.isinf(value):  # which some losses take
            check_sizes(named, value)


def wrong_arguments(
    kind: type[Any], settings: Mapping[str, Any], args: Sequence[Any] = (), refusal: str = ""
) -> WrongArguments:
    """What is wrong with ``kind(*args, **settings)``, what was meant and what there is.

    Args:
        refusal: what Python says of it, where it cannot even call the constructor.
    """
    known, name = arguments_of(kind), kind.__name__
    first = [each.name for each in known.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    unknown = [each for each in settings if each not in known]
    missing = [
        each
        for each in first[len(args) :]
        if each not in settings and known[each].default is inspect.Parameter.empty
    ]
    said: list[str] = []
    if len(args) > len(first):
        said += _by_name(name, known, args, len(first))
    if unknown:
        said.append(f"{name} has no argument {' or '.join(map(repr, unknown))}.")
        said += dict.fromkeys(filter(None, (_meant(each, known, kind) for each in unknown)))
    if refusal and missing:
        said.append(f"{name} needs {' and '.join(missing)}.")
    if not said:
        said.append(f"{name} cannot be made: {refusal}.")
    if known:
        said.append(f"It takes: {', '.join(known)}.")
    return WrongArguments(" ".join(said))


def _by_name(name: str, known: Mapping[str, Any], args: Sequence[Any], taken: int) -> Iterator[str]:
    """What to write in place of the arguments that were given by position, ``taken`` of them well.

    Two numbers are those of a loss that has class vectors of its own.
    """
    numbers = all(isinstance(each, int | float) for each in args)
    best = list(known)[:2] if numbers else ["weight"]  # torch's first argument
    some = ", ".join(f"{each}=..." for each in best if each in known) or "softmax=..."
    given = ", ".join(_short(each) for each in args[taken:])
    yield f"{name} takes its arguments by name, {name}({some}), but got {given}."
    if all(isinstance(each, int) for each in args):
        yield HEAD.format(loss=name)


def _meant(name: str, known: Mapping[str, Any], kind: type[Any]) -> str:
    """What an argument of another name is called here, or where it goes."""
    meant = [here for here, others in CALLED.items() if name in others]
    for each in meant:
        if each in known:
            return f"{name} is called {each} here."
    refused = _refused(kind)
    for each in (name, *meant):
        if each in refused:
            return f"It does not support {each}: {refused[each]}"
    for each in (name, *meant):
        if each in ELSEWHERE:
            return ELSEWHERE[each].format(loss=kind.__name__)
    close = get_close_matches(name, known, n=1, cutoff=0.7) if len(name) > 2 else []
    return f"Did you mean {close[0]}?" if close else ""


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"a {type(value).__name__}"


def constructor_arguments(module: nn.Module, base: type[nn.Module]) -> dict[str, Any]:
    """Arguments that build an equal module: those without default, or that differ from it."""
    parameters = _parameters(module, base)
    arguments = {}
    for name, parameter in parameters.items():
        value = getattr(module, name)
        default = getattr(module, "defaults", {}).get(name, parameter.default)
        required = default is parameter.empty
        if required or isinstance(value, Tensor) or value != default:
            arguments[name] = value
    return arguments


def constructor_repr(module: nn.Module, base: type[nn.Module]) -> str:
    """A repr that evaluates to an equal module: arguments that differ from their defaults."""
    parameters = _parameters(module, base)
    shown = []
    for name, value in constructor_arguments(module, base).items():
        required = parameters[name].default is inspect.Parameter.empty
        shown.append(_literal(value) if required else f"{name}={_literal(value)}")
    return f"{type(module).__name__}({', '.join(shown)})"


def _parameters(module: nn.Module, base: type[nn.Module]) -> dict[str, inspect.Parameter]:
    parameters: dict[str, inspect.Parameter] = {}
    for cls in (type(module), base):
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
                parameters.setdefault(name, parameter)
    return {name: each for name, each in parameters.items() if name not in _refused(type(module))}


def _refused(kind: type[Any]) -> Mapping[str, str]:
    return getattr(kind, "refuses", {})


def _literal(value: object) -> str:
    if isinstance(value, Tensor):
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    return f"float({str(value)!r})" if value in (math.inf, -math.inf) else repr(value)

"""LogitNorm: cross entropy of logits of one length, against overconfidence (Wei et al. 2022)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor

from largemargin.errors import LARGEST, check_number
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range
from largemargin.losses.base.terms import LogitOptions, check_setting, whole_logits
from largemargin.losses.cross_entropy import cross_entropy
from largemargin.ops.norms import safe_norm
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes

_DENSE = "the length of a sample's logits is none of the class statistics, so they must exist."


class LogitNorm(LogitLoss):
    r"""LogitNorm (BAS-LOGITNORM; Wei et al. 2022, eq. 5): only the direction of the logits counts.

    .. math:: \ell = \mathrm{CE}\Bigl(\frac{f}{\tau(\|f\| + 10^{-7})},\ y\Bigr)

    The network cannot lower the loss by longer logits, so its softmax tells unknown inputs apart.
    The model predicts with f; the largest probability of f is the score for OOD.

    Args:
        temperature: tau > 0, default 0.04 (OpenOOD's training configuration, for all its data sets;
            the authors' command for CIFAR-10 has 0.01). The loss is at least
            :math:`\log(1 + (C-1)e^{-2/\tau})`.
        similarity, scale, options: those of every :class:`LogitLoss`. The scale cancels, and a
            ``prior`` shifts the logits after the division.

    Departures: none.

    Example:
        >>> LogitNorm(temperature=1.0)(torch.tensor([[3.0, 4.0]]), torch.tensor([1]))
        tensor(0.5981)
    """

    key: ClassVar[str] = "logit_norm"
    limits: ClassVar[Mapping[str, Limits]] = {
        "temperature": {"at_least": 1 / LARGEST, "at_most": LARGEST}
    }
    search_space: ClassVar[Mapping[str, Dimension]] = {"temperature": Range(0.01, 1.0)}
    refuses: ClassVar[dict[str, str]] = {"chunked": _DENSE}

    def __init__(
        self,
        *,
        temperature: float = 0.04,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("temperature", temperature, **self.limits["temperature"])
        self.temperature = temperature

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return logit_norm(*inputs, temperature=current(self, "temperature"), **logits, **self.how)


def logit_norm(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    temperature: float = 0.04,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """LogitNorm per sample; :class:`LogitNorm` has equation, arguments and an example."""
    check_setting("temperature", temperature, at_least=1 / LARGEST, at_most=LARGEST)
    logits, labels = whole_logits(features, prototypes, labels, options, "logit_norm", _DENSE)
    lengths = temperature * (safe_norm(logits) + 1e-7)
    kept: Any = {key: options[key] for key in ("log_prior", "validate") if key in options}
    return cross_entropy(logits / lengths[:, None], labels, checked=True, **kept)

"""Sample-margin regularizer: minus the margin itself (LTLM)."""

from typing import Any, ClassVar, Unpack

from torch import Tensor

from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.terms import over_targets
from largemargin.ops.class_stats import ComputeOptions, class_stats
from largemargin.ops.row_values import RowLoss
from largemargin.ops.similarity import HeadLogits
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class SampleMargin(Loss):
    r"""Sample-margin regularizer (ZHO-RSM), :math:`R = \max_{j\ne y}\cos\theta_j - \cos\theta_y`.

    LTLM adds it with weight 0.5 to cross entropy, CosFace, ArcFace and NormFace (Table 1). On
    balanced data with D >= C-1 its minimum -C/(C-1) is the simplex (Thm 7). The gradient goes to
    one maximising rival.

    Args:
        normalize: cosines (default, also beside plain cross entropy) or raw inner products.
        options: those of every :class:`Loss`.

    Departures: erratum Z10 (indices) only.

    Example:
        >>> SampleMargin()(torch.tensor([[3.0, 4.0]]), torch.eye(2), torch.tensor([1]))
        tensor(-0.2000)
    """

    key: ClassVar[str] = "sample_margin"
    is_penalty: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {"prior": "its margins are cosines, not logits."}
    reads_head_logits: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True

    def __init__(self, *, normalize: bool = True, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.normalize = normalize

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        factor = made.times("cosine" if self.normalize else "dot", 1.0, None)
        return None if factor is None else RowLoss("rival", factor=factor)

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        return sample_margin(*inputs, normalize=self.normalize, **made, **self.how)


def sample_margin(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    normalize: bool = True,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """Negated margin per sample; :class:`SampleMargin` has equation, arguments and an example."""
    stats = class_stats(
        features,
        prototypes,
        labels,
        similarity="cosine" if normalize else "dot",
        want=("target", "rival"),
        **how,
    )
    assert stats.rival is not None
    assert stats.target is not None
    return over_targets(stats.rival - stats.target, labels)

r"""``scale="auto"``: the scale a cosine loss needs for its number of classes and its margin."""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_count, check_num_classes, check_number
from largemargin.ops.similarity import check_scale
from largemargin.tracing import values_are_checked

Scale: TypeAlias = float | Literal["auto"]
"""A number, or "auto": :func:`auto_scale`."""

PROBABILITY = 0.9


def auto_scale(
    num_classes: int, aligned: float | Tensor = 1.0, *, probability: float = PROBABILITY
) -> float | Tensor:
    r"""The scale at which the best arrangement of C classes reaches ``probability``.

    .. math:: s = \frac{\log\frac{(C-1)\,p}{1-p}}{\psi(0) + \frac1{C-1}}

    The best that C classes can do (LTLM Theorems 1, 2) is the simplex with every feature on its
    prototype: :math:`\cos\theta_y = 1`, :math:`\cos\theta_j = -1/(C-1)`. There the loss sees the
    target's penalised cosine :math:`\psi(0)` and C - 1 equal rivals, so

    .. math:: p = \frac{e^{s\psi(0)}}{e^{s\psi(0)} + (C-1)\,e^{-s/(C-1)}}
              \iff \log\frac{p}{1-p} = s\left(\psi(0) + \tfrac1{C-1}\right) - \log(C-1)

    which is linear in s. A smaller scale leaves a loss that even a perfect network cannot bring
    down: the rivals' gradient, of size (1-p) s, never fades. With a much larger one it fades before
    the classes are apart. So 64, made for 100,000 identities, is no scale for ten classes.

    ===============================  ===================================
    loss                             :math:`\psi(0)`
    ===============================  ===================================
    NormFace, LM-Softmax, A-Softmax  1
    CosFace, LDAM                    :math:`1 - m`
    ArcFace                          :math:`\cos m`
    unified margin                   :math:`\cos m_2 - m_3`
    GM-Softmax                       :math:`\alpha_2 + \beta_2`
    ===============================  ===================================

    With a margin per class the widest counts: every class reaches at least p. LM-Softmax has no
    target in its denominator; p is then what its head predicts. GM-Softmax has two lines for the
    target. The one in the denominator decides how much of the gradient is left,
    :math:`\partial\ell/\partial l_j \propto 1 - q` with :math:`q = e^{s(\alpha_2+\beta_2)} /
    (e^{s(\alpha_2+\beta_2)} + (C-1)e^{-s/(C-1)})`, so :math:`q = p` is what is solved for.

    Args:
        num_classes: C.
        aligned: :math:`\psi(0)`, a number or several, of which the smallest counts.
        probability: p, default 0.9.

    Example:
        >>> round(auto_scale(10), 2), round(auto_scale(100_000, 0.5), 2)
        (3.96, 27.42)
    """
    check_num_classes(num_classes)
    if not 0 < probability < 1:
        check_number("probability", probability, above=0, below=1)
    if isinstance(aligned, Tensor):
        aligned = aligned.min()
        if values_are_checked(aligned, None):
            aligned = float(aligned)
    wanted = math.log((num_classes - 1) * probability / (1 - probability))
    gap = aligned + 1 / (num_classes - 1)
    if wanted <= 0:
        raise LargeMarginError(
            f"probability must be above 1/C = {1 / num_classes:g}, which no scale at all gives, "
            f"but {probability} was given."
        )
    if isinstance(gap, Tensor):
        return torch.where(gap > 0, wanted / gap, torch.nan)
    if gap <= 0:
        raise LargeMarginError(
            'scale="auto" has no answer for this margin: it lowers the cosine of a feature on its '
            f"own prototype to {aligned:.4g}, and the rivals of {num_classes} classes at their "
            f"best have {-1 / (num_classes - 1):.4g}, so no scale makes the target win. Lower the "
            "margin, or give scale as a number."
        )
    return wanted / gap


def adacos_scale(num_classes: int) -> float:
    r"""The fixed scale of AdaCos (Zhang et al. 2019), :math:`\sqrt2\log(C-1)`, for C >= 3.

    For ``scale`` of a loss on cosines. It puts the steepest point of the softmax at 45 degrees,
    with rivals at 90; :func:`auto_scale` solves for classes as far apart as they can be.

    Example:
        >>> round(adacos_scale(1000), 2)
        9.77
    """
    check_count(
        "num_classes",
        num_classes,
        at_least=3,
        hint="sqrt(2) log(C - 1) is 0 for two classes; give scale as a number.",
    )
    return math.sqrt(2) * math.log(num_classes - 1)


def check_scale_setting(scale: float | Tensor | str) -> None:
    """A number > 0, or "auto"; a tensor is checked where it is used."""
    if isinstance(scale, str):
        if scale != "auto":
            raise LargeMarginError(
                f'scale must be a number > 0 or "auto", but {scale!r} was given.'
            )
    else:
        check_scale(scale)


def psi0_of_cosine_margin(margin: float | Tensor) -> float | Tensor:
    r""":math:`\psi(0) = 1 - m`."""
    return 1 - margin


def psi0_of_angular_margin(margin: float | Tensor) -> float | Tensor:
    r""":math:`\psi(0) = \cos m`."""
    return torch.cos(margin) if isinstance(margin, Tensor) else math.cos(margin)

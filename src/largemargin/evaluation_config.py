"""``EvaluationConfig``: the settings of ``evaluate``, apart from it because they need no torch.

So ``largemargin evaluate --help`` answers at once.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EvaluationConfig:
    """Which parts of an evaluation to run, and how.

    Strengths of noise and attacks are in units of [0, 1] pixels, before normalisation.

    Args:
        perturbations: occlusion, stripes, down-up sampling and their combinations: auto (sizes
            scaled to the images), small (those for 32 x 32), road (those for 400 x 500) or none.
        gaussian: standard deviations of Gaussian noise; default 2, 4, 8, 16 and 20 / 255.
        uniform: amplitudes of uniform noise.
        draws: runs of every random perturbation.
        attacks: fgsm, fgsm_l2, pgd, pgd_l2, apgd or apgd_l2; without l2 they are linf attacks.
        linf: strengths of linf attacks.
        l2: strengths of l2 attacks.
        attack_steps: steps of pgd and apgd.
        attack_samples: attack at most so many images, spread evenly over the data; none attacks
            all.
        bins: of the calibration.
        retrieval: search for images of the same class by features.
        recall_at: the k of recall at k.
        similarity: by which features are compared: cosine or euclidean.
        confidence: of the interval around accuracies.
        batch_size: images at a time.
        seed: of perturbations and attacks; with the same seed two models see the same, whatever
            the batch size.
        workers: processes that read image files.
    """

    perturbations: Literal["none", "small", "road", "auto"] = "auto"
    gaussian: tuple[float, ...] = (2 / 255, 4 / 255, 8 / 255, 16 / 255, 20 / 255)
    uniform: tuple[float, ...] = (0.06,)
    draws: int = 10
    attacks: tuple[str, ...] = ("fgsm", "pgd", "pgd_l2", "apgd")
    linf: tuple[float, ...] = (8 / 255,)
    l2: tuple[float, ...] = (0.5,)
    attack_steps: int = 20
    attack_samples: int | None = 1000
    bins: int = 15
    retrieval: bool = True
    recall_at: tuple[int, ...] = (1, 5, 10)
    similarity: Literal["cosine", "euclidean"] = "cosine"
    confidence: float = 0.95
    batch_size: int = 256
    seed: int = 0
    workers: int = 0

"""What is measured of a finished run, by name, in the units of the tables."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from largemargin.app.data.load import Data
from largemargin.app.data.samples import Batches, Samples
from largemargin.app.models.build import Classifier
from largemargin.app.training.runs import Run
from largemargin.errors import LargeMarginError
from largemargin.geometry.curvature import curvature as input_curvature
from largemargin.geometry.curvature import low_curvature_mask
from largemargin.geometry.dispersion import variance_split
from largemargin.geometry.margins import class_margin, sample_margins
from largemargin.heads import packing
from largemargin.measuring.distributions import Distribution
from largemargin.measuring.input_curvature import Curvature, CurvatureSettings, measure_curvature
from largemargin.measuring.input_margins import measure_input_margins
from largemargin.measuring.retrieval import CrossCamera, HeadInputs, cross_camera, head_inputs_of
from largemargin.measuring.robust.perturbations import Perturbation
from largemargin.measuring.robust_accuracy import perturbation_suite, perturbed_accuracy
from largemargin_papers.recipes.free_features import mean_class_margin
from largemargin_papers.recipes.stages import Stages, stages_of

ROAD = (400, 500)
"""(H, W) for which the sizes of ROB Table 4 were made."""

SAMPLES = 1000
"""Images whose features are looked at stage by stage, the same number of every class."""


class Number(NamedTuple):
    """A measured number; ``std`` is over draws of noise, where there are any."""

    value: float
    std: float | None = None


class Subject:
    """A finished run under measurement: model, images and features are read once, when needed."""

    def __init__(
        self, run: Run, load: Callable[[], Data], split: str, device: torch.device
    ) -> None:
        self.run, self.load, self.split, self.device = run, load, split, device
        self._features: dict[str, HeadInputs] = {}
        self._stages: dict[tuple[int, float], Stages] = {}
        self._margins: dict[str, Distribution] = {}

    @cached_property
    def data(self) -> Data:
        return self.load()

    @property
    def peeked(self) -> bool:
        """Whether its best epoch was chosen by the test images: then the last one counts."""
        return self.run.config.data.validation_from == "test"

    @cached_property
    def model(self) -> nn.Module:
        return self.run.model("last" if self.peeked else "best").to(self.device)

    @cached_property
    def best_on_test(self) -> nn.Module:
        """Of the epoch that was best on the test images, as the authors of ROB report it."""
        if not self.peeked:
            raise LargeMarginError(
                f"{self.run.folder} did not look at test images while it trained. Set "
                "data.validation_from to test."
            )
        return self.run.model("best").to(self.device)

    @property
    def prototypes(self) -> Tensor:
        weight: Tensor = self.model.head.weight  # type: ignore[union-attr, assignment]
        return weight.detach().cpu()

    @property
    def samples(self) -> Samples:
        return self.part(self.split)

    def part(self, name: str) -> Samples:
        samples: Samples | None = getattr(self.data, name)
        if samples is None:
            raise LargeMarginError(
                f"{self.data.name} has no {name} images, but this table is measured on them."
            )
        return samples

    def features(self, name: str) -> HeadInputs:
        if name not in self._features:
            self._features[name] = head_inputs_of(self.model, self.part(name), device=self.device)
        return self._features[name]

    @cached_property
    def search(self) -> CrossCamera:
        """Queries in the gallery; cameras are among the extra labels of these splits."""
        query, gallery = self.part("query"), self.part("gallery")
        found, among = self.features("query"), self.features("gallery")
        return cross_camera(
            found.features,
            found.labels,
            query.extra["camera"],
            among.features,
            among.labels,
            gallery.extra["camera"],
        )

    @cached_property
    def curvature(self) -> Curvature:
        """Input-loss curvature of the evaluated images, with noise of 0.06 beside it (ROB 7.3)."""
        batches = Batches(self.samples, 500, device=self.device, shuffle=False)
        return measure_curvature(self.model, batches, CurvatureSettings(precision="high"))

    @cached_property
    def normalized_curvature(self) -> Tensor:
        """The same in units of normalised images, as in the published code of ROB."""
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self.data.mean, self.data.std))
        mean, std = mean.to(self.device), std.to(self.device)
        model = _Denormalized(self.model, mean, std)
        generator = torch.Generator(self.device).manual_seed(0)
        values = [
            input_curvature(
                model, (images - mean) / std, labels, generator=generator, precision="high"
            )
            for images, labels in Batches(self.samples, 500, device=self.device, shuffle=False)
        ]
        return torch.cat(values).double().cpu()

    def stages(self, count: int, noise: float = 0.0) -> Stages:
        """Features along the network, of so many of the evaluated images."""
        key, model = (count, noise), cast("Classifier", self.model)
        if key not in self._stages:
            self._stages[key] = stages_of(
                model, self.samples, count=count, noise=noise, device=self.device
            )
        return self._stages[key]

    def input_margins(self, name: str) -> Distribution:
        """Linearised margins in input space of a split (ODN-G)."""
        if name not in self._margins:
            batches = Batches(self.part(name), 256, device=self.device, shuffle=False)
            found = measure_input_margins(self.model, batches).input
            assert found is not None
            self._margins[name] = found.overall
        return self._margins[name]


class _Denormalized(nn.Module):
    """A model of images in [0, 1] as one of normalised images."""

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, mean, std

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.model(images * self.std + self.mean)
        return outputs


def accuracy(subject: Subject, *, part: str | None = None) -> Number:
    part = part or subject.split
    scores = subject.run.result[part]
    if scores is None:
        raise LargeMarginError(f"{subject.run.folder} has no result on {part} images.")
    if subject.peeked:  # the result is that of the best epoch
        scores = subject.run.metrics("epoch")[-1]["validation"]
    return Number(100 * scores["accuracy"])


def best_on_test(subject: Subject, *, sigma: float | str = 0, clip: bool = False) -> Number:
    """Accuracy of the epoch that was best on the clean test images, under noise."""
    level = float(Fraction(str(sigma)))
    how = Perturbation(sigma=level, clip=clip) if level else Perturbation()
    return _perturbed(subject, how, 10, subject.best_on_test)


def error(subject: Subject) -> Number:
    return Number(100 - accuracy(subject).value)


def noisy_accuracy(
    subject: Subject, *, sigma: float | str, draws: int = 10, clip: bool = False
) -> Number:
    """Accuracy under Gaussian noise; ``sigma`` in units of [0, 1] pixels, as 8/255."""
    how = Perturbation(sigma=float(Fraction(str(sigma))), clip=clip)
    return _perturbed(subject, how, draws)


def perturbed(
    subject: Subject,
    *,
    kind: str,
    draws: int = 10,
    clip: bool = False,
    mask_last: bool = False,
) -> Number:
    """Accuracy under a perturbation of ROB Table 4, scaled where images are not 400 x 500."""
    suite = perturbation_suite("road" if subject.data.size == ROAD else "auto", subject.data.size)
    return _perturbed(subject, replace(suite[kind], clip=clip, mask_last=mask_last), draws)


def _perturbed(
    subject: Subject, what: Perturbation, draws: int, model: nn.Module | None = None
) -> Number:
    found = perturbed_accuracy(
        model or subject.model, subject.samples, {"it": what}, draws=draws, device=subject.device
    )["it"]
    return Number(100 * found.accuracy, 100 * found.std if len(found.runs) > 1 else None)


def class_margin_degrees(subject: Subject) -> Number:
    return Number(float(class_margin(subject.prototypes, degrees=True)))


def sample_margin(subject: Subject, *, part: str = "test") -> Number:
    """Mean cosine margin; over which images the papers take it is not always said."""
    found = subject.features(part)
    margins = sample_margins(found.features, subject.prototypes, found.labels, similarity="cosine")
    return Number(float(margins.double().mean()))


def mean_average_precision(subject: Subject) -> Number:
    return Number(100 * subject.search.mean_average_precision)


def rank1(subject: Subject) -> Number:
    return Number(100 * subject.search.rank1)


def rank5(subject: Subject) -> Number:
    return Number(100 * subject.search.rank5)


def plane_variance(subject: Subject, *, part: str, of: str) -> Number:
    """Variance within or between classes, or their ratio, of features embedded by t-SNE.

    It is read from the sketch of the same features, where t-SNE is done: see :data:`LATER`.
    """
    raise LargeMarginError(
        "plane_variance is not measured on the model: the recipe must have a sketch of the kind "
        f"planes with {part!r} among its parts."
    )


LATER = ("plane_variance",)
"""Metrics that follow from sketches, once features are embedded in the plane."""


def stage_variance(
    subject: Subject, *, stage: str, samples: int = SAMPLES, noise: float = 0.0
) -> Number:
    """Variance between classes over that within, of the features after a part of the network."""
    found = subject.stages(samples, noise)
    if stage not in found.rows:
        raise LargeMarginError(
            f"there is no stage {stage!r} in this network, but {', '.join(found.rows)}."
        )
    return Number(float(variance_split(found.rows[stage].double(), found.labels).ratio))


def input_margin_ratio(subject: Subject, *, part: str = "test") -> Number:
    """Mean over standard deviation of the linearised margins in input space (ODN-RATIO)."""
    return Number(float(subject.input_margins(part).ratio))


def input_margin_median(subject: Subject, *, part: str = "test") -> Number:
    """Median of the linearised margins in input space."""
    return Number(subject.input_margins(part).median)


def curvature(subject: Subject, *, of: str, share: float = 0.9, normalized: bool = False) -> Number:
    """Of the samples of lowest curvature: its mean, or a quantile as "0.5" (ROB Figure 10)."""
    if normalized:
        values = subject.normalized_curvature
    else:
        values = torch.tensor(subject.curvature.values, dtype=torch.float64)
    low = values[low_curvature_mask(values, share)]
    return Number(float(low.mean() if of == "mean" else low.quantile(float(of))))


def curvature_correlation(subject: Subject, *, noise: str, first: int = 0) -> Number:
    """Of the number of noisy copies that are right, from ``first`` on, with the mean curvature.

    ROB Figure 9 has 0 to 10; the authors' code begins with 1.
    """
    groups = torch.tensor(subject.curvature.robustness[noise].group_curvature[first:])
    known = groups.double().isfinite()
    pairs = torch.stack([torch.arange(len(groups)).double(), groups.double()])[:, known]
    return Number(float(torch.corrcoef(pairs)[0, 1]) if int(known.sum()) > 1 else math.nan)


def low_curvature_accuracy(subject: Subject, *, noise: str, share: float) -> Number:
    """Accuracy under noise on the samples of lowest curvature (ROB Figure 8)."""
    found = subject.curvature.robustness[noise]
    return Number(100 * found.weak[found.shares.index(share)])


def best_packing(subject: None, *, classes: int, dim: int) -> Number:
    """Largest smallest angle between so many directions; nothing is trained."""
    return Number(math.degrees(packing.best_packing(classes, dim).angle))


def free_class_margin(
    subject: None, *, objective: str, settings: dict[str, Any], classes: int, dim: int, steps: int
) -> Number:
    """Class margin of free features, mean of three starts; no images, no network."""
    return Number(
        *mean_class_margin(objective, settings, classes=classes, dim=dim, steps=steps, starts=3)
    )


METRICS: Mapping[str, Callable[..., Number]] = MappingProxyType(
    {
        "accuracy": accuracy,
        "best_on_test": best_on_test,
        "error": error,
        "noisy_accuracy": noisy_accuracy,
        "perturbed_accuracy": perturbed,
        "class_margin_degrees": class_margin_degrees,
        "sample_margin": sample_margin,
        "mean_average_precision": mean_average_precision,
        "rank1": rank1,
        "rank5": rank5,
        "plane_variance": plane_variance,
        "stage_variance": stage_variance,
        "input_margin_ratio": input_margin_ratio,
        "input_margin_median": input_margin_median,
        "curvature": curvature,
        "curvature_correlation": curvature_correlation,
        "low_curvature_accuracy": low_curvature_accuracy,
        "best_packing": best_packing,
        "free_class_margin": free_class_margin,
    }
)


def label(metric: str, options: Mapping[str, Any]) -> str:
    """``noisy_accuracy sigma=8/255``."""
    return " ".join([metric, *(f"{name}={value}" for name, value in sorted(options.items()))])


def measured(subject: Subject | None, metric: str, options: Mapping[str, Any]) -> Number:
    """A metric by name."""
    if metric not in METRICS:
        raise LargeMarginError(f"there is no metric {metric!r}. There are {', '.join(METRICS)}.")
    return METRICS[metric](subject, **options)

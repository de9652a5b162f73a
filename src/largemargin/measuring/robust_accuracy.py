"""Accuracy on changed images: under noise, occlusion, stripes and down-up sampling (ROB Table 4),
and under attacks of one strength or along a curve of strengths.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_count, check_number
from largemargin.measuring.accuracy import is_right, wilson
from largemargin.measuring.batches import (
    IGNORED,
    Advance,
    DataBatch,
    Source,
    check_range,
    count_samples,
    known_rows,
    need_images,
    need_labels,
)
from largemargin.measuring.input_space import Normalization, PixelUnits
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, count_over
from largemargin.measuring.records import Record
from largemargin.measuring.robust.attacks import KINDS, LEVELS, NORMS, Attack
from largemargin.measuring.robust.perturbations import (
    ROAD_400X500,
    SCALED_32,
    Patches,
    Perturbation,
    PerturbationDraws,
    Stripes,
)
from largemargin.measuring.sample_draws import seed_for

SUITES = ("none", "small", "road", "auto")

BLOCK = 64
"""Samples whose random draws come from one seed."""

ATTACK_NAMES = tuple(
    kind if norm == "linf" else f"{kind}_{norm}" for kind in KINDS for norm in NORMS
)


@dataclass(frozen=True)
class PerturbedAccuracy(Record):
    """Accuracy under one perturbation."""

    accuracy: float
    """Mean over the runs."""
    std: float
    """Sample standard deviation over the runs (divided by runs - 1); NaN for one run."""
    runs: tuple[float, ...]
    """Accuracy of each run: independent draws, or the only run of a deterministic perturbation.
    Run k of two models has the same draws where seed and kind of device are the same."""


@dataclass(frozen=True)
class AttackedAccuracy(Record):
    """Accuracy under one attack."""

    attack: str
    """Its name, as "pgd-20 linf 8/255"."""
    norm: str
    epsilon: float
    """Largest change, in units of [0, 1] pixels."""
    accuracy: float
    low: float
    high: float
    """Wilson's interval of the accuracy."""
    samples: int


def perturbed_accuracy(
    model: nn.Module,
    data: Source,
    perturbations: Mapping[str, Perturbation],
    *,
    draws: int = 10,
    seed: int = 0,
    normalization: Normalization | None = None,
    num_classes: int | None = None,
    **options: Unpack[ReadingOptions],
) -> dict[str, PerturbedAccuracy]:
    """Accuracy under each perturbation: mean and deviation over independent draws.

    Perturbations act on images in [0, 1]; a model of this library normalises them itself, and for
    others ``normalization`` says what the loader does. What has no random part runs once.

    Args:
        model, data, num_classes, options: as in :func:`accuracy_of`.
        perturbations: by name, for instance of :func:`perturbation_suite`.
        draws: runs of a random perturbation. Default 10 (ROB).
        seed: of the draws. The same seed gives every model the same draws: differences between
            models are paired, run by run.
        normalization: (mean, std) that the loader normalises by, one number or one per channel:
            images are perturbed as they were before.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
        >>> data = [(torch.rand(4, 1, 3, 3), torch.tensor([0, 1, 0, 1]))]
        >>> found = perturbed_accuracy(model, data, {"noise": Perturbation(sigma=0.1)}, draws=3)
        >>> len(found["noise"].runs)
        3
    """

    def make_counter(reader: LogitModel, where: torch.device) -> PerturbedCounts:
        reader.pixels = PixelUnits(normalization)
        return PerturbedCounts(reader, perturbations, draws=draws, seed=seed, device=where)

    return count_over(
        model, data, make_counter, "perturbations", num_classes=num_classes, **options
    )


def attacked_accuracy(
    model: nn.Module,
    data: Source,
    attacks: Sequence[Attack],
    *,
    max_samples: int | None = None,
    seed: int = 0,
    normalization: Normalization | None = None,
    num_classes: int | None = None,
    **options: Unpack[ReadingOptions],
) -> tuple[AttackedAccuracy, ...]:
    """Accuracy on attacked images: what the attack leaves right.

    Args:
        model: takes images in [0, 1] and normalises them itself, unless ``normalization`` says
            otherwise; gradients go through it, not to its parameters.
        data, num_classes, options: as in :func:`accuracy_of`.
        attacks: of :mod:`largemargin.measuring.robust`.
        max_samples: attack at most so many, spread evenly over the data; default all.
        seed: of random starts.
        normalization: (mean, std) that the loader normalises by: attacks are on the images before.
    """

    def make_counter(reader: LogitModel, where: torch.device) -> AttackedCounts:
        stride = stride_for(data, max_samples, name="max_samples", every="max_samples=None")
        reader.pixels = PixelUnits(normalization)
        return AttackedCounts(reader, attacks, seed=seed, device=where, stride=stride)

    return count_over(model, data, make_counter, "attacks", num_classes=num_classes, **options)


def attack_curve(
    model: nn.Module,
    data: Source,
    attack: Attack,
    epsilons: Sequence[float],
    *,
    max_samples: int | None = None,
    seed: int = 0,
    normalization: Normalization | None = None,
    num_classes: int | None = None,
    **options: Unpack[ReadingOptions],
) -> tuple[AttackedAccuracy, ...]:
    """Accuracy under one attack at several strengths: see :func:`attacked_accuracy`."""
    attacks = [replace(attack, epsilon=epsilon) for epsilon in epsilons]
    return attacked_accuracy(
        model, data, attacks, max_samples=max_samples, seed=seed, normalization=normalization,
        num_classes=num_classes, **options,
    )  # fmt: skip


def perturbation_suite(
    kind: str,
    size: tuple[int, int],
    *,
    gaussian: Sequence[float] = (),
    uniform: Sequence[float] = (),
) -> dict[str, Perturbation]:
    """The perturbations to evaluate, by name.

    Args:
        kind: "road" has the sizes of ROB Table 4, made for 400 x 500 images; "small" those for
            32 x 32; "auto" scales them to ``size``, by the rule that gives both of these: patches
            of 70/400 of the height and 70/500 of the width, stripes of 6/500 of the width, all at
            least a pixel, and as many stripes as mask 12 % of the width; "none" leaves all out.
        size: (H, W) of the images.
        gaussian: standard deviations of Gaussian noise, in units of [0, 1] pixels.
        uniform: amplitudes of uniform noise.

    Example:
        >>> sorted(perturbation_suite("auto", (32, 32), gaussian=[8 / 255]))[:3]
        ['down_up', 'down_up_occlusion', 'down_up_stripes']
        >>> perturbation_suite("auto", (32, 32)) == dict(SCALED_32)
        True
    """
    check_choice("perturbations", kind, SUITES)
    for name, values in (("gaussian", gaussian), ("uniform", uniform)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise LargeMarginError(f"{name} must be a list of levels, but {values!r} was given.")
        for each in values:
            check_number(f"every level of {name} noise", each, at_least=0, at_most=1, hint=LEVELS)
    suite = {f"gaussian {level(each)}": Perturbation(sigma=each) for each in gaussian}
    suite |= {f"uniform {level(each)}": Perturbation(amplitude=each) for each in uniform}
    if kind == "none":
        return suite
    if kind == "auto":
        return suite | scaled_suite(*size)
    return suite | dict(ROAD_400X500 if kind == "road" else SCALED_32)


def scaled_suite(height: int, width: int) -> dict[str, Perturbation]:
    """The six columns of ROB Table 4 for images of any size: see :func:`perturbation_suite`."""
    if min(height, width) < 3:
        raise LargeMarginError(
            f"down-up sampling by 3 needs images of at least 3 x 3 pixels, but they are {height} x "
            f'{width}. Pass perturbations="none".'
        )
    patches = Patches(20, max(1, round(height * 70 / 400)), max(1, round(width * 70 / 500)))
    thickness = max(1, round(width * 6 / 500))
    stripes = Stripes(max(1, round(0.12 * width / thickness)), thickness)
    return {
        name: replace(each, occlusion=each.occlusion and patches, stripes=each.stripes and stripes)
        for name, each in ROAD_400X500.items()
    }


def level(value: float) -> str:
    """A strength in the units the papers use: 255ths of the range where it is a multiple."""
    bytes_ = value * 255
    short = f"{value:g}"
    if abs(bytes_ - round(bytes_)) < 1e-6 and len(short) > 5:
        return f"{round(bytes_)}/255"
    return short


class PerturbedCounts:
    """Counts right predictions under perturbations, batch by batch."""

    def __init__(
        self,
        reader: LogitModel,
        perturbations: Mapping[str, Perturbation],
        *,
        draws: int,
        seed: int,
        device: torch.device,
    ) -> None:
        check_count("draws", draws, at_least=1)
        if not isinstance(perturbations, Mapping) or not all(
            isinstance(each, Perturbation) for each in perturbations.values()
        ):
            raise LargeMarginError(
                "perturbations must be a dict of perturbations by name, as {'noise': "
                f"Perturbation(sigma=0.1)}}, but {perturbations!r} was given. "
                "perturbation_suite makes the usual ones."
            )
        self.reader, self.perturbations = reader, dict(perturbations)
        self.draws = PairedDraws(seed, device)
        self.runs = {name: draws if each.random else 1 for name, each in self.perturbations.items()}
        self.right = {
            name: torch.zeros(runs, dtype=torch.long, device=device)
            for name, runs in self.runs.items()
        }
        self.samples = torch.zeros((), dtype=torch.long, device=device)

    @property
    def passes(self) -> int:
        """Passes of the model over a batch."""
        return sum(self.runs.values())

    def add(self, batch: DataBatch, advance: Advance) -> None:
        """Every perturbation in every run, so that images are read once."""
        images, labels = need_images(batch.inputs, "a perturbation"), need_labels(batch.labels)
        images = self.reader.pixels.raw(images, checked=False)
        check_range(images)
        self.samples += known_rows(labels, self.reader.num_classes).sum()
        for name, what in self.perturbations.items():
            for run in range(self.runs[name]):
                drawn = self.draws(what, run, images, batch.indices)
                logits = self.reader.on_pixels(what.apply(images, drawn))
                self.right[name][run] += is_right(logits, labels).sum()
                advance()

    def sums(self) -> dict[str, Tensor]:
        return {"samples": self.samples.cpu()} | {
            f"right {name}": each.cpu() for name, each in self.right.items()
        }

    def result(self, parts: list[dict[str, Tensor]]) -> dict[str, PerturbedAccuracy]:
        total = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        samples = int(total["samples"])
        if samples == 0:
            raise LargeMarginError(
                f"nothing was evaluated: the data is empty, or all of it is labelled {IGNORED}."
            )
        return {
            name: summary([each / samples for each in total[f"right {name}"].tolist()])
            for name in self.perturbations
        }


def summary(runs: Sequence[float]) -> PerturbedAccuracy:
    """Mean and sample standard deviation of the accuracies of some runs."""
    std = statistics.stdev(runs) if len(runs) > 1 else math.nan
    return PerturbedAccuracy(statistics.fmean(runs), std, tuple(runs))


class PairedDraws:
    """Random draws that belong to a sample and a run, whatever batch or process it comes in.

    They depend on the seed, on which random parts the perturbation has, on the run and on the
    sample's position; so every model, every strength of noise and every batch size sees the same.
    They are made where the images are: another kind of device draws others.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.generator = torch.Generator(device)

    def __call__(
        self, what: Perturbation, run: int, images: Tensor, positions: Tensor
    ) -> PerturbationDraws:
        """The draws of run ``run`` for images (B, ...) at these positions."""
        block = positions // BLOCK
        numbers = torch.unique(block)
        rows = [(block == number).nonzero()[:, 0] for number in numbers]
        parts = [
            self._of_block(what, run, images, int(number), positions[each] % BLOCK)
            for number, each in zip(numbers, rows, strict=True)
        ]
        back = torch.cat(rows).argsort().to(images.device)
        kinds = ([x for x in each if x is not None] for each in zip(*parts, strict=True))
        return PerturbationDraws(*(torch.cat(each)[back] if each else None for each in kinds))

    def _of_block(
        self, what: Perturbation, run: int, images: Tensor, number: int, rows: Tensor
    ) -> PerturbationDraws:
        parts = (what.occlusion, what.stripes, what.sigma, what.amplitude)
        kinds = "".join(str(int(part is not None)) for part in parts)
        self.generator.manual_seed(seed_for(self.seed, "perturbation", kinds, run, number))
        whole = images.new_empty((BLOCK, *images.shape[1:]))
        drawn = what.draw(whole, generator=self.generator)
        here = rows.to(images.device)
        return PerturbationDraws(
            *(None if each is None else each.to(here.device)[here] for each in drawn)
        )


def attacks_of(
    names: Sequence[str], *, linf: Sequence[float], l2: Sequence[float], steps: int
) -> list[Attack]:
    """The attacks that settings describe, every one at every strength of its norm.

    Example:
        >>> [each.epsilon for each in attacks_of(["pgd"], linf=[0.01, 0.02], l2=[], steps=3)]
        [0.01, 0.02]
    """
    check_count("attack_steps", steps, at_least=1)
    made = []
    for name in [names] if isinstance(names, str) else names:
        check_choice("every attack", name, ATTACK_NAMES)
        kind, _, norm = name.partition("_")
        for epsilon in l2 if norm else linf:
            made.append(Attack(kind=kind, norm=norm or "linf", epsilon=epsilon, steps=steps))
    return made


class AttackedCounts:
    """Counts right predictions under attacks, batch by batch.

    Args:
        reader: the model.
        attacks: what to try.
        seed: of random starts. They depend on it, on the kind of attack and on the position of
            the sample, not on its batch: every model is attacked from the same points.
        device: of the images.
        stride: attack every so many-th sample.
    """

    def __init__(
        self,
        reader: LogitModel,
        attacks: Sequence[Attack],
        *,
        seed: int,
        device: torch.device,
        stride: int = 1,
    ) -> None:
        if isinstance(attacks, str | Attack) or not all(isinstance(a, Attack) for a in attacks):
            raise LargeMarginError(
                'attacks must be a list of attacks, as [Attack("pgd", epsilon=8 / 255)], but '
                f"{attacks!r} was given."
            )
        self.reader, self.attacks, self.seed, self.stride = reader, list(attacks), seed, stride
        self.device = device
        self.generators: list[torch.Generator] = []
        self.right = torch.zeros(len(self.attacks), dtype=torch.long, device=device)
        self.samples = 0

    @property
    def passes(self) -> int:
        """Attacks on a batch, which take as many passes of the model as they have steps."""
        return len(self.attacks)

    def add(self, batch: DataBatch, advance: Advance) -> None:
        images, labels = need_images(batch.inputs, "an attack"), need_labels(batch.labels)
        known = known_rows(labels, self.reader.num_classes)
        chosen = (batch.indices % self.stride == 0).to(labels.device) & known
        positions = batch.indices[chosen.to(batch.indices.device)].tolist()
        images, labels = images[chosen], labels[chosen]
        images = self.reader.pixels.raw(images, checked=False)
        check_range(images)
        images = images.clamp(0, 1)  # resizing and rounding leave some a little outside
        self.samples += len(labels)
        for number, attack in enumerate(self.attacks):
            if len(labels):
                changed = self._attacked(attack, images, labels, positions)
                with torch.no_grad():
                    self.right[number] += is_right(self.reader.on_pixels(changed), labels).sum()
            advance()

    def _attacked(
        self, attack: Attack, images: Tensor, labels: Tensor, positions: list[int]
    ) -> Tensor:
        while len(self.generators) < len(positions):
            self.generators.append(torch.Generator(self.device))
        own = self.generators[: len(positions)]
        for generator, position in zip(own, positions, strict=True):
            key = (self.seed, "attack", attack.kind, attack.norm, position)
            generator.manual_seed(seed_for(*key))
        with self.reader.evaluating(gradients=True):
            return attack(self.reader.on_pixels, images, labels, generator=own).detach()

    def sums(self) -> dict[str, Tensor]:
        return {"right": self.right.cpu(), "samples": torch.tensor(self.samples)}

    def result(
        self, parts: list[dict[str, Tensor]], *, confidence: float = 0.95
    ) -> tuple[AttackedAccuracy, ...]:
        samples = sum(int(part["samples"]) for part in parts)
        if samples == 0:
            raise LargeMarginError(
                f"nothing was attacked: the data is empty, or all of it is labelled {IGNORED}, or "
                "all that was chosen of it is."
            )
        totals = torch.stack([part["right"] for part in parts]).sum(0).tolist()
        return tuple(
            AttackedAccuracy(
                attack.name,
                attack.norm,
                float(attack.epsilon),
                right / samples,
                *wilson(right, samples, confidence=confidence),
                samples,
            )
            for attack, right in zip(self.attacks, totals, strict=True)
        )


def stride_for(source: Source, at_most: int | None, *, name: str, every: str) -> int:
    """Every how many-th sample to take, to have at most so many spread over the data.

    ``name`` is what the caller's user knows ``at_most`` as, ``every`` how to ask for all samples.
    """
    if at_most is None:
        return 1
    check_count(name, at_most, at_least=1)
    count = count_samples(source)
    if count == float("inf"):
        raise LargeMarginError(
            f"{name} needs data of known size, but the loader does not say how many samples "
            f"there are. Pass {every}, which attacks all, or a DataLoader or a split."
        )
    return max(1, -(-int(count) // at_most))

"""Accuracy under attacks, of one strength or along a curve of strengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_count
from largemargin.measuring.accuracy import is_right
from largemargin.measuring.accuracy_interval import wilson
from largemargin.measuring.batches import (
    IGNORED,
    Bar,
    Batch,
    Source,
    count_samples,
    known_rows,
    need_images,
    need_labels,
)
from largemargin.measuring.logit_model import LogitModel, count_over
from largemargin.measuring.records import Record
from largemargin.measuring.robust.attacks import KINDS, Attack
from largemargin.measuring.robust.epsilon_ball import NORMS
from largemargin.measuring.sample_draws import seed_for

NAMES = tuple(kind if norm == "linf" else f"{kind}_{norm}" for kind in KINDS for norm in NORMS)


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
        check_choice("every attack", name, NAMES)
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

    def add(self, batch: Batch, shown: Bar) -> None:
        images, labels = need_images(batch.inputs, "an attack"), need_labels(batch.labels)
        known = known_rows(labels, self.reader.num_classes)
        chosen = (batch.indices % self.stride == 0).to(labels.device) & known
        positions = batch.indices[chosen.to(batch.indices.device)].tolist()
        images, labels = images[chosen], labels[chosen]
        self.samples += len(labels)
        for number, attack in enumerate(self.attacks):
            if len(labels):
                changed = self._attacked(attack, images, labels, positions)
                with torch.no_grad():
                    self.right[number] += is_right(self.reader(changed), labels).sum()
            shown.update()

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
            return attack(self.reader, images, labels, generator=own).detach()

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


def attacked_accuracy(
    model: nn.Module,
    data: Source,
    attacks: Sequence[Attack],
    *,
    max_samples: int | None = None,
    seed: int = 0,
    num_classes: int | None = None,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
) -> tuple[AttackedAccuracy, ...]:
    """Accuracy on attacked images: what the attack leaves right.

    Args:
        model: takes images in [0, 1] and normalises them itself; gradients go through it, not to
            its parameters.
        data, num_classes, batch_size, device, workers, sync, progress: as in
            :func:`accuracy_of`.
        attacks: of :mod:`largemargin.measuring.robust`.
        max_samples: attack at most so many, spread evenly over the data; default all.
        seed: of random starts.
    """

    def make_counter(reader: LogitModel, where: torch.device) -> AttackedCounts:
        stride = stride_for(data, max_samples, name="max_samples", every="max_samples=None")
        return AttackedCounts(reader, attacks, seed=seed, device=where, stride=stride)

    counter, parts = count_over(
        model,
        data,
        make_counter,
        "attacks",
        num_classes=num_classes,
        batch_size=batch_size,
        device=device,
        workers=workers,
        sync=sync,
        progress=progress,
    )
    return counter.result(parts)


def attack_curve(
    model: nn.Module,
    data: Source,
    attack: Attack,
    epsilons: Sequence[float],
    *,
    max_samples: int | None = None,
    seed: int = 0,
    num_classes: int | None = None,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
) -> tuple[AttackedAccuracy, ...]:
    """Accuracy under one attack at several strengths: see :func:`attacked_accuracy`."""
    return attacked_accuracy(
        model,
        data,
        [replace(attack, epsilon=epsilon) for epsilon in epsilons],
        max_samples=max_samples,
        seed=seed,
        num_classes=num_classes,
        batch_size=batch_size,
        device=device,
        workers=workers,
        sync=sync,
        progress=progress,
    )

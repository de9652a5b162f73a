"""``lm.preset``: what to train with in a situation, and the measurement that says so."""

import reprlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from largemargin.app.config import NoiseConfig, ObjectiveConfig, RunConfig
from largemargin.app.training.config_file import flat, settings_from
from largemargin.app.training.files import read_json
from largemargin.app.training.objective import needs_of, objective_of, parse_objective
from largemargin.errors import LargeMarginError, warn_user
from largemargin.integrations.objective_text import needs_counts
from largemargin.losses import LOSSES
from largemargin.losses.base.class_counts import refuse_mapping
from largemargin.losses.base.objective import Objective

FILE = Path(__file__).with_name("presets.json")
"""Written by papers/benchmark/analyse.py from the measured files, never by hand."""


@dataclass(frozen=True)
class Shown:
    """The training data behind a preset; networks were trained from scratch."""

    classes: int
    fewest: int
    """Training images of the smallest class in any task where a margin method won."""
    most: int
    """Likewise of the largest."""
    imbalance: int = 1
    """The largest class over the smallest."""

    def __str__(self) -> str:
        images = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        sizes = "equal" if self.imbalance == 1 else f"ratio {self.imbalance}"
        return f"{self.classes} classes ({sizes}), {images} images a class, from scratch"


SHOWN = {
    "few_labels": Shown(10, 7, 250),
    "long_tail": Shown(10, 45, 4500, imbalance=100),
    "label_noise": Shown(10, 1000, 1000),
    "corruption": Shown(10, 1000, 1000),
    "embedding": Shown(770, 20, 20),
}
"""From papers/benchmark/protocol.yaml, with four fifths of Omniglot's background classes."""

UNMEASURED = {
    "fine_tuning": "no preset was measured on a pretrained network. Start with the linear probe, "
    "then train the backbone at a far lower rate: docs/how-to/fine_tuning.md.",
    "frozen_features": "no preset was measured on frozen embeddings, where margins change little. "
    "Use LargeMarginClassifier(hidden_sizes=()): docs/how-to/embeddings.md has measured rows.",
}
"""Situations that the benchmark does not have, and what to do there."""

UNEVEN = 5
"""Largest class over smallest from which labels are imbalanced: equal classes that are drawn with
few samples differ by less."""

TOO_MANY = 1000
"""Images a class with which no margin method won: papers/benchmark/measured/cifar10_20.json."""

FAR = 5
"""So many times more or fewer classes than a preset was measured on are too far for its scale."""

BEHIND = 16
"""Points of balanced accuracy that few_labels' settings were behind softmax with the same optimizer
on a long tail: trial 7 of both in rung 1 of papers/benchmark/measured/cifar10_long_tail.jsonl."""


@dataclass(frozen=True, repr=False)
class Preset:
    """An objective for a situation; made by :func:`preset`.

    It can be given to :func:`largemargin.attach` as it is. ``print`` shows what it stands on.
    """

    name: str
    situation: str
    """The task on which it was measured."""
    status: str
    """winner (a margin method beat the tuned baseline), no winner, worse, or not measured."""
    method: str
    """How the benchmark calls the recommended method."""
    objective: ObjectiveConfig
    noise: NoiseConfig
    optimizer: dict[str, Any]
    """Learning rate, weight decay and clipping that it was tuned to; empty where nothing was."""
    compared: dict[str, Any] | None
    """The registered test: difference, interval, corrected p, what could have been detected."""
    others: dict[str, Any]
    """Tests in situations of the same kind, None where they were not measured."""
    source: str
    """The measured file; the protocol where there is none yet."""
    class_counts: tuple[int, ...] | None = None
    doubts: tuple[str, ...] = ()
    """What to know before taking the difference for the margin's."""
    shown: Shown | None = None
    """The data it was measured on; None where it was on none."""

    @property
    def scheduled(self) -> bool:
        """Whether it was measured with the usual schedule of its loss, which ``attach`` asks."""
        return self.objective.schedule == "preset"

    def __call__(self, num_classes: int, dim: int) -> Objective:
        """The objective for so many classes and features: what ``attach`` calls."""
        if "noisy" in needs_of(self.objective) or self.noise.use != "none":
            raise LargeMarginError(
                f"the preset {self.name!r} trains on noisy images too (noise.use "
                f"{self.noise.use}, level {self.noise.level:g}), which attach alone cannot do. "
                f"Train with largemargin train --preset {self.name}, or use preset.config(...) "
                "with lm.train. In a loop of your own, attach the loss and make the noisy images "
                "there: docs/how-to/robust.md shows how."
            )
        losses = (LOSSES[term.name] for term in parse_objective(self.objective))
        if self.class_counts is None and any(map(needs_counts, losses)):
            raise LargeMarginError(
                f"the preset {self.name!r} has margins by class frequency: pass how many training "
                f"images every class has, lm.preset({self.name!r}, class_counts=torch.bincount("
                "labels)). LargeMarginClassifier, LargeMarginNet and largemargin train count them."
            )
        if self.class_counts is not None and len(self.class_counts) != num_classes:
            raise LargeMarginError(
                f"the preset {self.name!r} was made with {len(self.class_counts)} class_counts, "
                f"but the head has {num_classes} classes. Give one number per class, in the order "
                "of the labels."
            )
        self.warn(num_classes, dim, self.class_counts)
        counts = self.class_counts or (1,) * num_classes
        return objective_of(self.objective, counts)(num_classes, dim)

    def warn(
        self,
        num_classes: int,
        dim: int,
        class_counts: Sequence[int] | None = None,
        *,
        pretrained: bool = False,
    ) -> None:
        """Warn of :meth:`contradictions`."""
        for each in self.contradictions(num_classes, dim, class_counts, pretrained=pretrained):
            warn_user(f"the preset {self.name!r} was measured on {self.shown}. {each}")

    def warn_frozen(self) -> None:
        """Warn that the features are not trained: what a linear head on embeddings calls."""
        if self.shown is not None:
            told = f"the preset {self.name!r} was measured on {self.shown}. Here"
            warn_user(f"{told} features are frozen: {UNMEASURED['frozen_features']}")

    def contradictions(
        self,
        num_classes: int,
        dim: int,
        class_counts: Sequence[int] | None = None,
        *,
        pretrained: bool = False,
    ) -> list[str]:
        """What speaks against it on such data, each with what to use instead.

        Args:
            num_classes: C.
            dim: of the features.
            class_counts: training images of every class, where they are known.
            pretrained: whether the backbone is.
        """
        if self.shown is None:
            return []
        found = []
        if pretrained:
            found.append(f"Your backbone is pretrained: {UNMEASURED['fine_tuning']}")
        if not self.shown.classes / FAR <= num_classes <= self.shown.classes * FAR:
            found.append(
                f"Your {num_classes} classes are far from that, and its settings do not follow "
                "their number. Use lm.CosFace(), whose scale does, or search with largemargin tune."
            )
        if dim < num_classes - 1:
            found.append(
                f"Your {dim} features leave {num_classes} classes no room for equal angles, which "
                f"takes {num_classes - 1}. Use more features, or cross entropy."
            )
        counts = [each for each in class_counts or () if each]
        return found + (
            self._against(min(counts), max(counts), sum(counts) / len(counts)) if counts else []
        )

    def _against(self, smallest: int, largest: int, usual: float) -> list[str]:
        """What the sizes of the classes say."""
        assert self.shown is not None
        sizes = f"the smallest class has {smallest} images, the largest {largest}"
        found = []
        if self.shown.imbalance > 1 and largest < 2 * smallest:
            found.append(f"Yours has no tail: {sizes}. Use lm.preset('few_labels') or softmax.")
        if self.shown.imbalance == 1 and largest >= UNEVEN * smallest:
            worse = (
                f"On a long tail its settings were {BEHIND} points behind softmax with the same "
                "optimizer (papers/benchmark/measured/cifar10_long_tail.jsonl, rung 1). "
            )
            found.append(
                f"Yours is imbalanced: {sizes}. {worse * (self.name == 'few_labels')}Use "
                "lm.preset('long_tail', class_counts=...), or cross entropy with prior=counts."
            )
        if self.name == "few_labels" and usual >= TOO_MANY:
            found.append(
                f"Yours has {usual:,.0f} images a class. With {TOO_MANY} no margin method was "
                "better than softmax: use that, or try both with largemargin compare."
            )
        return found

    def with_counts(self, class_counts: Sequence[int]) -> "Preset":
        """This preset for such classes; one that has counts of its own keeps them."""
        return self if self.class_counts else replace(self, class_counts=tuple(class_counts))

    def config(self, base: RunConfig | None = None, *, optimizer: bool = False) -> RunConfig:
        """A run with this objective.

        Args:
            base: everything else; default ``RunConfig()``.
            optimizer: take the tuned learning rate, weight decay and clipping too. They were tuned
                for one network and batch size and may not suit yours.
        """
        base = base or RunConfig()
        changed = replace(base, objective=self.objective, noise=self.noise)
        if optimizer and self.optimizer:
            changed = replace(changed, optimizer=replace(base.optimizer, **self.optimizer))
        return changed

    def __repr__(self) -> str:
        """As it is made: an estimator that has it as a parameter prints this, not a page."""
        counts = self.class_counts
        shown = "" if counts is None else f", class_counts={reprlib.repr(counts)}"
        return f"preset({self.name!r}{shown})"

    def __str__(self) -> str:
        noise = f"{self.noise.use}, {self.noise.kind} {self.noise.level:g}"
        schedule = "attach(..., total_steps=epochs * steps_per_epoch)"
        rows: list[tuple[str, object]] = [
            ("situation", self.situation),
            ("objective", f"{self.method}: {self.objective.name}"),
            ("parameters", _listed(self.objective.settings)),
            ("schedule", schedule if self.scheduled else None),
            ("noise", None if self.noise.use == "none" else noise),
            ("tuned with", _listed(self.optimizer)),
            ("measured", self.evidence()),
            ("shown on", self.shown),
            *(("but", each) for each in self.doubts),
        ]
        for title, test in self.others.items():
            rows.append(("also", f"{title}: {_said(test)}"))
            rows += [("but", each) for each in (test or {}).get("doubts", ())]
        rows.append(("source", self.source))
        lines = [f"{name:<12}{text}" for name, text in rows if text]
        lines.insert(0, f"preset {self.name}: {self.objective.name}")
        return "\n".join(textwrap.fill(line, 100, subsequent_indent=" " * 12) for line in lines)

    def evidence(self) -> str:
        """One sentence about what stands behind the recommendation."""
        if self.compared is None:
            return "not measured yet: softmax, until something is known to be better"
        return _said(self.compared)


def preset(name: str, *, class_counts: Sequence[int] | None = None) -> Preset:
    """What the benchmark recommends for a situation.

    It follows from the measured files of ``papers/benchmark``. Where no margin method beat the
    tuned baseline, or nothing was measured, it is that baseline, and says so.

    Args:
        name: few_labels, long_tail, label_noise, corruption or embedding; fine_tuning (of a
            pretrained network) and frozen_features were not measured, and say so.
        class_counts: training images of every class, for objectives that need them (long_tail).
            ``LargeMarginClassifier`` and ``LargeMarginNet`` take them from ``y`` otherwise.

    Example:
        >>> chosen = preset("few_labels")
        >>> criterion = lm.attach(torch.nn.Sequential(torch.nn.Linear(8, 3)), chosen)
        >>> chosen.situation
        'CIFAR-10, 1 % of the training images (500)'
    """
    refuse_mapping(class_counts)
    entries = read_json(FILE)
    if name in UNMEASURED:
        return _unmeasured(name, class_counts)
    if name not in entries:
        known = [*entries, *UNMEASURED]
        close = get_close_matches(str(name), known, n=1, cutoff=0.4)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise LargeMarginError(f"there is no preset {name!r}, but {', '.join(known)}.{hint}")
    entry = entries[name]
    chosen = entry["recommended"]
    # The deferred weights of LDAM are what its preset schedule does.
    schedule: Literal["preset", "none"] = "preset" if chosen.get("reweight_at") else "none"
    return Preset(
        name=name,
        situation=entry["situation"],
        status=entry["status"],
        method=chosen["method"],
        objective=ObjectiveConfig(chosen["objective"], chosen["settings"], schedule),
        noise=settings_from(chosen.get("noise") or {}, NoiseConfig, "noise"),
        optimizer=dict(chosen.get("optimizer") or {}),
        compared=entry["compared"],
        others=entry["others"],
        source=entry["source"],
        doubts=tuple(entry["doubts"]),
        shown=SHOWN.get(name),
        class_counts=_counts(class_counts),
    )


def preset_of(objective: ObjectiveConfig, noise: NoiseConfig) -> Preset | None:
    """The preset that has these settings."""
    found = (preset(name) for name in read_json(FILE))
    return next(
        (each for each in found if (each.objective, each.noise) == (objective, noise)), None
    )


def _counts(given: Sequence[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        counts = tuple(map(float, given))
    except (TypeError, ValueError):
        counts = ()
    if len(counts) < 2 or not all(each >= 0 and each.is_integer() for each in counts):
        raise LargeMarginError(
            "class_counts must be how many training images every class has, in the order of the "
            f"labels, but {reprlib.repr(given)} was given. Count them: torch.bincount(labels)."
        )
    return tuple(map(int, counts))


def _unmeasured(name: str, class_counts: Sequence[int] | None) -> Preset:
    """Cross entropy, and where to read on."""
    return Preset(
        name=name,
        situation=name.replace("_", " "),
        status="not measured",
        method="softmax",
        objective=ObjectiveConfig("cross_entropy"),
        noise=NoiseConfig(),
        optimizer={},
        compared=None,
        others={},
        source="none: papers/benchmark has no such situation",
        doubts=(UNMEASURED[name],),
        class_counts=_counts(class_counts),
    )


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in flat(values).items())


def _said(test: dict[str, Any] | None) -> str:
    if test is None:
        return "not measured yet"
    gain = (
        f"{100 * test['difference']:+.2f} points {test['score'].replace('_', ' ')} over tuned "
        f"{test['baseline']}, 95 % interval [{100 * test['low']:+.2f}, {100 * test['high']:+.2f}], "
        f"corrected p {test['corrected']:.3g}, {test['pairs']} seeds"
    )
    if test["difference"] != test["registered"]:
        gain += (
            f" (with the optimizer settings of {test['optimizer']} for both; the test was of "
            f"{100 * test['registered']:+.2f})"
        )
    if test["verdict"] == "winner":
        return f"{test['chosen']} {gain}"
    return (
        f"no margin method was better; the best on validation images, {test['chosen']}: {gain}; a "
        f"true difference of {100 * test['detectable_strictest']:.2f} would have been found with "
        "probability 0.8"
    )

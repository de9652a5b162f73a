"""Changes of a data set that compose: classes, held-out part, fraction, imbalance, label noise.

They are made in this order, whatever the order in which they are asked for, and each draws its own
random numbers from the seed, so that adding one leaves the draws of the others as they are.
Validation and test images lose classes like the training images, and are otherwise never touched.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, listed
from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_length,
    check_num_classes,
    check_number,
)
from largemargin.measuring.sample_draws import generator_for
from largemargin.shapes import Labels

ROUNDING = 1e-9
"""Relative allowance before rounding down, so that 50 computed as 49.999999999999993 stays 50."""

Record = list[dict[str, Any]]
"""What every modifier did."""


def modified(source: Source, config: DataConfig) -> tuple[Source, Record]:
    """The source after all modifiers, and what each of them did."""
    check_number("validation", config.validation, at_least=0, below=1)
    check_number("test", config.test, at_least=0, below=1)
    check_number("fraction", config.fraction, above=0, at_most=1)
    check_number("label_noise", config.label_noise, at_least=0, at_most=1)
    record: Record = []
    if config.classes is not None:
        source = keep_classes(source, config.classes)
        record.append({"name": "classes", "kept": list(source.classes)})
    if len(source.classes) < 2:
        raise LargeMarginError(
            f"at least 2 classes are needed, but there is only {listed(source.classes) or 'none'}: "
            "a classifier tells classes apart."
        )
    check_present(source)
    source = with_parts(source, config, record)
    return source.with_splits({"train": changed_training(source, config, record)}), record


def with_parts(source: Source, config: DataConfig, record: Record) -> Source:
    """The source with parts of its training images held out, where it has none and they are asked
    for.
    """
    if "test" not in source.splits and config.test > 0:
        source = hold_out(source, "test", config.test, config.seed)
        record.append(_entry("test", source.splits["test"], config, share=config.test))
    if config.validation_from == "test":
        if "test" not in source.splits:
            raise LargeMarginError(
                "validation_from is test, but there are no test images. Take validation_from train."
            )
        source = source.with_splits({"validation": source.splits["test"]})
        record.append(_entry("validation", source.splits["test"], config, part="test"))
    elif "validation" not in source.splits and config.validation > 0:
        source = hold_out(source, "validation", config.validation, config.seed)
        validation = source.splits["validation"]
        record.append(_entry("validation", validation, config, share=config.validation))
    return source


def changed_training(source: Source, config: DataConfig, record: Record) -> Samples:
    """The training images after fraction, imbalance and label noise."""
    train = source.train
    if config.fraction < 1:
        train = take_fraction(train, len(source.classes), config)
        record.append(_entry("fraction", train, config, share=config.fraction))
    if config.imbalance != "none":
        train = thin_out(train, len(source.classes), config)
        how = {"kind": config.imbalance, "ratio": config.imbalance_ratio}
        record.append(_entry("imbalance", train, config, **how))
    if config.label_noise > 0:
        train = replace_labels(train, len(source.classes), config)
        changed = int((train.labels != train.extra["clean_label"]).sum())
        noise = {"share": config.label_noise, "changed": changed}
        record.append(_entry("label_noise", train, config, **noise))
    return train


def check_present(source: Source) -> None:
    """Every class must have training images."""
    sizes = torch.bincount(source.train.labels, minlength=len(source.classes)).tolist()
    empty = [name for name, size in zip(source.classes, sizes, strict=True) if size == 0]
    if empty:
        raise LargeMarginError(
            f"there are no training images of {listed(empty)}. Name the other classes in classes, "
            "or add images."
        )


def _entry(name: str, samples: Samples, config: DataConfig, **settings: Any) -> dict[str, Any]:
    return {"name": name, **settings, "seed": config.seed, "images": len(samples)}


def keep_classes(source: Source, names: Sequence[str]) -> Source:
    """The images of these classes only; labels are numbered anew, in the order of the data set."""
    for name in names:
        if name not in source.classes:
            close = difflib.get_close_matches(name, source.classes, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else ""
            raise LargeMarginError(
                f"classes holds {name!r}, but the data has {listed(source.classes)}. {hint}".strip()
            )
    kept = [label for label, name in enumerate(source.classes) if name in names]
    numbers = torch.full((len(source.classes),), -1)
    numbers[kept] = torch.arange(len(kept))
    splits = {}
    for name in ("train", "validation", "test"):
        samples = source.splits.get(name)
        if samples is not None:
            chosen = samples.subset((numbers[samples.labels] >= 0).nonzero().flatten())
            splits[name] = replace(chosen, labels=numbers[chosen.labels])
    return replace(source.with_splits(splits), classes=tuple(source.classes[i] for i in kept))


def hold_out(source: Source, name: str, share: float, seed: int) -> Source:
    """A part of the training images for validation or test, of every class alike; one stays."""
    labels = source.train.labels
    sizes = torch.bincount(labels, minlength=len(source.classes))
    ties = generator_for(seed, name, "ties")
    counts = torch.minimum(shares(sizes, share, ties), sizes - 1)
    chosen = imbalanced_subset(labels, counts, generator=generator_for(seed, name))
    if len(chosen) == 0 and int(sizes.max()) == 1:
        raise LargeMarginError(
            f"no class has an image to spare for {name}: each has one, which training needs. "
            f"Add images, or set {name} to 0."
        )
    if len(chosen) == 0:
        raise LargeMarginError(
            f"{share:g} of {len(labels)} training images is less than one image for {name}. "
            f"Raise {name}, or set it to 0."
        )
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[chosen] = False
    train = source.train.subset(rest.nonzero().flatten())
    return source.with_splits({"train": train, name: source.train.subset(chosen)})


def take_fraction(train: Samples, num_classes: int, config: DataConfig) -> Samples:
    """The same share of every class, at least one image.

    Smaller shares are parts of larger ones where classes are of one size, and where every class
    gets an image more at least. Between shares closer than that a class may give one back: they are
    rounded so that the total is right, and of which class an image is left over changes.
    """
    sizes = torch.bincount(train.labels, minlength=num_classes)
    counts = torch.maximum(shares(sizes, config.fraction), sizes.clamp(max=1))
    generator = generator_for(config.seed, "fraction")
    return train.subset(imbalanced_subset(train.labels, counts, generator=generator))


def thin_out(train: Samples, num_classes: int, config: DataConfig) -> Samples:
    """Long-tailed or step imbalance; the largest class is as large as the images allow."""
    sizes = torch.bincount(train.labels, minlength=num_classes)
    kind, ratio = config.imbalance, config.imbalance_ratio
    check_number("imbalance_ratio", ratio, at_least=1)
    # Counts are rounded down, so there is no closed form: by bisection.
    low, high = math.ceil(ratio) - 1, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        profile = class_counts_profile(num_classes, largest=middle, ratio=ratio, kind=kind)
        if (profile <= sizes).all():
            low = middle
        else:
            high = middle - 1
    if low < ratio:
        raise LargeMarginError(
            f"imbalance_ratio {ratio:g} needs a largest class of at least that many images, which "
            f"the classes do not allow: they have {listed([str(n) for n in sizes.tolist()])}. "
            "Lower the ratio."
        )
    counts = class_counts_profile(num_classes, largest=low, ratio=ratio, kind=kind)
    generator = generator_for(config.seed, "imbalance")
    return train.subset(imbalanced_subset(train.labels, counts, generator=generator))


def replace_labels(train: Samples, num_classes: int, config: DataConfig) -> Samples:
    """A share of the labels replaced by another class, every other class alike (LMS section 4).

    The labels before are kept as ``extra["clean_label"]``.
    """
    generator = generator_for(config.seed, "label_noise")
    count = round_half_up(config.label_noise * len(train))
    chosen = torch.randperm(len(train), generator=generator)[:count]
    steps = torch.randint(1, num_classes, (count,), generator=generator)
    labels = train.labels.clone()
    labels[chosen] = (labels[chosen] + steps) % num_classes
    return replace(train, labels=labels, extra={**train.extra, "clean_label": train.labels})


def shares(sizes: Tensor, share: float, ties: torch.Generator | None = None) -> Tensor:
    """``share`` of every class, rounded so that the total is ``share`` of all, rounded.

    Classes with the largest remainders are rounded up, of equal ones the first.

    Args:
        sizes: (C,) images of every class.
        share: in [0, 1].
        ties: random numbers; with them, which of equally small classes get their only image is
            drawn. By order, all that is held out of many small classes would begin with an A.

    Example:
        >>> shares(torch.tensor([5, 5, 6]), 0.25)
        tensor([1, 1, 2])
    """
    exact = sizes.double() * share
    # 0.7 * 10 computed as 6.999999999999999 is 7.
    counts = (exact + 1e-9).floor().long()
    missing = round_half_up(share * int(sizes.sum())) - int(counts.sum())
    turns = torch.arange(len(sizes))
    if ties is not None:
        small = (counts == 0).nonzero().flatten()
        turns[small] = small[torch.randperm(len(small), generator=ties)]
    remainders = exact - counts
    by_remainder = turns[torch.argsort(remainders[turns], descending=True, stable=True)]
    counts[by_remainder[: max(missing, 0)]] += 1
    return torch.minimum(counts, sizes)


def round_half_up(value: float) -> int:
    return int(value + 0.5 + 1e-9)


def class_counts_profile(
    num_classes: int, *, largest: int, ratio: float, kind: str = "exp"
) -> Tensor:
    r"""Class sizes of the usual imbalanced data sets (Cao et al. 2019, LTLM Table 2, BAS-IMB).

    .. math::
        \text{exp (long-tailed)}:\ n_j = \lfloor n_{\max}\,\rho^{-j/(C-1)} \rfloor, \qquad
        \text{step}:\ n_j = n_{\max} \text{ for } j < \lfloor C/2 \rfloor,\
            \text{else } \lfloor n_{\max}/\rho \rfloor

    Only training sets are thinned out; test sets stay balanced.

    Args:
        num_classes: C >= 2.
        largest: :math:`n_{\max}`, samples of the largest class: 5000 for CIFAR-10, 500 for
            CIFAR-100.
        ratio: :math:`\rho \ge 1`, largest over smallest class; LTLM uses 10 and 100.
        kind: "exp" (default: long-tailed) or "step".

    Returns:
        (C,) int64, largest class first.

    Example:
        >>> class_counts_profile(3, largest=100, ratio=100)
        tensor([100,  10,   1])
    """
    check_num_classes(num_classes)
    check_choice("kind", kind, ("exp", "step"))
    check_number("ratio", ratio, at_least=1)
    check_number(
        "largest", largest, at_least=ratio, hint="The smallest class needs at least one sample."
    )
    if kind == "exp":
        sizes = [largest * ratio ** (-j / (num_classes - 1)) for j in range(num_classes)]
    else:
        sizes = [largest / (1 if j < num_classes // 2 else ratio) for j in range(num_classes)]
    return torch.tensor([math.floor(size * (1 + ROUNDING)) for size in sizes])


def imbalanced_subset(
    labels: Labels, counts: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Indices of a random subset in which class c has ``counts[c]`` samples.

    Args:
        labels: (N,) class indices of the balanced set.
        counts: (C,) integers, from :func:`class_counts_profile`.
        generator: random numbers for the choice; default torch's global ones.

    Returns:
        (sum of counts,) int64 indices into ``labels``, ascending.

    Example:
        >>> imbalanced_subset(torch.tensor([0, 1, 1]), torch.tensor([1, 2]))
        tensor([0, 1, 2])
    """
    num_classes = counts.numel()
    check_length("counts", counts, num_classes, "one entry per class")
    check_labels(labels, labels.shape[0], num_classes, soft=False)
    device = labels.device if generator is None else generator.device
    shuffled = torch.randperm(len(labels), generator=generator, device=device).to(labels.device)
    chosen = []
    for label, wanted in enumerate(counts.tolist()):
        members = shuffled[labels[shuffled] == label]
        if not 0 <= wanted <= len(members):
            raise LargeMarginError(
                f"counts[{label}] must lie in [0, {len(members)}], the samples of class {label}, "
                f"but {wanted} was given. Lower the largest count."
            )
        chosen.append(members[:wanted])
    return torch.cat(chosen).sort().values

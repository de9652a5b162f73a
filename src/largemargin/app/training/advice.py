"""``lm.advise``: what to train with on given labels, by rules that name their evidence."""

import json
import re
import shlex
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from largemargin.app.training.presets import SHOWN, TOO_MANY, UNEVEN, Preset, preset
from largemargin.errors import LargeMarginError

MOST = 5000
"""Samples that label noise is estimated on; of more, as many are drawn."""

NOISY = 0.2
"""Estimated label noise from which the preset for it is proposed; it was measured at 0.4."""

CONTRADICTED = 0.5
"""Share of labels in the surest half that a linear head may contradict, and"""

FALLING = 0.08
"""how much smaller it may be in the surest quarter: noise does not fall with confidence, a head's
own mistakes do."""

TOLD = 100
"""Samples of the surest half from which a share is estimated: its standard error is up to 5 %."""


SENTENCE = re.compile(r"(?<=\S)\. (?=[A-Z])")
"""Where one ends."""


@dataclass(frozen=True)
class DataFacts:
    """What the rules look at."""

    samples: int
    classes: int
    smallest: int
    """Samples of the smallest class."""
    median: int
    largest: int
    imbalance: float
    """The largest class over the smallest."""
    label_noise: float | None
    """The estimated share of wrong labels; None where it is not known."""
    noise_from: str
    """How it was estimated, or why it was not."""
    pretrained: bool
    frozen: bool
    """Whether the features are embeddings that are not trained further."""


class NoiseEstimate(NamedTuple):
    """What :func:`estimate_label_noise` found."""

    share: float | None
    """Of wrong labels; None where nothing can be said."""
    told: str
    """How it was found, or why it was not."""
    frozen: bool = False
    """Whether the features are embeddings."""


class Rule(NamedTuple):
    """A proposal for data of one kind."""

    preset: str | None
    """The preset proposed; None is cross entropy."""
    applies: Callable[[DataFacts], bool]
    reason: str
    """With names of facts in braces."""


RULES = (
    Rule(
        "frozen_features",
        lambda data: data.frozen,
        "on frozen features a linear head solved to convergence is the strongest start",
    ),
    Rule(
        "fine_tuning",
        lambda data: data.pretrained,
        "no margin loss was measured on a pretrained network",
    ),
    Rule(
        "label_noise",
        lambda data: data.label_noise is not None and data.label_noise >= NOISY,
        "about {label_noise:.0%} of the labels are wrong; it was measured with 40%",
    ),
    Rule(
        "long_tail",
        lambda data: data.imbalance >= UNEVEN,
        "the largest class has {imbalance:.0f} times the samples of the smallest; it was measured "
        "with 100 times",
    ),
    Rule(
        "few_labels",
        lambda data: data.median <= SHOWN["few_labels"].most,
        "{median} a class; margin methods won with 7 to 250 samples a class",
    ),
    Rule(
        None,
        lambda data: data.median < TOO_MANY,
        "{median} a class; margin methods won with up to 250 samples a class, none with 1,000, and "
        "nothing in between was measured",
    ),
    Rule(
        None,
        lambda data: True,
        "{median} a class; with 1,000 samples a class no margin method was better than softmax "
        "(papers/benchmark/measured/cifar10_20.json)",
    ),
)
"""The first that applies is taken."""


@dataclass(frozen=True)
class Advice:
    """What :func:`advise` proposes; ``print`` shows it as a table, ``as_dict`` goes into JSON."""

    data: DataFacts
    preset: str | None
    """For ``lm.preset``; None where cross entropy is proposed."""
    objective: str
    reason: str
    evidence: str
    """The measured gain."""
    caveats: tuple[str, ...]
    """What contradicts it here, then what is known against the measurement; ``print`` shows the
    first sentence of each."""
    source: str
    command: str
    """That checks it on the data."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def __str__(self) -> str:
        data = self.data
        noise = "unknown" if data.label_noise is None else f"about {data.label_noise:.0%}"
        proposed = self.objective if self.preset is None else f"preset {self.preset}: "
        proposed += "" if self.preset is None else self.objective
        lines = [
            f"data        {data.samples:,} samples, {data.classes} classes of {data.smallest:,} to "
            f"{data.largest:,} (ratio {data.imbalance:.1f})",
            f"label noise {noise}: {data.noise_from}",
            f"network     {'pretrained' if data.pretrained or data.frozen else 'from scratch'}",
            f"advice      {proposed}",
            f"because     {self.reason}",
            f"evidence    {self.evidence}",
            *(f"but         {SENTENCE.split(each)[0].rstrip('.')}." for each in self.caveats),
            f"source      {self.source}",
        ]
        filled = (textwrap.fill(each, 100, subsequent_indent=" " * 12) for each in lines)
        return "\n".join([*filled, f"check       {self.command}"])  # one line, to be copied


def advise(
    labels: Any,
    features: Any = None,
    *,
    pretrained: bool = False,
    data_name: str = "DATA",
    seed: int = 0,
) -> Advice:
    """What to train with, from the labels and, if there are any, features or small images.

    Rules look at the number of classes, the samples a class, the imbalance, the estimated label
    noise and whether the network is pretrained. What they rest on comes with the answer.

    Args:
        labels: (N,) of the training samples, of any type.
        features: (N, D) features or small images (N, ...), from which label noise is estimated: a
            linear head is cross-validated, and noise is how often its surest half contradicts the
            labels. Embeddings (as ``LargeMarginClassifier`` recognises them) are taken as frozen.
        pretrained: whether the network to be trained is.
        data_name: what stands after ``--data`` in the command that checks the advice.
        seed: of the folds, and of the samples drawn from more than 5,000.

    Example:
        >>> print(advise([0] * 90 + [1] * 9).preset)
        long_tail
    """
    noise = NoiseEstimate(None, "no features were given")
    labels = _listed(labels)
    _counts(labels)  # says what is wrong with them
    if features is not None:
        noise = estimate_label_noise(features, labels, seed=seed)
    return proposal(labels, noise, pretrained=pretrained, data_name=data_name)


def proposal(labels: Any, noise: NoiseEstimate, *, pretrained: bool, data_name: str) -> Advice:
    """:func:`advise` where label noise was estimated already."""
    counts = _counts(labels)
    facts = DataFacts(
        samples=sum(counts),
        classes=len(counts),
        smallest=min(counts),
        median=int(statistics.median(counts)),
        largest=max(counts),
        imbalance=max(counts) / min(counts),
        label_noise=noise.share,
        noise_from=noise.told,
        pretrained=pretrained,
        frozen=noise.frozen,
    )
    rule = next(each for each in RULES if each.applies(facts))
    reason = rule.reason.format(**asdict(facts))
    if rule.preset is None:
        softmax = ("no measured gain", (), "papers/benchmark/README.md", _compare(data_name, None))
        return Advice(facts, None, "cross_entropy", reason, *softmax)
    chosen = preset(rule.preset, class_counts=counts)
    against = chosen.contradictions(len(counts), _WIDE, counts)
    return Advice(
        data=facts,
        preset=rule.preset,
        objective=chosen.objective.name,
        reason=reason,
        evidence=chosen.evidence(),
        caveats=(*against, *chosen.doubts),
        source=chosen.source,
        command=CHECKS.get(rule.preset) or _compare(data_name, chosen),
    )


_WIDE = 1 << 30
"""Features enough for any number of classes: their number is not known yet."""

CHECKS = {
    "frozen_features": "cross_val_score(LargeMarginClassifier(hidden_sizes=()), X, y) in "
    "scikit-learn, beside LogisticRegressionCV()",
}
"""Of proposals that largemargin compare does not train."""


def _compare(data_name: str, chosen: Preset | None) -> str:
    """The command that trains the proposal, or the usual candidates, beside softmax."""
    methods: list[Any] = ["label_smoothing", "cosface"]
    if chosen is not None and chosen.shown is not None:
        of_preset: dict[str, Any] = {"name": chosen.objective.name, "label": chosen.name}
        of_preset["settings"] = chosen.objective.settings
        if chosen.scheduled:
            of_preset["schedule"] = "preset"
        methods = [of_preset, "label_smoothing"]
    words = ["--seeds", "5", "--methods", json.dumps(methods)]
    if chosen is not None and chosen.name == "fine_tuning":
        words += ["--model", "torchvision/resnet18", "--weights", "default"]
        words += ["--freeze_batch_norm", "true", "--lr", "0.001", "--head_lr", "0.1"]
    return f"largemargin compare --data {data_name} {shlex.join(words)}"


def _counts(labels: Any) -> list[int]:
    """Samples of every class, in the order of the sorted labels."""
    given = _listed(labels)
    counts = Counter(given)
    if len(counts) < 2:
        raise LargeMarginError(
            f"labels must hold at least 2 classes, but all {len(given)} are {given[0]!r}."
        )
    return [counts[each] for each in sorted(counts)]


def _listed(labels: Any) -> list[Any]:
    """The labels as plain values; tensors and arrays of one number are that number."""
    whole = not isinstance(labels, str | bytes | Mapping) and hasattr(labels, "__iter__")
    given = (labels.tolist() if hasattr(labels, "tolist") else [*labels]) if whole else None
    if isinstance(given, list) and given:
        several = (list, tuple, set, Mapping)
        single = [each for each in given if getattr(each, "ndim", 0) == 0]
        if len(single) == len(given) and not any(isinstance(each, several) for each in given):
            return _classes([each.item() if hasattr(each, "item") else each for each in given])
    if not isinstance(given, list):
        shown = f"{type(labels).__name__} was given"
    else:
        shown = "rows of several were given" if given else "there are none"
    raise LargeMarginError(
        f"labels must hold one class for each training sample, (N,), but {shown}. The order is "
        "advise(labels, features)."
    )


def _classes(given: list[Any]) -> list[Any]:
    """The labels, where all of them are classes."""
    if missing := sum(each is None or each != each for each in given):
        raise LargeMarginError(
            f"labels must hold a class for each training sample, but {missing} of {len(given)} "
            "are missing (None or NaN). Leave these samples out."
        )
    broken = [each for each in given if isinstance(each, float) and not each.is_integer()]
    if broken:
        raise LargeMarginError(
            f"labels must hold classes, but they hold numbers such as {broken[0]!r}. A margin is a "
            "distance to another class; put numbers into classes, or use a regression."
        )
    kinds = sorted({type(each).__name__ for each in given})
    if "str" in kinds and len(kinds) > 1:
        raise LargeMarginError(f"labels must be of one type, but {' and '.join(kinds)} were given.")
    return given


def estimate_label_noise(features: Any, labels: Any, *, seed: int = 0) -> NoiseEstimate:
    """The share of wrong labels.

    A linear head is cross-validated. On the half of the samples whose held-out logits it is surest
    of, labels that contradict it are taken for wrong: where a linear head can tell the classes
    apart, its own mistakes are in the other half. Where it cannot, no number is given.
    """
    try:
        import numpy as np
        import torch

        from largemargin.integrations.scikit_learn import (
            LargeMarginClassifier,
            as_rows,
            as_tensor,
            embedding_like,
        )
    except ImportError:
        return NoiseEstimate(None, "the estimate needs pip install 'largemargin[sklearn]'")
    given = _listed(labels)
    number = {each: index for index, each in enumerate(sorted({*given}))}
    if isinstance(features, torch.Tensor):  # NumPy has no bfloat16
        features = features.detach().cpu().to(torch.promote_types(features.dtype, torch.float32))
    rows, shape = as_rows(features)
    rows = rows if hasattr(rows, "tocsr") else np.asarray(rows)
    if len(rows.shape) != 2 or rows.shape[0] != len(given):
        raise LargeMarginError(
            f"features must have a row for each of the {len(given)} labels, but their shape is "
            f"{tuple(rows.shape)}."
        )
    order = np.random.default_rng(seed).permutation(rows.shape[0])[:MOST]
    drawn = np.array([number[each] for each in given])[order]
    model = LargeMarginClassifier(hidden_sizes=(), random_state=seed)
    try:
        frozen = shape is None and embedding_like(as_tensor(rows, rows.shape[1:], "auto"))
        model.fit(rows[order], drawn)
    except (TypeError, ValueError) as error:  # as scikit-learn wants them: NaN, objects
        said = str(error).splitlines()[0]
        raise LargeMarginError(f"features must be finite numbers (N, ...): {said}") from error
    known = ~np.isnan(model.held_out_margins_)
    if not known.any():
        return NoiseEstimate(None, "no two samples of a class differ in their features", frozen)
    margins, gaps = model.held_out_margins_[known], model.held_out_gaps_[known]
    wrong = (margins < 0)[np.argsort(-gaps)]
    if len(wrong) < 2 * TOLD:
        said = f"{len(wrong)} samples that can be held out are too few, {2 * TOLD} would do"
        return NoiseEstimate(None, said, frozen)
    half, quarter = (float(wrong[: max(len(wrong) // part, 1)].mean()) for part in (2, 4))
    chance = float(np.max(np.bincount(drawn))) / len(drawn)
    learned = 1 - wrong.mean() > chance + 2 * (chance * (1 - chance) / len(wrong)) ** 0.5
    if not learned or half > CONTRADICTED or half > quarter + FALLING:
        said = f"a linear head meets {1 - wrong.mean():.0%} of the labels held out and cannot tell"
        said = f"at most {quarter:.0%}, as {said} hard samples from wrong labels"
        if not learned:
            said = "a linear head meets no more of the labels held out than chance, and cannot tell"
        return NoiseEstimate(None, said, frozen)
    said = f"a linear head, cross-validated on {len(order):,} samples"
    return NoiseEstimate(half, said, frozen)

"""``rehearsal``: a protocol whose runs take a moment, to see that all of them can be made."""

from dataclasses import replace
from typing import Any

from largemargin_papers.benchmark.plan import EFFICIENTNET
from largemargin_papers.benchmark.protocol import Protocol, Rung, Situation

MOST_TRAINED, MOST_JUDGED = 300, 200
"""Images of a rehearsal; two of every class of CLINC150."""


def rehearsal(protocol: Protocol) -> Protocol:
    """The same situations and methods with few trials and images, one epoch.

    Its records are for nobody: they belong in a folder of their own.
    """
    own = min(protocol.own_trials, 1)
    trials = 2 + own
    seeds = [each.seeds[0] for each in protocol.rungs]
    return replace(
        protocol,
        trials=trials,
        own_trials=own,
        rungs=(Rung(trials, 1.0, (seeds[0],)), Rung(1, 1.0, (seeds[-1],))),
        seeds=protocol.seeds[:2],
        situations={name: _short(each) for name, each in protocol.situations.items()},
    )


def _short(situation: Situation) -> Situation:
    model: dict[str, Any] = dict(situation.model)
    if model["name"] == "resnet18":
        model["name"] = "small_cnn"
    elif model["name"] == EFFICIENTNET:
        model["options"] = {"size": 64}
    data = dict(situation.data)
    if "imbalance_ratio" in data:
        data |= {"imbalance_ratio": 3, "fraction": 0.02}
    return replace(
        situation,
        data=data,
        images=None if situation.images is None else min(situation.images, MOST_TRAINED),
        model=model,
        epochs=1,
        batch_size=min(situation.batch_size, MOST_TRAINED // 2),
        precision="fp32",
        choice_seeds=1,
    )

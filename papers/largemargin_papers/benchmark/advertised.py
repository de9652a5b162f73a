"""The gain that is advertised: the smallest of the registered one and those at equal optimizers.

A method may have been tuned to other optimizer settings than its baseline, and part of its gain may
be theirs. So the baseline is trained with the settings of the chosen method too, and the chosen
method with those of the baseline.
"""

from collections.abc import Mapping
from typing import Any

WINNER, NONE, WORSE = "winner", "no winner", "worse"

TUNED = "each its own"
"""Optimizer settings of the registered test."""


def equal_gains(
    found: Mapping[str, Any], baseline: str | None = None
) -> dict[str, Mapping[str, float] | None]:
    """Gains of the chosen method with the same optimizer settings for both, by whose they are.

    None where the runs are missing; empty where both were tuned to the same settings, where the
    baseline knows no optimizer, and where settings of another situation are tried.

    Args:
        found: of ``conclude``, one situation with its test and the answers of its questions.
        baseline: the other method; default the one of the test.
    """
    chosen, baseline = found["chosen"], baseline or found["baseline"]
    theirs = found["tuned"][baseline]["optimizer"]
    if found.get("like") or theirs is None or theirs == found["tuned"][chosen]["optimizer"]:
        return {}
    return {
        chosen: _answer(found, baseline, chosen).get("chosen_beyond"),
        baseline: _answer(found, chosen, baseline).get("over_baseline"),
    }


def advertised_gain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Difference, interval and p of the smallest gain; ``optimizer`` says whose settings."""
    gains: dict[str, Mapping[str, float] | None] = {TUNED: found["test"]}
    for baseline in found.get("against", (found["baseline"],)):
        for whose, gain in equal_gains(found, baseline).items():
            # Of several baselines with the settings of the chosen method the least gain counts.
            before = gains.get(whose)
            if before is None or (gain and gain["difference"] < before["difference"]):
                gains[whose] = gain
    known = {name: each for name, each in gains.items() if each is not None}
    least = min(known, key=lambda name: known[name]["difference"])
    numbers = {name: known[least][name] for name in ("difference", "low", "high", "p")}
    return {**numbers, "optimizer": least}


def advice(found: Mapping[str, Any]) -> str:
    """The verdict, and no winner where a winner's advertised gain may be nothing.

    Where runs with equal optimizer settings are registered, they have to be there.
    """
    verdict = str(found["verdict"])
    gains = [equal_gains(found, each).values() for each in found.get("against", ())]
    if verdict == WINNER and any(None in each for each in gains):
        return NONE
    return NONE if verdict == WINNER and not found["advertised"]["low"] > 0 else verdict


def recommended(found: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a preset takes from a concluded situation: a method, its settings."""
    chosen, baseline = found["chosen"], found["baseline"]
    if found["advice"] == WINNER:
        return chosen, found["tuned"][chosen]
    settings = dict(found["tuned"][baseline])
    over = _answer(found, baseline, chosen).get("over_baseline")
    if found["verdict"] == WINNER and over is not None and over["difference"] > 0:
        # What the method gained was its optimizer's: that is kept.
        settings["optimizer"] = found["tuned"][chosen]["optimizer"]
    return baseline, settings


def _answer(found: Mapping[str, Any], method: str, optimizer_of: str) -> Mapping[str, Any]:
    """Of the question that changed nothing but the optimizer."""
    same = {"method": method, "optimizer_of": optimizer_of}
    usual = {"epochs": 1.0, "reweight_at": None, "trial": None}
    for each in found["asked"].values():
        if all(each[name] == value for name, value in {**same, **usual}.items()):
            return each  # type: ignore[no-any-return]
    return {}

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


def equal_gains(found: Mapping[str, Any]) -> dict[str, Mapping[str, float] | None]:
    """Gains of the chosen method with the same optimizer settings for both, by whose they are.

    None where the runs are missing; empty where both were tuned to the same settings.

    Args:
        found: of ``conclude``, one situation with its test and the answers of its questions.
    """
    chosen, baseline = found["chosen"], found["baseline"]
    if found["tuned"][chosen]["optimizer"] == found["tuned"][baseline]["optimizer"]:
        return {}
    return {
        chosen: _answer(found, baseline, chosen).get("chosen_beyond"),
        baseline: _answer(found, chosen, baseline).get("over_baseline"),
    }


def advertised_gain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Difference, interval and p of the smallest gain; ``optimizer`` says whose settings."""
    gains = {TUNED: found["test"], **equal_gains(found)}
    known = {name: each for name, each in gains.items() if each is not None}
    least = min(known, key=lambda name: known[name]["difference"])
    numbers = {name: known[least][name] for name in ("difference", "low", "high", "p")}
    return {**numbers, "optimizer": least}


def advice(found: Mapping[str, Any]) -> str:
    """The verdict, and no winner where a winner's advertised gain may be nothing."""
    verdict = str(found["verdict"])
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

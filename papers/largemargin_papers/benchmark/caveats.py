"""What a reader of a difference should know before believing that the margin made it."""

from collections.abc import Mapping
from typing import Any

from largemargin_papers.benchmark.advertised import TUNED, equal_gains
from largemargin_papers.benchmark.followups import changes_text
from largemargin_papers.benchmark.tables import points

EARLIER = 0.02
"""A baseline that is so much better with fewer epochs is said to be."""

SHARE = 1 / 3
"""Of the gain: from here on it is said what the method beside gets."""

CALIBRATION = 0.05
"""Expected calibration error above that of the baseline which is worth a sentence."""


def caveats(found: Mapping[str, Any]) -> list[str]:
    """Sentences about a concluded situation, made from its numbers by fixed rules.

    Args:
        found: of ``conclude``, one situation with its test.
    """
    if not found["test"]:
        return []
    told = [
        _optimizer(found),
        _stopped_earlier(found),
        _beside(found),
        _untested(found),
        _weights(found),
        _calibration(found),
    ]
    return [each for each in told if each]


def _optimizer(found: Mapping[str, Any]) -> str | None:
    """Settings of the optimizer that may have made part of the difference."""
    gains = equal_gains(found)
    if not gains:
        return None
    chosen, baseline = found["chosen"], found["baseline"]
    rate, decay = (
        " and ".join(f"{found['tuned'][each]['optimizer'][name]:g}" for each in (baseline, chosen))
        for name in ("lr", "weight_decay")
    )
    said = (
        f"{baseline} and {chosen} were tuned to different optimizer settings: learning rates "
        f"{rate}, weight decay {decay}."
    )
    known = {name: gain for name, gain in gains.items() if gain is not None}
    for name, gain in known.items():
        said += f" With the settings of {name} for both the difference is {points(gain)} points."
    if len(known) < len(gains):
        return f"{said} What is left with equal settings was not measured."
    least = found["advertised"]["optimizer"]
    what = "the registered one" if least == TUNED else f"that with the settings of {least}"
    return (
        f"{said} The smallest, {what}, is the one shown; the registered is {points(found['test'])}."
    )


def _stopped_earlier(found: Mapping[str, Any]) -> str | None:
    """Epochs were the same for all; this is where the baseline would rather have had fewer."""
    name = found["baseline"]
    *earlier, last = found["tuned"][name]["rungs"]
    best = max(earlier, key=lambda rung: _number(rung["best"]), default=None)
    if best is None or not _number(best["best"]) - _number(last["best"]) > EARLIER:
        return None
    chosen = found["chosen"]
    same = next(
        rung for rung in found["tuned"][chosen]["rungs"] if rung["epochs"] == best["epochs"]
    )
    return (
        f"{name} was better with fewer epochs: with {100 * best['epochs']:g} % of them "
        f"{_percent(best['best'])} of other validation images, with all {_percent(last['best'])}; "
        f"{chosen} had {_percent(same['best'])} and "
        f"{_percent(found['tuned'][chosen]['rungs'][-1]['best'])}. "
        + _answered(found, "epochs", f"Against a {name} that stops early the gain is not known.")
    )


def _beside(found: Mapping[str, Any]) -> str | None:
    chosen, baseline, beside = found["chosen"], found["baseline"], found["beside"]
    gain = found["test"]["difference"]
    alone = found["reported_beside"][f"{beside} - {baseline}"]["difference"]
    rest = found["reported_beside"][f"{chosen} - {beside}"]
    if not (gain > 0 and alone > SHARE * gain):
        return None
    return (
        f"{beside} alone gains {100 * alone:+.2f} of the {100 * gain:+.2f} points; {chosen} is "
        f"{points(rest)} beyond it."
    )


def _untested(found: Mapping[str, Any]) -> str | None:
    """A method that could not be chosen, and was better where the choice was made."""
    scores = {name: _number(each["validation"]) for name, each in found["tuned"].items()}
    pair = found["chosen"], found["baseline"]
    others = [
        name
        for name, each in found["tuned"].items()
        if not each["margin"] and name not in found["methods"]
    ]
    best = max(others, key=scores.__getitem__, default=None)
    if best is None or not scores[best] > max(scores[name] for name in pair):
        return None
    chosen, baseline = pair
    return (
        f"{best}, which is no margin method and in no test, had the best validation score: "
        f"{_percent(found['tuned'][best]['validation'])}, {chosen} "
        f"{_percent(found['tuned'][chosen]['validation'])}, {baseline} "
        f"{_percent(found['tuned'][baseline]['validation'])}." + _tested(found, best)
    )


def _tested(found: Mapping[str, Any], method: str) -> str:
    """What its follow-up runs reached on the test images."""
    for answer in found.get("asked", {}).values():
        if answer["method"] == method and answer["scores"] is not None:
            return (
                f" Follow-up: {changes_text(answer)} reaches {_percent(answer['mean'])} on the "
                f"test images, {points(answer['over_baseline'])} points over {found['baseline']}."
            )
    return ""


def _weights(found: Mapping[str, Any]) -> str | None:
    chosen, baseline = found["chosen"], found["baseline"]
    share = found["tuned"][chosen]["reweight_at"]
    if share is None or found["tuned"][baseline]["reweight_at"] is not None:
        return None
    return (
        f"{chosen} has balanced class weights in the last {100 * (1 - share):.0f} % of the steps "
        f"and {baseline} has none. "
        + _answered(found, "reweight_at", "How much of the gain is the margin's is not known.")
    )


def _calibration(found: Mapping[str, Any]) -> str | None:
    chosen, baseline = found["chosen"], found["baseline"]
    ours, theirs = (found["methods"][name].get("ece") for name in (chosen, baseline))
    if ours is None or theirs is None or not ours - theirs > CALIBRATION:
        return None
    return (
        f"the probabilities of {chosen} are less to be trusted: expected calibration error "
        f"{_percent(ours)}, {baseline} {_percent(theirs)}. Fit a temperature (lm.measuring."
        "calibrate_temperature) before using them."
    )


def _answered(found: Mapping[str, Any], changed: str, unknown: str) -> str:
    """What follow-up runs say of it."""
    usual = {"epochs": 1.0, "reweight_at": None}[changed]
    about = [
        answer
        for answer in found.get("asked", {}).values()
        if answer["method"] == found["baseline"]
        and answer[changed] != usual
        and answer["scores"] is not None
    ]
    if not about:
        return unknown
    # Of several the one that leaves least of the gain.
    answer = min(about, key=lambda each: float(each["chosen_beyond"]["difference"]))
    return (
        f"Follow-up: {changes_text(answer)} reaches {_percent(answer['mean'])} on the test images; "
        f"{found['chosen']} is {points(answer['chosen_beyond'])} points above it."
    )


def _number(score: float | None) -> float:
    return float("-inf") if score is None else score


def _percent(value: float | None) -> str:
    return "diverged" if value is None else f"{100 * value:.1f} %"

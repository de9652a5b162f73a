"""What the runs of the benchmark allow to say, situation by situation."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from largemargin.app.training.comparison_result import holm, paired_test
from largemargin.app.training.config_file import to_dict
from largemargin_papers.benchmark.advertised import (
    NONE,
    WINNER,
    WORSE,
    advertised_gain,
    advice,
    recommended,
)
from largemargin_papers.benchmark.caveats import caveats
from largemargin_papers.benchmark.costs import Costs
from largemargin_papers.benchmark.followups import FollowUp, answers, swaps
from largemargin_papers.benchmark.halving import (
    ASKED,
    Records,
    chosen_method,
    final_jobs,
    finalists,
    is_complete,
    job,
    opponents,
    optimizer_of,
    rung_jobs,
    scores_of,
    trial_scores,
)
from largemargin_papers.benchmark.pareto import ACCURACIES, dominates, front
from largemargin_papers.benchmark.protocol import Protocol, Situation
from largemargin_papers.benchmark.statistics import detectable_effect

BESIDE = (
    "accuracy",
    "balanced_accuracy",
    "worst_class_accuracy",
    "ece",
    "loss",
    "recall_at_1",
    "mean_average_precision",
    "gaussian 16/255",
    "occlusion",
    "common_corruptions",
    "ood_auroc",
    "ood_fpr95",
)
"""Numbers of final runs whose means are reported."""


def conclude(
    protocol: Protocol,
    records: Mapping[str, Records],
    questions: Mapping[str, FollowUp] | None = None,
    costs: Costs | None = None,
) -> dict[str, dict[str, Any]]:
    """Everything the protocol promises to report, by situation.

    Args:
        protocol: what was fixed beforehand.
        records: the runs of every situation, by their keys.
        questions: asked afterwards; their answers change no verdict. Those with equal optimizer
            settings may make the gain that is advertised smaller.
        costs: of a training step, by situation and method.
    """
    found = {}
    for name, situation in protocol.situations.items():
        known = {**records.get(situation.like or name, {}), **records.get(name, {})}
        registered = {key: each for key, each in known.items() if f"/{ASKED}" not in key}
        found[name] = _situation(protocol, situation, registered)
        for method, cost in (costs or {}).get(name, {}).items():
            if method in found[name]["methods"]:
                found[name]["methods"][method]["cost"] = dict(cost)
        asked = {**swaps(protocol, situation, known), **(questions or {})}
        found[name]["asked"] = answers(protocol, asked, name, known)
    # A situation that was not run counts with p = 1: leaving one out makes nothing milder.
    # Settings that are tried on other data are a family of tests of their own.
    families: dict[bool, list[str]] = {}
    for name, situation in protocol.situations.items():
        families.setdefault(situation.like is not None, []).append(name)
    corrected: dict[str, float] = {}
    for names in families.values():
        tests = [found[name]["test"] for name in names]
        corrected |= zip(names, holm([each["p"] if each else 1.0 for each in tests]), strict=True)
    for name, each in found.items():
        if each["test"]:
            each["test"]["corrected"] = corrected[name]
            each["verdict"] = _verdict(each["test"], protocol.level)
            each["aim_met"] = _aim_met(each)
            _compare_answers(protocol, each)
            each["advertised"] = advertised_gain(each)
            each["advice"] = advice(each)
            each["doubts"] = caveats(each)
    return found


def _compare_answers(protocol: Protocol, found: dict[str, Any]) -> None:
    scores = {name: method["scores"] for name, method in found["methods"].items()}
    chosen = scores[found["chosen"]]
    for answer in found["asked"].values():
        if answer["scores"] is not None:
            # The chosen method as a baseline was tuned is held against that one.
            other = answer["optimizer_of"]
            swapped = answer["method"] == found["chosen"] and other in found.get("against", ())
            baseline = scores[other if swapped else found["baseline"]]
            pairs = {
                "over_baseline": (answer["scores"], baseline),
                "chosen_beyond": (chosen, answer["scores"]),
            }
            for name, (one, other) in pairs.items():
                answer[name] = _uncorrected(protocol, one, other)


def _verdict(test: Mapping[str, Any], level: float) -> str:
    if not test["corrected"] < level:
        return NONE
    return WINNER if test["difference"] > 0 else WORSE


def _aim_met(found: Mapping[str, Any]) -> bool | None:
    if found["aim"] is None:
        return None
    return bool(found["verdict"] == WINNER and found["test"]["difference"] >= found["aim"])


def _situation(protocol: Protocol, situation: Situation, records: Records) -> dict[str, Any]:
    complete = is_complete(protocol, situation, records)
    tuned = finalists(protocol, situation, records)
    source = protocol.tuned_in(situation)
    own = {key: each for key, each in records.items() if key.startswith(f"{situation.name}/")}
    found: dict[str, Any] = {
        "situation": situation.name,
        "title": situation.title,
        "score": situation.score,
        "status": "complete" if complete else "under way" if own else "not measured",
        "runs": len(own),
        "diverged": _count_diverged(own),
        "baseline": situation.baseline,
        "beside": situation.beside,
        "chosen": chosen_method(protocol, situation, records),
        "aim": situation.aim,
        "aim_met": None,
        "verdict": None,
        "advertised": None,
        "advice": None,
        "tuned": {},
        "methods": {},
        "test": None,
        "reported_beside": {},
        "doubts": [],
        "where": _where(own),
    }
    if situation.like is not None:
        found["like"] = situation.like
    for name, (trial, score) in (tuned or {}).items():
        found["tuned"][name] = {
            "trial": trial,
            "validation": _finite(score),
            "margin": protocol.methods[name].margin,
            **_settings(protocol, situation, name, trial, records),
            "rungs": _best_of_rungs(protocol, source, name, records),
        }
    if tuned and situation.score == "corrupted_mean":
        found["pareto"] = {"validation": front(_last_rung(protocol, situation, records))}
    if complete:
        _add_test(protocol, situation, records, found)
    return found


def _finite(score: float) -> float | None:
    return score if score > float("-inf") else None


def _best_of_rungs(
    protocol: Protocol, situation: Situation, method: str, records: Records
) -> list[dict[str, Any]]:
    """The best validation score of every rung; each rung has seeds and images of its own."""
    found = []
    for stage, rung in enumerate(protocol.rungs):
        jobs = rung_jobs(protocol, situation, method, records, stage) or []
        best = max(trial_scores(jobs, records).values())
        found.append({"epochs": rung.epochs, "best": _finite(best)})
    return found


def _last_rung(
    protocol: Protocol, situation: Situation, records: Records
) -> dict[str, list[Mapping[str, Any]]]:
    """The runs that the choice was made by, on validation images, of every method."""
    last = len(protocol.rungs) - 1
    return {
        name: [
            records[each.key]
            for each in rung_jobs(protocol, situation, name, records, last) or ()
            if each.key in records
        ]
        for name in situation.methods
    }


def _count_diverged(records: Records) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in records.values():
        if each["status"] == "diverged":
            counts[each["method"]] = counts.get(each["method"], 0) + 1
    return counts


def _settings(
    protocol: Protocol, situation: Situation, method: str, trial: int, records: Records
) -> dict[str, Any]:
    run = job(protocol, situation, method, None, trial, protocol.seeds[0], records)
    optimizer: dict[str, Any] | None = None
    if protocol.methods[method].probe != "only":
        usual = to_dict(run.config.optimizer)
        drawn = {path.rpartition(".")[2]: value for path, value in optimizer_of(run).items()}
        optimizer = {name: usual[name] for name in ("lr", "weight_decay", "clip_norm")} | drawn
    return {
        "objective": run.config.objective.name,
        "settings": to_dict(run.config.objective)["settings"],
        "optimizer": optimizer,
        "noise": to_dict(run.config.noise) if run.config.noise.use != "none" else None,
        "reweight_at": run.reweight_at,
    }


def _add_test(
    protocol: Protocol, situation: Situation, records: Records, found: dict[str, Any]
) -> None:
    jobs = final_jobs(protocol, situation, records, everyone=True) or []
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for each in jobs:
        if each.key in records:
            runs.setdefault(each.method, []).append(records[each.key])
    # Methods that no test is about may have some of their runs only.
    runs = {name: each for name, each in runs.items() if len(each) == len(protocol.seeds)}
    scores = {name: scores_of(each, situation) for name, each in runs.items()}
    for name, theirs in runs.items():
        found["methods"][name] = _method(theirs, scores[name])
    chosen, against = found["chosen"], opponents(protocol, situation, records)
    tests = {name: compared(protocol, scores[chosen], scores[name]) for name in against}
    baseline = min(tests, key=lambda name: tests[name]["difference"])
    found["test"] = tests[baseline]
    if len(tests) > 1:
        # A gain over all of them is shown where it is shown over each (Berger 1982).
        least = tests[baseline]["difference"]
        p = max(each["p"] for each in tests.values()) if least > 0 else 1.0
        found |= {"against": tests, "test": {**tests[baseline], "p": p}, "baseline": baseline}
        if situation.beside == baseline:
            found["beside"] = situation.baseline
    for one, other in ((chosen, found["beside"]), (found["beside"], baseline)):
        found["reported_beside"][f"{one} - {other}"] = _uncorrected(
            protocol, scores[one], scores[other]
        )
    if situation.score == "corrupted_mean":
        found["dominates"] = _dominates(found["methods"][chosen], found["methods"][baseline])
        found["pareto"]["test"] = front(runs)


def _uncorrected(
    protocol: Protocol, method: Sequence[float], other: Sequence[float]
) -> dict[str, float]:
    """A comparison that no claim is made from."""
    test = compared(protocol, method, other)
    return {name: test[name] for name in ("difference", "low", "high", "p")}


def compared(
    protocol: Protocol, method: Sequence[float], baseline: Sequence[float]
) -> dict[str, Any]:
    """The paired test of two methods, with what it could have seen."""
    test = paired_test(method, baseline)
    differences = [a - b for a, b in zip(method, baseline, strict=True)]
    std = statistics.stdev(differences)

    def seen(level: float) -> float:
        return detectable_effect(std, len(differences), level=level, power=protocol.power)

    return {
        "pairs": test.pairs,
        "differences": differences,
        "difference": test.difference,
        "low": test.low,
        "high": test.high,
        "p": test.t_test,
        "detectable": seen(protocol.level),
        "detectable_strictest": seen(protocol.level / protocol.tests),
    }


def _method(runs: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scores": list(scores),
        "mean": statistics.fmean(scores),
        "std": statistics.stdev(scores),
    }
    for name in BESIDE:
        values = [each[name] for each in runs if each.get(name) is not None]
        if len(values) == len(runs):
            found[name] = statistics.fmean(values)
    for name in ("rejection_by_margin", "rejection_by_probability"):
        curves = [each[name] for each in runs if each.get(name)]
        if len(curves) == len(runs):
            found[name] = {
                key: statistics.fmean(curve[key] for curve in curves) for key in curves[0]
            }
    return found


def _dominates(method: Mapping[str, Any], baseline: Mapping[str, Any]) -> bool | None:
    if any(name not in each for each in (method, baseline) for name in ACCURACIES):
        return None  # a run diverged
    return dominates(method, baseline)


def _where(records: Records) -> dict[str, list[str]]:
    return {
        name: sorted({str(each[name]) for each in records.values() if each.get(name)})
        for name in ("device", "torch", "commit")
    }


def preset_entries(
    protocol: Protocol, found: Mapping[str, Mapping[str, Any]], source: str
) -> dict[str, Any]:
    """What ``lm.preset`` answers, by name; see ``largemargin.app.training.presets``.

    Args:
        protocol: says which situation a preset follows from.
        found: of :func:`conclude`.
        source: folder of the benchmark, as it is shown.
    """
    entries = {}
    for name, (main, *others) in protocol.presets.items():
        each = found[main]
        entry: dict[str, Any] = {
            "situation": each["title"],
            "source": f"{source}/{f'measured/{main}.json' if each['verdict'] else 'PROTOCOL.md'}",
            "status": each["advice"] or "not measured",
            "recommended": {"method": "softmax", "objective": "cross_entropy", "settings": {}},
            "compared": None,
            "doubts": [],
            "others": {found[other]["title"]: _short(found[other]) for other in others},
        }
        if each["verdict"]:
            method, tuned = recommended(each)
            entry["recommended"] = {
                "method": method,
                **{key: value for key, value in tuned.items() if key not in ("rungs", "margin")},
                "cost": each["methods"][method].get("cost"),
            }
            entry["compared"] = _short(each)
            entry["doubts"] = each["doubts"]
        entries[name] = entry
    return entries


def _short(each: Mapping[str, Any]) -> dict[str, Any] | None:
    if not each["test"]:
        return None
    method, tuned = recommended(each)
    numbers = ("pairs", "corrected", "detectable_strictest")
    return {
        "verdict": each["advice"],
        "chosen": each["chosen"],
        "baseline": each["baseline"],
        "score": each["score"],
        **{name: each["test"][name] for name in numbers},
        **{name: each["advertised"][name] for name in ("difference", "low", "high", "optimizer")},
        "registered": each["test"]["difference"],
        "objective": tuned["objective"],
        "cost": each["methods"][method].get("cost"),
        "doubts": each["doubts"],
    }

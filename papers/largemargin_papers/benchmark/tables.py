"""The conclusions of the benchmark as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from largemargin_papers.benchmark.advertised import equal_gains
from largemargin_papers.benchmark.followups import changes_text
from largemargin_papers.benchmark.pareto import ACCURACIES
from largemargin_papers.benchmark.plan import Cost

Found = Mapping[str, Mapping[str, Any]]

INTRO = """\
# Margin methods against a tuned softmax

Made by `papers/benchmark/analyse.py`; do not edit by hand. What was fixed beforehand is in
[PROTOCOL.md](PROTOCOL.md), what happened in [LOG.md](LOG.md). `measured/` has one line for every
run (`.jsonl`) and the conclusions of every situation (`.json`).

    python papers/benchmark/run.py --plan                               what is left, its cost
    python papers/benchmark/run.py --situation cifar10_1 --minutes 9    go on
    python papers/benchmark/analyse.py                                  this page, the presets
"""

INTRO_2 = """\
# Margin methods against the strongest baselines, and on data they have never seen

Made by `papers/benchmark/analyse.py papers/benchmark2`; do not edit by hand. What was fixed
beforehand is in [PROTOCOL.md](PROTOCOL.md), what happened in [LOG.md](LOG.md). The first benchmark
is [here](../benchmark/README.md).

    python papers/benchmark/run.py --protocol papers/benchmark2/protocol.yaml --plan
    python papers/benchmark/run.py --protocol papers/benchmark2/protocol.yaml --minutes 9
    python papers/benchmark/analyse.py papers/benchmark2

Processes that share a GPU take different situations (`--situation`). What they read is packed by
`papers/benchmark/pack.py`, whose first lines name the files. `--tiny --out FOLDER` is a rehearsal.
"""

RULE = """\
Differences are in points, test images, mean of 6 paired seeds, with the 95 % confidence interval.
p is Holm-corrected over all situations. *Detectable* is the smallest true difference that a test
would have found with probability 0.8: at the level of 0.05, and in brackets at that of Holm's
strictest step, 0.05 over the number of situations.

*Equal optimizers*: the difference with the same learning rate, weight decay and clipping for both,
once those that the baseline was tuned to, once the chosen method's. Presets and decision table show
the smallest of these and the registered one, and recommend the baseline where its interval reaches
0. This rule is of 2026-11-19, later than the tests; it can take advice away and not add any.

Every method had as many trials as the baseline. The chosen one is the best of several, so that more
trials stand behind it in all; it was chosen on validation images, and the test is on others. The
validation images have right labels, and are more than some training sets: with fewer the settings
would be worse, of all methods."""

RULE_2 = """\
Differences are in points, test data, mean of 6 paired seeds, with the 95 % confidence interval:
those to the baseline that leaves least of the gain. The chosen method has to be better than every
baseline, so p is the largest of its tests, Holm-corrected over all situations. *Equal optimizers*:
that difference with the same settings of the optimizer for both. The smallest gain over all
baselines, with their own settings and with equal ones, is advertised, and there is no advice
without these runs."""

ASKED_2 = """\
Registered: the chosen method with the optimizer settings of every baseline, and these with its own,
with the final seeds. The gain of the chosen method with another's settings is the one over that
baseline. Differences are paired, with the 95 % interval, not corrected."""

TRIED = """\
Settings as they were tuned above, on data that had no part in it, against softmax, label smoothing
and the baseline that was best on validation data there. A family of tests of its own."""

BESIDE = """\
Test images, means over the seeds; no test was registered for these and no claim follows. ECE:
expected calibration error in percent, 15 bins, of the softmax of the logits as they are. Rejection:
area under the risk-coverage curve in percent, where the margin says which predictions to hold back.
Smaller is better in both."""

COST = """\
Cost: a training step over one of softmax, each alone on {on} (`benchmarks/method_cost.py`). The
seconds of the runs themselves say little: several shared a GPU and took their steps in turns."""

CAVEATS = """\
Sentences that follow from the numbers by fixed rules
(`papers/largemargin_papers/benchmark/caveats.py`)."""

ASKED = """\
Questions that the results raised ([questions.yaml](questions.yaml)): a method with its tuned
settings, or with one thing changed, with the final seeds. Differences are paired, with the 95 %
interval; not registered, not corrected, no verdict follows. Those with the optimizer settings of
another method may make the advertised gain smaller."""

PAGES = {"benchmark2": (INTRO_2, RULE_2, ASKED_2)}
"""By the folder of a protocol; others have the texts of the first one."""

SUREST = (0.95, 0.9, 0.8, 0.7, 0.5)
"""Shares of the predictions, the surest ones, whose accuracy is told."""

VERDICTS = {
    "winner": "**better**",
    "no winner": "no difference shown",
    "worse": "**worse**",
    None: "not measured",
}


def readme(found: Found, costs: Sequence[Cost], folder: str = "benchmark") -> str:
    """The whole page of the protocol in this folder."""
    intro, rule, questions = PAGES.get(folder, (INTRO, RULE, ASKED))
    tuned, tried = ({n: e for n, e in found.items() if ("like" in e) is t} for t in (False, True))
    parts = [intro]
    if not any(each["runs"] for each in found.values()):
        parts.append("**Registered, not yet measured.**\n")
    parts += ["## The registered tests\n", tests(tuned), "", rule]
    if tried:
        parts += ["", "## On other data", "", TRIED, "", tests(tried)]
    if any(each["test"] for each in found.values()):
        parts += [
            "",
            "## Calibration, rejection, cost\n",
            beside(found),
            "",
            BESIDE,
            "",
            cost(found),
        ]
    if told := caveat_list(found):
        parts += ["", "## Before you believe them", "", CAVEATS, "", told]
    if table := asked(found):
        parts += ["", "## Follow-up runs", "", questions, "", table]
    for each in found.values():
        if each["tuned"] or each["methods"]:
            parts += ["", f"## {each['title']}", "", details(each)]
    parts += ["", "## Still to be run", "", left(found, costs)]
    return "\n".join(parts).rstrip() + "\n"


def tests(found: Found) -> str:
    """One line for every situation, measured or not."""
    lines = [
        "| situation | baseline | chosen on validation | difference | p | detectable | aim "
        "| result | equal optimizers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found.values():
        test = each["test"]
        cells = [each["title"], _baseline(each), each["chosen"] or "–"]
        if test:
            cells += [
                points(test),
                f"{test['corrected']:.3g}",
                f"{100 * test['detectable']:.2f} ({100 * test['detectable_strictest']:.2f})",
            ]
        else:
            cells += ["–", "–", "–"]
        cells += [_aim(each), VERDICTS[each["verdict"]] if test else each["status"]]
        cells.append(_at_equal(each) if test else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _at_equal(each: Mapping[str, Any]) -> str:
    if each.get("like"):
        return "–"
    gains = equal_gains(each)
    if not gains:
        return "tuned to the same"
    said = (
        f"{name}'s: {'not run yet' if gain is None else points(gain)}"
        for name, gain in gains.items()
    )
    return "; ".join(said)


def beside(found: Found) -> str:
    """Baseline and chosen method of every concluded situation, in what no test is about."""
    lines = [
        "| situation | method | ECE | rejection by margin | by probability | "
        "surest 80 % by margin | cost |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found.values():
        if not each["test"]:
            continue
        for name in (each["baseline"], each["chosen"]):
            method = each["methods"][name]
            cells = [
                each["title"],
                name,
                _percent(method.get("ece")),
                _percent(method.get("rejection_by_margin", {}).get("area")),
                _percent(method.get("rejection_by_probability", {}).get("area")),
                _percent(method.get("rejection_by_margin", {}).get("accuracy at 0.8")),
                f"x{method['cost']['over_softmax']:.2f}" if "cost" in method else "–",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost(found: Found) -> str:
    """Where steps were timed."""
    methods = (method for each in found.values() for method in each["methods"].values())
    devices = sorted({method["cost"]["on"] for method in methods if "cost" in method})
    return COST.format(on=", ".join(devices)) if devices else "Costs were not measured."


def caveat_list(found: Found) -> str:
    """What speaks against taking a difference for the margin's, one line each."""
    return "\n".join(
        f"* {each['title']}: {doubt}" for each in found.values() for doubt in each["doubts"]
    )


def asked(found: Found) -> str:
    """One line for every question, answered or not."""
    lines = [
        "| situation | question | trained | test | over the baseline | chosen method beyond it |",
        "|---|---|---|---|---|---|",
    ]
    for each in found.values():
        for answer in each["asked"].values():
            cells = [each["title"], answer["asked"], changes_text(answer)]
            if "chosen_beyond" in answer:
                cells += [
                    f"{100 * answer['mean']:.2f} ± {100 * answer['std']:.2f}",
                    points(answer["over_baseline"]),
                    points(answer["chosen_beyond"]),
                ]
            else:
                cells += ["not run yet", "–", "–"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def rejection(each: Mapping[str, Any]) -> str:
    """Accuracy of the surest predictions, by margin and by probability, of every method."""
    head = ["method", "surest by", "area", *(f"{100 * share:g} %" for share in SUREST)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, method in each["methods"].items():
        for by in ("margin", "probability"):
            curve = method.get(f"rejection_by_{by}")
            if curve is None:
                continue
            cells = [name, by, _percent(curve["area"])]
            cells += [_percent(curve.get(f"accuracy at {share}")) for share in SUREST]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def pareto(each: Mapping[str, Any]) -> str:
    """All methods by their three accuracies; who is on the front, on each kind of images."""
    lines = [
        "| images | method | clean | noise 16/255 | occlusion | mean | runs | Pareto front |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for split, methods in sorted(each["pareto"].items()):
        for name, row in methods.items():
            values = [row[key] for key in ACCURACIES]
            by = ", ".join(row["dominated_by"])
            cells = [
                split,
                f"**{name}**" if name == each["chosen"] else name,
                *(_percent(value) for value in [*values, sum(values) / len(values)]),
                str(row["runs"]),
                f"dominated by {by}" if by else "on it",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _baseline(each: Mapping[str, Any]) -> str:
    known = each["methods"].get(each["baseline"])
    return f"{each['baseline']} {100 * known['mean']:.2f}" if known else str(each["baseline"])


def _aim(each: Mapping[str, Any]) -> str:
    if each["aim"] is None:
        return "–"
    met = {True: ", met", False: ", missed", None: ""}[each["aim_met"]]
    return f"{100 * each['aim']:+g}{met}"


def points(test: Mapping[str, Any]) -> str:
    """``+1.23 [0.40, 2.06]``."""
    low, high = 100 * test["low"], 100 * test["high"]
    return f"{100 * test['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"


COLUMNS = {
    "ece": ("ECE", 100, 2),
    "worst_class_accuracy": ("worst class", 100, 2),
    "gaussian 16/255": ("noise 16/255", 100, 2),
    "occlusion": ("occlusion", 100, 2),
    "recall_at_1": ("recall at 1", 100, 2),
}


def details(each: Mapping[str, Any]) -> str:
    """All methods of a situation, with what no claim is made about."""
    shown = {
        name: column
        for name, column in COLUMNS.items()
        if any(name in method for method in each["methods"].values())
    }
    rejects = any("rejection_by_margin" in method for method in each["methods"].values())
    rungs: list[Mapping[str, Any]] = next((t["rungs"] for t in each["tuned"].values()), [])
    head = ["method", "trial", *(f"{100 * rung['epochs']:g} %" for rung in rungs[:-1])]
    head += ["validation", f"test {each['score'].replace('_', ' ')}"]
    head += [label for label, _, _ in shown.values()]
    head += ["rejection by margin", "by probability"] if rejects else []
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, tuned in each["tuned"].items():
        label = f"**{name}**" if name == each["chosen"] else name
        cells = _method_cells(tuned, each["methods"].get(name, {}), shown, rejects)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    more = []
    if each.get("pareto"):
        more += ["", PARETO, "", pareto(each)]
    if table := rejection(each):
        more += ["", REJECTION, "", table]
    return "\n".join([*lines, "", *_notes(each), *more])


def _method_cells(
    tuned: Mapping[str, Any],
    method: Mapping[str, Any],
    shown: Mapping[str, tuple[str, int, int]],
    rejects: bool,
) -> list[str]:
    """A method's trial, validation scores by rung, test score and what else is shown."""
    cells = [
        str(tuned["trial"]),
        *(_score(rung["best"]) for rung in tuned["rungs"][:-1]),
        _score(tuned["validation"]),
        f"{100 * method['mean']:.2f} ± {100 * method['std']:.2f}" if method else "–",
    ]
    cells += [
        f"{factor * method[key]:.{digits}f}" if key in method else "–"
        for key, (_, factor, digits) in shown.items()
    ]
    if rejects:
        cells += [
            f"{100 * method[key]['area']:.2f}" if key in method else "–"
            for key in ("rejection_by_margin", "rejection_by_probability")
        ]
    return cells


def _score(value: float | None) -> str:
    return "diverged" if value is None else f"{100 * value:.2f}"


PARETO = """\
Three accuracies at once: a method is dominated where another is at least as good in all three and
better in one. Validation images: all methods in the last rung of their tuning. Test images: methods
that have final runs with all seeds."""

REJECTION = "Accuracy of the surest predictions in percent, of all methods with final runs:"


def _notes(each: Mapping[str, Any]) -> list[str]:
    notes = [
        f"{each['chosen']} - {name}: {points(test)} points, p = {test['p']:.3g} (one of those that "
        "all have to be shown)."
        for name, test in each.get("against", {}).items()
    ]
    notes += [
        f"{name}: {points(test)} points, p = {test['p']:.3g} (not corrected, no claim)."
        for name, test in each["reported_beside"].items()
    ]
    if each.get("dominates") is not None:
        does = "dominates" if each["dominates"] else "does not dominate"
        notes.append(f"{each['chosen']} {does} {each['baseline']} in all three accuracies.")
    if each["diverged"]:
        counted = ", ".join(f"{name} {count}" for name, count in each["diverged"].items())
        notes.append(f"Runs that diverged: {counted}.")
    where = each["where"]
    if each["tuned"]:
        notes.append(
            "Columns with a share of the epochs: the best validation score of that rung, which has "
            "its own seed and images."
        )
    notes.append(
        f"{each['runs']} runs on {', '.join(where['device'])}, torch {', '.join(where['torch'])}, "
        f"commit {', '.join(where['commit']) or 'unknown'}."
    )
    if any("rejection_by_margin" in method for method in each["methods"].values()):
        notes.append("Rejection: area under the risk-coverage curve in percent, smaller is better.")
    return [f"* {note}" for note in notes]


def left(found: Found, costs: Sequence[Cost]) -> str:
    lines = [
        "| situation | runs | million images | minutes on an H200, guessed |",
        "|---|---|---|---|",
    ]
    for cost in costs:
        if cost.runs:
            lines.append(
                f"| {found[cost.situation]['title']} | {cost.runs} | {cost.images / 1e6:.1f} | "
                f"{cost.seconds / 60:.0f} |"
            )
    return "\n".join(lines) if len(lines) > 2 else "Nothing of what the protocol registers."

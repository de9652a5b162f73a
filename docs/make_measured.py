"""Writes the measured parts of README.md and of other pages from the files in the repository.

Run ``python docs/make_measured.py`` after a benchmark or a reproduction; a test fails when the
committed text is out of date. Parts stand between ``<!-- made: NAME -->`` and ``<!-- end -->``.
"""

import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import make_decisions
import make_headlines
from largemargin_papers.recipes.table_rows import is_whole
from scipy.stats import t as student_t
from site_pages import choosing, reproductions
from site_pages.benchmarks import ON_ZEROS, WITHOUT_GRADIENT
from site_pages.results import PML_JUMPS

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"

MILLION = {
    "largemargin triton": "largemargin",
    "torch eager": "torch eager",
    "torch compiled": "torch compiled",
    "pytorch-metric-learning": "pytorch-metric-learning",
    "CCE, bfloat16 prototypes": "CCE",
}
"""Providers of a head of a million classes, in the order they are shown."""
MARGIN_OR_NONE = ("ArcFace", "cross entropy, no margin")

ENGINE_AIM = 65_000
"""Images per second of three runs side by side on one H200."""
CPU_AIM = 0.97
"""Of a written loop's rate."""
TERM_AIM = 2.0
"""Percent that the discriminative loss may cost."""


def read(name: str) -> list[dict[str, Any]]:
    found = json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found["rows"] if isinstance(found, dict) else found


def link(name: str) -> str:
    return f"[{name}.json](../{RESULTS}/{name}.json)"


def aim(row: dict[str, Any]) -> str:
    if row.get("target_ratio") is None:
        return ""
    return f"{row['target_ratio']:g}, {row['verdict'].lower()}"


def judged(value: float, target: float) -> str:
    return "met" if value >= target else "missed"


def heads() -> str:
    rows = read("cpu_heads")
    first = rows[0]
    small = [row for row in rows if row["shape"]["C"] == 1000]
    large = [row for row in rows if row["shape"]["C"] != 1000]
    versions = first["versions"]
    lines = [
        f"CPU time of a classification head, forward and backward, float32, {first['threads']} "
        f"threads of an {first['cpu']}, torch {versions['torch']}, pytorch-metric-learning (PML) "
        f"{versions['pytorch-metric-learning']}; medians, all providers interleaved in one run, "
        f"values and gradients compared before timing ({link('cpu_heads')}, `make bench`).",
    ]
    for group in (small, large):
        shape = group[0]["shape"]
        lines += [
            "",
            f"| N={shape['N']}, C={shape['C']}, D={shape['D']} | ms | against | ratio | aim | "
            "kept for backward, in N x C floats |",
            "|---|---|---|---|---|---|",
        ]
        for row in group:
            own = row["provider"] == row["baseline"]
            against = ("", "") if own else (row["baseline"], f"{row['ratio']:.2f}")
            lines.append(
                f"| {row['provider']} | {_ms(row['median_ms'])} | {against[0]} | {against[1]} | "
                f"{aim(row)} | {row['saved_n_x_c_units']:g} |"
            )
    lines += ["", f"In the second table {PML_JUMPS}"]
    return "\n".join(lines)


def million() -> str:
    """A head of a million classes on a GPU: what a step takes, beside what others take."""
    rows = [row for row in read("fused_head_cuda") if row["provider"] in MILLION]
    shown = [row for row in rows if row["C"] == 1_000_000 and row["loss"] in MARGIN_OR_NONE]
    shown.sort(key=lambda row: list(MILLION).index(row["provider"]))
    first = shown[0]
    base = next(row for row in shown if row["provider"] == "torch eager")
    lines = [
        f"{first['C']:,} classes, {first['D']} float32 features, {first['N']:,} samples, bfloat16 "
        f"products, forward and backward, one {first['device']}, torch "
        f"{first['versions']['torch']} ({link('fused_head_cuda')}, `python "
        "benchmarks/fused_head.py`; see also [heads of very many classes]"
        "(how-to/million_classes.md)):",
        "",
        "| | loss | ms | against torch eager | ms in a CUDA graph | memory beyond gradients |",
        "|---|---|---|---|---|---|",
    ]
    for row in shown:
        graph = f"{row['graph_ms']:.1f}" if row.get("graph_ms") else "-"
        memory = f"{row['extra_mib']:,.0f} MiB" if row["extra_mib"] > 0 else "-"
        lines.append(
            f"| {MILLION[row['provider']]} | {row['loss']} | {row['ms']:.1f} | "
            f"{row['ms'] / base['ms']:.2f} | {graph} | {memory} |"
        )
    most = max((row for row in rows if row["loss"] == "ArcFace"), key=lambda row: row["C"])
    few = {row["provider"]: row for row in rows if row["C"] == 10_000 and row["loss"] == "ArcFace"}
    ours, plain = few["largemargin triton"], few["torch eager"]
    return "\n".join(lines) + (
        "\n\nCCE's class vectors are bfloat16, so it reads half of the memory. ArcFace on "
        f"{most['C']:,} bfloat16 class vectors takes {most['ms']:.0f} ms and "
        f"{most['extra_mib']:,.0f} MiB. At {ours['C']:,} classes launch overhead dominates: "
        f"{ours['ms']:.1f} ms eager, {plain['ms']:.1f} ms for plain torch; in a CUDA graph "
        f"{ours['graph_ms']:.2f} and {plain['graph_ms']:.2f} ms. Compile or capture the step "
        "there."
    )


def small() -> str:
    """Per-step overhead of a loss on a tiny problem."""
    rows = {row["provider"]: row for row in read("small_steps")}
    shape, base = rows["CosFace"]["shape"], rows["linear + CE"]
    shown = {
        "linear + CE": "linear layer and `F.cross_entropy`",
        "CE with empty hooks": "the same with hooks that do nothing, and a label check",
        "CosFace by hand": "CosFace written in torch, without checks",
        "PML CosFace": "pytorch-metric-learning, CosFace",
        "CosFace": "`lm.CosFace` on features and head",
        "attach: CosFace": "`lm.attach(model, lm.CosFace())`",
        "attach: CrossEntropy + Discriminative": "`lm.attach(model, lm.CrossEntropy() + "
        "lm.Discriminative(...))`",
    }
    lines = [
        f"Forward and backward with {shape['N']} samples, {shape['C']} classes and "
        f"{shape['D']} features, where arithmetic costs next to nothing: time of one CPU thread, "
        f"and the number of operators a GPU would run ({link('small_steps')}, `python "
        "benchmarks/small_steps.py`). In a CUDA graph, as the training engine captures it, the "
        "Python overhead disappears.",
        "",
        "| | microseconds | ratio | operators |",
        "|---|---|---|---|",
    ]
    for name, words in shown.items():
        row = rows[name]
        ratio = "" if row is base else f"{row['ratio']:.2f}"
        count = row["operators_off_cpu"] or "-"
        lines.append(f"| {words} | {row['median_us']:,.0f} | {ratio} | {count} |")
    return "\n".join(lines)


def geometry() -> str:
    rows = read("measure")
    ours = [row for row in rows if row["provider"] == "ours"]
    passes = {row["case"]: row for row in rows if row["provider"] == "measure"}
    slowest, memory = (max(row[key] for row in ours) for key in ("ratio", "extra_memory_mib"))
    shape = ours[0]["shape"]
    added = next(row for row in read("import_time") if row["provider"].endswith("after torch"))
    told = " and ".join(
        f"{row['ratio']:.2f}x an evaluation pass of a {case}" for case, row in passes.items()
    )
    return (
        f"`import largemargin` adds {added['added_ms']:.0f} ms to a process that has imported "
        f"torch ({link('import_time')}).\n\nClass diameters and all sample margins of "
        f"{shape['N']:,} x {shape['D']} features in {shape['C']} classes take at most "
        f"{slowest:.2f}x the time of `scipy.spatial.distance.pdist` per class plus a loop (aim "
        f"{ours[0]['target_ratio']:g}x), and at most {memory:.0f} MiB of extra memory. `measure` "
        f"takes {told} (aim {next(iter(passes.values()))['target_ratio']:g}x; {link('measure')})."
    )


def training() -> str:
    about = json.loads((ROOT / RESULTS / "training_speed_cuda.json").read_text(encoding="utf-8"))
    rows = {row["provider"]: row for row in about["rows"]}
    lines = [
        f"One {about['device']}, torch {about['torch'].split('+')[0]}: ResNet-18 for 32 x 32 "
        f"images with 30 features, batches of {about['batch']}, bfloat16, random crops and flips "
        "on the device "
        f"({link('training_speed_cuda')}, `python benchmarks/training_speed.py`):",
        "",
        "| | images/s | relative to the hand-written loop |",
        "|---|---|---|",
    ]
    for name, row in rows.items():
        if "LMD" in name:
            continue
        ratio = "" if name == row["against"] else f"{row['ratio']:.2g}"
        goal = ""
        if "3 side by side" in name:
            goal = f" (aim {ENGINE_AIM:,} images/s, {judged(row['images_per_s'], ENGINE_AIM)})"
        shown = name.replace("written loop", "hand-written loop")
        lines.append(f"| {shown} | {_rounded(row['images_per_s'])} | {ratio}{goal} |")
    costs = [
        100 * (1 - row["ratio"])
        for name, row in rows.items()
        if "compiled" in name and name.endswith("LMD over softmax")
    ]
    cpu = {row["model"]: row for row in read("training_speed_cpu") if row["provider"] == "engine"}
    told = " and ".join(f"{row['ratio']:.2f}x ({model})" for model, row in cpu.items())
    worst = min(row["ratio"] for row in cpu.values())
    lost = f"{ON_ZEROS} " if about["commit"] in WITHOUT_GRADIENT else ""
    return "\n".join(lines) + (
        f"\n\n{lost}The discriminative loss costs {max(costs):.1f} % of the compiled graph's rate "
        f"(aim {TERM_AIM:g} %). On CPU the engine runs at {told} the speed of a hand-written loop "
        f"(aim {CPU_AIM:g}x, {judged(worst, CPU_AIM)} with the smallest network; "
        f"{link('training_speed_cpu')})."
    )


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _rounded(value: float) -> str:
    return f"{round(value, -2):,.0f}"


def curvature() -> str:
    cpu = next(row for row in read("input_curvature_cpu") if row["case"].endswith("differences"))
    cuda = [row for row in read("input_curvature_cuda") if row["case"] == "all images in batches"]
    told = " and ".join(
        f"{row['times faster than one sample at a time']:g} times "
        + ("in float32" if row["precision"] == "highest" else "with TensorFloat-32")
        for row in cuda
    )
    return (
        "Input-loss curvature of a ResNet-18 with 20 directions takes, on a CPU, "
        f"{cpu['ratio to 21 passes, to the parameters']:.2f}x the time of 21 forward and backward "
        f"passes to the parameters, and {cpu['ratio to 21 passes, to the inputs']:.2f}x that of 21 "
        f"to the inputs (aim 1.15x; {link('input_curvature_cpu')}). On a GPU, batches of "
        f"{cuda[0]['images']:,} images are {told} as fast as one sample at a time (aim 10 times; "
        f"{link('input_curvature_cuda')})."
    )


def papers() -> str:
    found = reproductions.tables()
    # A number counts once, also where two recipes or two protocols are about it.
    numbers, known, faithful = set(), set(), set()
    for table in found:
        name = table.path.parent / table.recipe.claims
        for claim in table.claims:
            if claim.reported is not None:
                numbers.add((name, *claim.key.values(), claim.column))
        for each in table.measured:
            whole = is_whole(each.protocol, table.recipe.variants)
            for line in each.lines:
                if line.measured.n and line.reported is not None:
                    known.add(place := (name, *line.key.values(), line.column))
                    faithful.update([place] if whole else [])
    return (
        f"{len(found)} recipes cover the tables of the five papers. Of {len(numbers)} reported "
        f"numbers {len(known)} have been measured here, {len(faithful)} of them by the printed or "
        "the authors' protocol. Each row goes from a baseline to the paper's method; the "
        "[rule of the verdicts](#the-rule-of-the-verdicts) says whether it has the sign "
        f"that is reported:\n\n{make_headlines.headlines()}\n\n"
        '"As printed" means the settings of the paper where it prints them, and our reading where '
        "it does not; the authors' code settles some of these otherwise, and its rows say so. The "
        "linked pages say why numbers differ, as far as we know."
    )


def decisions() -> str:
    """What the benchmark recommends, with costs and caveats."""
    return make_decisions.decision_table(make_decisions.read_presets(), root="../")


def embeddings() -> str:
    """Linear heads on frozen embeddings: ours, LogisticRegression and LinearSVC."""
    rows = [row for row in read("embeddings") if "method" in row]
    by_cell: dict[tuple[str, int], dict[str, dict[int, Any]]] = {}
    for row in rows:
        cell = by_cell.setdefault((row["data"], row["labels"]), {})
        cell.setdefault(row["method"], {})[row["draw"]] = row
    lines = [
        "Test accuracy in percent, means over the draws that ours and LogisticRegression share; "
        "the difference with its 95 % interval over these draws; log-loss and calibration error "
        "(15 bins); all with cross-validated settings, the baselines by accuracy "
        "([embeddings.json](../../benchmarks/results/embeddings.json), "
        "`python benchmarks/embeddings.py`):",
        "",
        "| data, labels a class | draws | largemargin | LogisticRegression | difference "
        "| LinearSVC (draws) | log-loss | calibration error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, labels), cell in sorted(by_cell.items()):
        ours, theirs = cell.get("largemargin", {}), cell.get("logistic", {})
        draws = sorted(ours.keys() & theirs.keys())
        if not draws:
            continue
        svc = [row["accuracy"] for draw, row in cell.get("svc", {}).items() if draw in draws]
        gain = [100 * (ours[draw]["accuracy"] - theirs[draw]["accuracy"]) for draw in draws]
        paired = {
            key: [mean(side[draw][key] for draw in draws) for side in (ours, theirs)]
            for key in ("accuracy", "nll", "ece")
        }
        shown = [f"{100 * each:.2f}" for each in paired["accuracy"]]
        lines.append(
            f"| {name}, {labels} | {len(draws)} | {shown[0]} | {shown[1]} | {with_interval(gain)}"
            + (f" | {100 * mean(svc):.2f} ({len(svc)})" if svc else " | not measured")
            + f" | {paired['nll'][0]:.2f} against {paired['nll'][1]:.2f}"
            + f" | {100 * paired['ece'][0]:.1f} against {100 * paired['ece'][1]:.1f} |"
        )
    lines += ["", _out_of_scope(by_cell), _search_times()]
    return "\n".join(lines)


def with_interval(differences: list[float]) -> str:
    """Mean and 95 % interval by Student's t."""
    count = len(differences)
    if count < 2:
        return f"{differences[0]:+.2f}"
    half = float(student_t.ppf(0.975, count - 1)) * stdev(differences) / count**0.5
    middle = mean(differences)
    return f"{middle:+.2f} [{middle - half:+.2f}, {middle + half:+.2f}]"


def _out_of_scope(by_cell: dict[tuple[str, int], dict[str, dict[int, Any]]]) -> str:
    said = []
    for (name, labels), cell in sorted(by_cell.items()):
        scored = {
            method: [row["auroc"] for row in draws.values() if "auroc" in row]
            for method, draws in cell.items()
        }
        best = {
            method: max(mean(row[score] for row in found) for score in found[0])
            for method, found in scored.items()
            if found
        }
        if "largemargin" in best:
            ours = mean(row["score_samples"] for row in scored["largemargin"])
            others = max(value for method, value in best.items() if method != "largemargin")
            said.append(f"{ours:.3f} against {others:.3f} ({name}, {labels} labels)")
    return (
        "Questions out of scope are told from the rest with an AUROC of "
        f"{', '.join(said)}: `score_samples` against the best score of a baseline."
    )


def _search_times() -> str:
    timed: dict[tuple[str, int], dict[str, float]] = {}
    for row in read("embeddings"):
        if "timed" in row:
            timed.setdefault((row["data"], row["labels"]), {})[row["timed"]] = row["cpu_seconds"]
    said = [
        f"{found['largemargin'] / found['logistic']:.2f} ({name}, {labels} labels)"
        for (name, labels), found in sorted(timed.items())
        if len(found) == 2
    ]
    return (
        "A search takes this part of the CPU time of LogisticRegressionCV over nine C on the same "
        f"preparations and folds: {', '.join(said)}; measured on a machine with other load."
    )


PAGES = {
    "README.md": {"figure": choosing.caption, "recommendations": make_decisions.recommendations},
    "docs/choosing.md": {"decisions": decisions},
    "docs/benchmarks.md": {
        "heads": heads,
        "million": million,
        "small": small,
        "geometry": geometry,
        "training": training,
        "curvature": curvature,
    },
    "docs/how-to/embeddings.md": {"embeddings": embeddings},
    "papers/README.md": {"papers": papers},
}
"""By page: the parts that are made, by name."""


def made(page: str) -> str:
    """A page with its made parts as they should be."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, part in PAGES[page].items():
        pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.DOTALL):
            raise SystemExit(f"{page} has no part <!-- made: {name} --> ... <!-- end -->.")
        said = part()
        text = re.sub(
            pattern,
            lambda found, said=said: f"{found[1]}{said}\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(made(page), encoding="utf-8")
        sys.stdout.write(f"wrote {page}\n")

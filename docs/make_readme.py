"""Writes the made parts of README.md: what was measured, from the files in the repository.

Run ``python docs/make_readme.py`` after a benchmark or a reproduction; a test fails when the
committed text is out of date. Parts stand between ``<!-- made: NAME -->`` and ``<!-- end -->``.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import make_decisions
import make_headlines
from site_pages import reproductions

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = "benchmarks/results"

WITHOUT_GRADIENT = ("ddf15adff292+",)
"""Commits whose compiled losses had none through their logits, on a GPU with torch 2.11."""

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
    return f"[{name}.json]({RESULTS}/{name}.json)"


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
    lines += [
        "",
        "PML's time in the second table jumps between two levels from run to run, the lower one "
        "close to ours, for a reason we have not found.",
    ]
    return "\n".join(lines)


def million() -> str:
    """A head of a million classes on a GPU: what a step takes, beside what others take."""
    rows = [row for row in read("fused_head_cuda") if row["provider"] in MILLION]
    shown = [row for row in rows if row["C"] == 1_000_000 and row["loss"] in MARGIN_OR_NONE]
    shown.sort(key=lambda row: list(MILLION).index(row["provider"]))
    first = shown[0]
    base = next(row for row in shown if row["provider"] == "torch eager")
    lines = [
        f"A head of {first['C']:,} classes of {first['D']} float32 numbers, {first['N']:,} "
        f"samples, bfloat16 products, forward and backward, one {first['device']}, torch "
        f"{first['versions']['torch']} ({link('fused_head_cuda')}, `python "
        "benchmarks/fused_head.py`; more in [million_classes.md](docs/how-to/million_classes.md)):",
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
        f"\n\nCCE's class vectors are bfloat16, half of the memory to read. {most['C']:,} classes "
        f"in bfloat16 take ArcFace {most['ms']:.0f} ms and {most['extra_mib']:,.0f} MiB. With "
        f"{ours['C']:,} a step is many small launches: {ours['ms']:.1f} ms eager (torch "
        f"{plain['ms']:.1f}), {ours['graph_ms']:.2f} in a CUDA graph (torch "
        f"{plain['graph_ms']:.2f}). Compile it, or capture the step."
    )


def small() -> str:
    """What a loss costs where arithmetic costs nothing."""
    rows = {row["provider"]: row for row in read("small_steps")}
    shape, base = rows["CosFace"]["shape"], rows["linear + CE"]
    shown = {
        "linear + CE": "linear layer and `F.cross_entropy`",
        "CosFace by hand": "CosFace written in torch, without checks",
        "PML CosFace": "pytorch-metric-learning, CosFace",
        "CosFace": "`lm.CosFace` on features and head",
        "attach: CosFace": "`lm.attach(model, lm.CosFace())`",
        "attach: CrossEntropy + Discriminative": "`lm.attach(model, lm.CrossEntropy() + "
        "lm.Discriminative(...))`",
    }
    lines = [
        f"What is left where arithmetic costs nothing, a step of {shape['N']} samples, "
        f"{shape['C']} classes and {shape['D']}-d features, forward and backward: the time of one "
        f"CPU thread, and the operators that a GPU would be handed ({link('small_steps')}, "
        "`python benchmarks/small_steps.py`). Captured in a CUDA graph, as by the engine below, "
        "Python has no part in a step.",
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
    told = " and ".join(f"{row['ratio']:.2f} of a {case}" for case, row in passes.items())
    return (
        f"`import largemargin` adds {added['added_ms']:.0f} ms to a process that has imported "
        f"torch ({link('import_time')}). Class diameters and all sample margins of "
        f"{shape['N']:,} x {shape['D']} features in {shape['C']} classes take {slowest:.2f} of the "
        f"time of `scipy.spatial.distance.pdist` per class plus a loop (aim "
        f"{ours[0]['target_ratio']:g}), with {memory:.0f} MiB of extra memory at most; `measure` "
        f"takes {told} evaluation pass (aim {next(iter(passes.values()))['target_ratio']:g}; "
        f"{link('measure')})."
    )


def training() -> str:
    about = json.loads((ROOT / RESULTS / "training_speed_cuda.json").read_text(encoding="utf-8"))
    rows = {row["provider"]: row for row in about["rows"]}
    lines = [
        f"Training, one {about['device']}, torch {about['torch'].split('+')[0]}: ResNet-18 for "
        "32 x 32 images with a 30-d feature layer, batches of "
        f"{about['batch']}, bfloat16, random crops and mirror images on the device "
        f"({link('training_speed_cuda')}, `python benchmarks/training_speed.py`):",
        "",
        "| | images/s | against the written loop |",
        "|---|---|---|",
    ]
    for name, row in rows.items():
        if "LMD" in name:
            continue
        ratio = "" if name == row["against"] else f"{row['ratio']:.2g}"
        goal = ""
        if "3 side by side" in name:
            goal = f" (aim {ENGINE_AIM:,} images/s, {judged(row['images_per_s'], ENGINE_AIM)})"
        lines.append(f"| {name} | {_rounded(row['images_per_s'])} | {ratio}{goal} |")
    costs = [
        100 * (1 - row["ratio"])
        for name, row in rows.items()
        if "compiled" in name and name.endswith("LMD over softmax")
    ]
    cpu = {row["model"]: row for row in read("training_speed_cpu") if row["provider"] == "engine"}
    told = ", ".join(f"{row['ratio']:.2f} with {model}" for model, row in cpu.items())
    worst = min(row["ratio"] for row in cpu.values())
    lost = ""
    if about["commit"] in WITHOUT_GRADIENT:
        lost = (
            "The compiled rows were measured when compiled losses had no gradient through their "
            "logits on this device (fixed since). The same work was done, but on zeros: they "
            "are to be measured again. "
        )
    return "\n".join(lines) + (
        f"\n\n{lost}The discriminative loss costs {max(costs):.1f} % of the compiled graph's rate "
        f"(aim {TERM_AIM:g} %). On CPU threads the engine has {told} of the written loop's rate "
        f"(aim {CPU_AIM:g}, {judged(worst, CPU_AIM)} with the smallest network; "
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
        "Input-loss curvature with 20 directions of a ResNet-18 takes "
        f"{cpu['ratio to 21 passes, to the parameters']:.2f} of 21 forward and backward passes to "
        f"the parameters and {cpu['ratio to 21 passes, to the inputs']:.2f} of 21 to the inputs on "
        f"a CPU (aim 1.15; {link('input_curvature_cpu')}); on a GPU {cuda[0]['images']:,} images "
        f"are {told} as fast as one sample at a time (aim 10; {link('input_curvature_cuda')})."
    )


def papers() -> str:
    found = reproductions.tables()
    # A number counts once, also where two recipes or two protocols are about it.
    numbers, known, tables = set(), set(), set()
    for table in found:
        name = table.path.parent / table.recipe.claims
        for claim in table.claims:
            if claim.reported is not None:
                numbers.add((name, *claim.key.values(), claim.column))
        for line in (line for each in table.measured for line in each.lines):
            if line.measured.n and line.reported is not None:
                known.add((name, *line.key.values(), line.column))
                tables.add(name)
    here = (
        f"{len(known)} of them in {len(tables)} tables and figures have been measured here"
        if known
        else "none has been measured here yet"
    )
    return (
        f"{len(found)} recipes cover the tables of the five papers, {len(numbers)} reported "
        f"numbers; "
        f"{here}. Where `measured/` is missing, nothing was measured. The main claims, from a "
        "baseline to the paper's method:\n\n"
        f"{make_headlines.headlines()}\n\n"
        '"As printed" is the recipe as it is: settings of the paper where it prints them, our '
        "reading where it does not. Why numbers differ, as far as we know, stands behind the links."
    )


def decisions() -> str:
    """What the benchmark recommends, and how its tests ended."""
    entries = make_decisions.read_presets()
    tests = [
        test for each in entries.values() for test in (each["compared"], *each["others"].values())
    ]
    won = sum(test is not None and test["verdict"] == "winner" for test in tests)
    missing = sum(test is None for test in tests)
    told = (
        f"A margin method beat the tuned baseline in {won} of {len(tests)} tasks"
        + (f"; {missing} were not measured. " if missing else ". ")
        + "Where none did, the preset is that baseline."
    )
    return f"{told}\n\n{make_decisions.decision_table(entries)}"


PARTS = {
    "decisions": decisions,
    "papers": papers,
    "heads": heads,
    "million": million,
    "small": small,
    "geometry": geometry,
    "training": training,
    "curvature": curvature,
}


def made(text: str) -> str:
    """The README with its made parts as they should be."""
    for name, part in PARTS.items():
        pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, flags=re.DOTALL):
            raise SystemExit(f"README.md has no part <!-- made: {name} --> ... <!-- end -->.")
        said = part()
        text = re.sub(
            pattern,
            lambda found, said=said: f"{found[1]}{said}\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    README.write_text(made(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {README.name}\n")

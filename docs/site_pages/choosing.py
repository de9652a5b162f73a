"""Made parts of the pages that help to choose: caption, presets, and a table of situations."""

import json
from pathlib import Path
from typing import NamedTuple

import make_decisions
from largemargin_papers.benchmark.conclude import WINNER
from largemargin_papers.benchmark.tables import VERDICTS, points

from largemargin.app.training import ObjectiveConfig
from largemargin.app.training.config_file import read_yaml
from largemargin.app.training.objective import parse_objective
from site_pages import reproductions, results


class Advice(NamedTuple):
    """One row.

    Args:
        situation: of the reader.
        losses: names in ``lm.LOSSES``, in the order to try them; what the benchmark recommends
            comes before them.
        why: what the papers claim or the library guarantees.
        tables: recipes that measure it, as folder/name.
        situations: of ``papers/benchmark``, where the same is tested against a tuned softmax.
        links: results that are not recipes: text and page.
        guide: page to read on, with its title.
    """

    situation: str
    losses: tuple[str, ...]
    why: str
    tables: tuple[str, ...]
    situations: str = ""
    links: tuple[tuple[str, str], ...] = ()
    guide: tuple[str, str] | None = None


NUMBERS = Path(__file__).parents[1] / "figures" / "margin.json"


def caption() -> str:
    """What the figure shows, in numbers."""
    plain, wide = json.loads(NUMBERS.read_text(encoding="utf-8")).values()
    return (
        "*In the figure:* one network with two features, trained on five of scikit-learn's digits; "
        f"test accuracy is {plain['accuracy']} % with cross entropy and {wide['accuracy']} % with "
        f"CosFace. The closest two arrows are {plain['class_margin']}° apart with cross entropy "
        f"and {wide['class_margin']}° with CosFace; five arrows allow at most 72°. A tenth of the "
        f"test images has a cosine margin below {plain['lowest_tenth']} with cross entropy, below "
        f"{wide['lowest_tenth']} with CosFace. A small example, made by "
        "`docs/make_margin_figure.py`: it shows what a margin is, not what it is worth."
    )


def rows() -> list[Advice]:
    return [
        Advice(
            "Few labels",
            ("discriminative", "kobayashi", "margin_distribution"),
            "cosine heads with a small scale won here; with 10,000 images no margin method did; "
            "the papers report their largest gains on small training sets",
            ("lmd/table1", "lmd/table3", "kobayashi/table3", "odn/table1"),
            "few_labels",
        ),
        Advice(
            "Long tail",
            ("ldam", "logit_adjustment", "vs_loss", "lm_softmax", "zero_centroid"),
            "rare classes get wider margins, or logits shifted by how frequent a class is, also "
            "beside a margin: `prior=`; combine LM-Softmax with `zero_centroid`; simpler are class "
            "weights by effective number, `weight=lm.functional.balanced_weights(counts)`",
            ("ltlm/table2",),
            "long_tail",
        ),
        Advice(
            "Wrong labels",
            ("kobayashi", "generalized_cross_entropy", "symmetric_cross_entropy"),
            "logits with a small scale probably cannot fit single wrong labels; Kobayashi's loss "
            "gained here with up to 30 % wrong labels, less than reported, and lost with more; the "
            "two cross entropies bound what one label can cost and are the usual baselines; to "
            "find and drop wrong labels train with sub-centers",
            ("kobayashi/table3",),
            "label_noise",
            guide=("how-to/wrong_labels.md", "how to"),
        ),
        Advice(
            "Corrupted inputs",
            ("cross_entropy", "stability", "robust_discriminative"),
            "first train on clean and noisy images, with any loss: no margin method was better "
            "here; the other two losses also compare clean and noisy features",
            ("robust/table1", "robust/table2", "robust/table4"),
            "corruption",
        ),
        Advice(
            "Unknown inputs, overconfidence",
            ("logit_norm",),
            "logits of one length leave the softmax no way to be sure of everything; the paper "
            "reports better OOD detection at equal accuracy",
            (),
            "",
            (
                (
                    "reported by its paper alone; `lm.measure(..., ood=...)` tells it on your data",
                    "how-to/measure.md",
                ),
            ),
            ("how-to/ood.md", "how to"),
        ),
        Advice(
            "Retrieval, faces, persons",
            ("cosface", "arcface", "lm_softmax"),
            "papers report cosine losses on re-identification, where search uses the cosine; on "
            "characters of unseen alphabets they scored below softmax here",
            ("ltlm/table3",),
            "embedding",
        ),
        Advice(
            "A million classes",
            ("cosface", "arcface"),
            'any loss on class statistics works with `impl="chunked"` and with a sharded head',
            (),
            "",
            tuple(_million()),
            ("how-to/million_classes.md", "how to"),
        ),
        Advice(
            "Small, balanced, clean data",
            ("kobayashi", "cosface"),
            "a tuned softmax is hard to beat here: margins get wider, accuracy stays; Kobayashi's "
            "term keeps the head as it is, losses on cosines replace it",
            ("kobayashi/table1", "kobayashi/table4", "ltlm/table1"),
        ),
        Advice(
            "The widest possible margins",
            ("lm_softmax", "sample_margin"),
            "at their minimum the class vectors are packed as well as possible",
            ("ltlm/figure_tammes", "ltlm/table1"),
        ),
        Advice(
            "Discriminative loss at ordinary learning rates",
            ("stable_discriminative",),
            "the published form often diverges or stops learning at learning rates above 0.001",
            (),
            "",
            (
                (
                    "5 epochs of digits, 3 of CIFAR-10: finite in every run, not always better",
                    "how-to/discriminative.md",
                ),
            ),
        ),
    ]


def _million() -> list[tuple[str, str]]:
    """What was measured about large heads, in a few words each."""
    found = []
    chunked = [row for row in results.rows("cpu_heads") if row["provider"] == "CosFace chunked"]
    for row in chunked:
        warned = (
            " (PML's time jumps between two levels, the lower one close to ours)"
            if results.jumps(row)
            else ""
        )
        found.append(
            (
                f"{row['shape']['C']:,} classes on a CPU: {row['ratio']:.2f} of the time of "
                f"{row['baseline']}{warned}, {row['saved_n_x_c_units']:g} × N × C kept",
                "benchmarks.md#cpu-heads",
            )
        )
    files = {
        f for name in ("*million*", "*head*cuda*") for f in results.RESULTS.glob(f"{name}.json")
    }
    for file in sorted(files):
        found.append((file.stem.replace("_", " "), f"benchmarks.md#{file.stem.replace('_', '-')}"))
    return found


def table() -> str:
    """Markdown of the decision table."""
    lines = [
        "| your situation | try | because | measured |",
        "|---|---|---|---|",
    ]
    for advice in rows():
        names = dict.fromkeys((*recommended(advice), *advice.losses))
        tried = ", ".join(f"[`{name}`](losses/{name}.md)" for name in names)
        why = advice.why[0].upper() + advice.why[1:]
        if advice.guide is not None:
            why += f": [{advice.guide[1]}]({advice.guide[0]})"
        lines.append(f"| **{advice.situation}** | {tried} | {why} | {evidence(advice)} |")
    return "\n".join(lines)


def recommended(advice: Advice) -> list[str]:
    """The losses that won the benchmark's situation of the same kind, if one did."""
    entry = make_decisions.read_presets().get(advice.situations)
    if entry is None or entry["status"] != WINNER:
        return []
    chosen = entry["recommended"]
    return [each.name for each in parse_objective(ObjectiveConfig(chosen["objective"]))]


def presets() -> str:
    """What the benchmark recommends, and the words "not measured yet" where it has not run."""
    return make_decisions.recommendations(root="../")


def evidence(advice: Advice) -> str:
    """Links to measured results, or the words "not measured here" with the reported ones."""
    known = {f"{table.paper.folder}/{table.name}": table for table in reproductions.tables()}
    measured, reported = [], []
    for name in advice.tables:
        table = known[name]
        title = table.recipe.title.split(":")[0]
        link = f"[{title}]({table.page}#{table.anchor})"
        if table.measured:
            measured.append(f"{link}: {reproductions.brief(table)}")
        else:
            reported.append(link)
    measured += _against_softmax(advice.situations)
    measured += [f"[{text}]({page})" for text, page in advice.links]
    parts = measured or [f"**{results.NOT_MEASURED}**"]
    if reported:
        parts.append(f"reported in {', '.join(reported)}")
    return "; ".join(parts)


BENCHMARK = Path(__file__).parents[2] / "papers" / "benchmark"


def _against_softmax(preset: str, folder: Path = BENCHMARK) -> list[str]:
    """Concluded tests of the benchmark, in one phrase each."""
    protocol = read_yaml(folder / "protocol.yaml")
    told = []
    for name in protocol["presets"].get(preset, ()):
        file = folder / "measured" / f"{name}.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not found.get("test"):
            continue
        result = VERDICTS[found["verdict"]]
        told.append(
            f"[{found['title']}](benchmark/index.md): `{found['chosen']}` against "
            f"{found['baseline']} {points(found['test'])} points, {result}"
        )
    return told

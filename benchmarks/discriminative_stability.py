"""Why the discriminative loss diverges at ordinary learning rates, and its stable form does not.

Part "curvature": gradient norm and largest curvature of every term, with respect to all parameters
of the network, over the first steps of training. A gradient step shrinks an error along a direction
of curvature k only if k < 2 / lr; the figure draws that line. The curvature is the largest
eigenvalue (in size) of the Jacobian of the term's gradient, by power iteration; products with it
are central differences of two gradients, because the stable form's gradient is by design not the
derivative of one function.

Part "sweep": softmax, printed and stable form on several backbones, feature dimensions and learning
rates: finite or diverged, and at which step; accuracy; feature scale.

    python benchmarks/discriminative_stability.py                        # CPU, digits, minutes
    python benchmarks/discriminative_stability.py --data cifar10.npz --minutes 8   # a GPU

Rows go to benchmarks/results. ``--plot`` makes the figure in docs/figures from the rows of --name,
and the tables in docs/how-to/discriminative.md from all rows there are.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from backbones import Images, build, digits, from_file
from curvature import Probe, shown
from rows import HERE, RESULTS, Row, environment, write
from torch import Tensor

import largemargin as lm

DOCS = HERE.parent / "docs"
FIGURE = DOCS / "figures" / "discriminative_stability.png"
PAGE = DOCS / "how-to" / "discriminative.md"
MARKS = ("<!-- tables: made by --plot -->", "<!-- end of tables -->")
PROBES = (0, 1, 2, 3, 4, 5, 6, 8, 16, 32, 64)
BATCH = 128


def with_softmax(**terms: lm.Loss) -> lm.Objective:
    return lm.Objective(softmax=lm.CrossEntropy(), **terms)


def printed(**settings: Any) -> Callable[[int, int], lm.Objective]:
    return lambda C, D: with_softmax(printed=lm.Discriminative(C, D, **settings))


def stable(**settings: Any) -> Callable[[int, int], lm.Objective]:
    return lambda C, D: with_softmax(stable=lm.StableDiscriminative(C, D, **settings))


FORMS: dict[str, Callable[[int, int], lm.Objective]] = {
    "softmax": lambda C, D: with_softmax(),
    "printed": printed(),
    "stable": stable(),
    # What makes the printed form diverge: one part taken away at a time.
    "printed, margin 1": printed(margin=1.0),
    "printed, no margin": printed(beta=0.0),
    "printed, no compactness": printed(alpha=0.0),
    "printed, not squared": printed(compact_power=1),
    "printed, batch centroids": printed(strategy="none"),
    # What makes the stable form stable: one choice undone at a time.
    "stable, exact gradient": stable(gradient="exact"),
    "stable, constant scale": stable(gradient="detached"),
    "stable, no tail": stable(tail=math.inf),
    "stable, trains classifier": stable(detach_classifier=False),
    "stable, margin 0.4": stable(margin=0.4, radius=0.4 / 12),
    "stable, radius 0.2": stable(radius=0.2),
    "stable, momentum 0.9": stable(momentum=0.9),
    "stable, weights 0.3": stable(alpha=0.3, beta=0.3),
    "stable, weights 3": stable(alpha=3.0, beta=3.0),
}


class Run:
    """One network in training with one form, at one learning rate."""

    def __init__(
        self, images: Images, backbone: str, dim: int, form: str, rate: float, options: Any
    ) -> None:
        torch.manual_seed(options.seed)
        device = images.train.device
        model = build(backbone, dim, images.train.shape[-1])
        self.model = model.to(device, memory_format=torch.channels_last)
        self.criterion = lm.attach(self.model, FORMS[form], warn=False)
        # The scheme of LMD F.1: Nesterov momentum 0.9 and weight decay 5e-4; no clipping.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        self.images, self.bf16 = images, options.bf16
        self.draw = torch.Generator(device).manual_seed(options.seed)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            outputs = self.model(x)
            return self.criterion(outputs, y)

    def batches(self, epochs: float) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images.train)
        left = round(epochs * (count // BATCH))
        while left > 0:
            order = torch.randperm(count, generator=self.draw, device=self.draw.device)
            for index in order.split(BATCH)[: min(left, count // BATCH)]:
                yield self.images.train[index], self.images.train_labels[index]
            left -= count // BATCH

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test(self) -> Row:
        """Accuracy and the root mean square of the feature norms on the test images."""
        self.model.eval()
        right, squares = torch.zeros((), device=self.draw.device), torch.zeros(())
        for x, y in zip(
            self.images.test.split(1000), self.images.test_labels.split(1000), strict=True
        ):
            outputs = self.model(x)
            right += (outputs.argmax(1) == y).sum()
            squares = squares + self.criterion.read(outputs).features.double().square().sum().cpu()
        self.model.train()
        count = len(self.images.test)
        return {
            "test_accuracy": round(100 * float(right) / count, 2),
            "feature_norm": shown(math.sqrt(float(squares) / count)),
        }


def sweep_run(run: Run, epochs: float) -> Row:
    """Train; a run has diverged at the first step whose loss is not a finite number."""
    start, losses = time.perf_counter(), []
    for x, y in run.batches(epochs):
        losses.append(run.step(x, y))
        if len(losses) % 25 == 0 and not bool(torch.isfinite(losses[-1])):
            break
    values = torch.stack(losses).float().cpu()
    bad = (~torch.isfinite(values)).nonzero()
    row: Row = {"steps": len(losses), "diverged_at": int(bad[0]) if len(bad) else None}
    row["train_loss"] = shown(float(values[-20:].mean()))
    if not len(bad):
        row |= run.test()
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def curvature_rows(run: Run, iterations: int, labels: Row, last: int) -> list[Row]:
    """One row per probed step and term."""
    rows: list[Row] = []
    images = run.images
    probe = Probe(run.model, run.criterion, images.train[:64], images.train_labels[:64], iterations)
    forever = run.batches(1e9)
    for step in range(last + 1):
        if step in PROBES:
            for term, found in probe().items():
                rows.append({**labels, "step": step, "term": term, **found})
        loss = run.step(*next(forever))
        if not bool(torch.isfinite(loss)):
            rows.append({**labels, "step": step, "term": "diverged"})
            break
    return rows


def draw(rows: list[Row], path: Path) -> None:
    """One row of panels per form, one column per learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    rows = [row for row in rows if row["part"] == "curvature"]
    forms = [f for f in ("printed", "stable") if any(r["form"] == f for r in rows)]
    rates = sorted({row["learning_rate"] for row in rows})
    colors = {"softmax": "#4477aa", "compact": "#ee6677", "margin": "#228833", "reg": "#aaaaaa"}
    figure, grid = plt.subplots(
        len(forms),
        len(rates),
        figsize=(3.2 * len(rates), 2.6 * len(forms) + 0.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for (i, form), (j, rate) in product(enumerate(forms), enumerate(rates)):
        axis: Any = grid[i][j]
        here = [r for r in rows if r["form"] == form and r["learning_rate"] == rate]
        for term, color in colors.items():
            for quantity, style in (("curvature", "o-"), ("gradient_norm", ":")):
                line = [r for r in here if r["term"] == term and r[quantity]]
                axis.plot(
                    [r["step"] + 1 for r in line],
                    [abs(r[quantity]) for r in line],
                    style,
                    color=color,
                    markersize=3,
                )
        axis.axhline(2 / rate, color="black", lw=0.8)
        axis.text(1, 2.3 / rate, "2 / lr", fontsize=8)
        gone = [r["step"] for r in here if r["term"] == "diverged"]
        end = f"diverged at step {gone[0] + 1}" if gone else "finite"
        axis.set_title(f"{form}, lr {rate:g}: {end}", fontsize=9)
        axis.set(xscale="log", yscale="log", ylim=(1e-2, 1e5))
        axis.tick_params(labelsize=8)
    for axis in grid[-1]:
        axis.set_xlabel("training step", fontsize=8)
    handles = [Line2D([], [], color=color, label=term) for term, color in colors.items()]
    handles.append(Line2D([], [], color="black", marker="o", ms=3, label="largest curvature"))
    handles.append(Line2D([], [], color="black", ls=":", label="gradient norm"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def tables() -> str:
    """Test accuracy of softmax / printed / stable by backbone and learning rate, as Markdown."""
    made = []
    for path in sorted(RESULTS.glob("discriminative_stability*.json")):
        rows = [row for row in json.loads(path.read_text()) if row["part"] == "sweep"]
        if not rows:
            continue
        rates = sorted({row["learning_rate"] for row in rows})
        cells = {
            (r["backbone"], r["dim"], r["learning_rate"], r["form"]): (
                "diverged" if r["diverged_at"] is not None else f"{r['test_accuracy']:.1f}"
            )
            for r in rows
        }
        first = rows[0]
        made += [
            f"{first['data']}, {first['epochs']:g} epochs, seed {first['seed']}, "
            f"{first['device']}, torch {first['versions']['torch']} "
            f"(`{copyable(first['command'])}`):",
            "",
            "| backbone, dim | " + " | ".join(f"lr {rate:g}" for rate in rates) + " |",
            "|---" * (len(rates) + 1) + "|",
        ]
        for backbone, dim in dict.fromkeys((row["backbone"], row["dim"]) for row in rows):
            found = [
                " / ".join(
                    cells.get((backbone, dim, rate, form), "–")
                    for form in ("softmax", "printed", "stable")
                )
                for rate in rates
            ]
            made.append(f"| {backbone}, {dim} | " + " | ".join(found) + " |")
        made.append("")
    return "\n".join(made)


def copyable(command: str) -> str:
    """A recorded command as it can be typed: names with spaces quoted, data from this folder."""
    for form in sorted((form for form in FORMS if " " in form), key=len, reverse=True):
        command = re.sub(rf"(?<!['\w]){re.escape(form)}(?!['\w])", f"'{form}'", command)
    return re.sub(r"(--data )\S*/", r"\1", command)


def with_tables(text: str) -> str:
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{tables()}{MARKS[1]}{after}"


def sweep_settings(options: Any) -> list[tuple[str, int, str, float]]:
    """Every combination, cheap answers first: if time runs out, whole backbones are left out."""
    return [
        (backbone, dim, form, rate)
        for backbone in options.backbones
        for dim in options.dims
        for rate in options.rates
        for form in options.forms
    ]


def parse() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["curvature", "sweep"])
    parser.add_argument("--data", type=Path, help=".npz with train_x, train_y, test_x, test_y")
    parser.add_argument("--train_size", type=int, default=10_000)
    parser.add_argument("--backbones", nargs="+")
    parser.add_argument("--dims", nargs="+", type=int, default=[30, 512])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.001, 0.01, 0.03, 0.1])
    parser.add_argument("--forms", nargs="+", default=["softmax", "printed", "stable"])
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--probe_rates", nargs="+", type=float, default=[0.001, 0.01, 0.1])
    parser.add_argument("--probe_backbone", help="default: the first of --backbones")
    parser.add_argument("--iterations", type=int, help="of the power iteration")
    parser.add_argument("--steps", type=int, default=64, help="last step probed")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no run after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast in the sweep")
    parser.add_argument("--name", help="of the results; default by the data")
    parser.add_argument("--plot", action="store_true", help="figure and tables, no run")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = options.device == "cuda"
    usual = ["resnet18", "plain", "vit", "mobilenet"]
    options.backbones = options.backbones or (
        usual if gpu else ["convnet", "plain", "vit", "small_resnet"]
    )
    options.iterations = options.iterations or (6 if gpu else 4)
    options.name = options.name or (
        "discriminative_stability" + (f"_{options.data.stem}" if options.data else "")
    )
    return options


def main() -> None:
    options = parse()
    if options.plot:
        draw(json.loads((RESULTS / f"{options.name}.json").read_text()), FIGURE)
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    start = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    common = environment(threads=torch.get_num_threads()) | {"device": options.device}
    if options.device == "cuda":
        common["device"] = torch.cuda.get_device_name()
    images = (
        from_file(options.data, options.train_size, options.device)
        if options.data
        else digits(options.device)
    )
    common["data"] = options.data.stem if options.data else "digits"
    rows: list[Row] = []

    def late() -> bool:
        return time.perf_counter() - start > 60 * options.minutes

    if "curvature" in options.parts:
        bf16, options.bf16 = options.bf16, False
        backbone, dim = options.probe_backbone or options.backbones[0], options.dims[0]
        for rate in options.probe_rates:
            for form in ("printed", "stable"):
                if late():
                    break
                run = Run(images, backbone, dim, form, rate, options)
                labels = {"benchmark": "discriminative_stability", "part": "curvature"} | {
                    "backbone": backbone, "dim": dim, "form": form, "learning_rate": rate,
                }  # fmt: skip
                found = curvature_rows(run, options.iterations, labels, options.steps)
                rows += found
                write(options.name, rows, common)
                print(f"curvature {backbone} lr {rate:g} {form:<8} {summary(found)}", flush=True)
        options.bf16 = bf16
        if find_spec("matplotlib"):
            draw(rows, FIGURE)
        else:
            print("no matplotlib here: draw the figure elsewhere with --plot", flush=True)
    if "sweep" in options.parts:
        # Faster convolutions where nothing is differentiated numerically.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        for backbone, dim, form, rate in sweep_settings(options):
            if late():
                print(f"stopped before {backbone} {dim} {form} {rate}: out of time", flush=True)
                break
            row = {"benchmark": "discriminative_stability", "part": "sweep"} | {
                "backbone": backbone, "dim": dim, "form": form, "learning_rate": rate,
                "seed": options.seed, "epochs": options.epochs,
            }  # fmt: skip
            row |= sweep_run(Run(images, backbone, dim, form, rate, options), options.epochs)
            rows.append(row)
            write(options.name, rows, common)
            gone = row["diverged_at"]
            end = f"diverged at step {gone}" if gone is not None else (
                f"accuracy {row['test_accuracy']:6.2f}  feature norm {row['feature_norm']}"
            )  # fmt: skip
            print(f"{backbone:<9} {dim:>4} lr {rate:<6g} {form:<26} {end}", flush=True)
    print(f"rows in {write(options.name, rows, common)}")


def summary(rows: list[Row]) -> str:
    """Largest curvature of the whole loss, and whether it diverged."""
    sizes = [abs(r["curvature"]) for r in rows if r["term"] == "total" and r["curvature"]]
    gone = [r["step"] for r in rows if r["term"] == "diverged"]
    end = f"diverged at step {gone[0]}" if gone else "finite"
    return f"largest curvature {max(sizes, default=math.nan):10.1f}  {end}"


if __name__ == "__main__":
    main()

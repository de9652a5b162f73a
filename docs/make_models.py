"""Writes docs/models.md: which architectures attach was tried with, and what held of each.

Run ``python docs/make_models.py``; a test fails when the committed page is out of date. Its numbers
are docs/models.json, which ``--take NAME ...`` makes anew (no name: all, half an hour on a CPU) by
the trials of tests/dropin/model_zoo.py.
"""

import datetime
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "docs" / "models.json"
LOSSES = {
    "cosine": "`CosFace`",
    "logits": "`CrossEntropy`",
    "centroids": "`CrossEntropy + Discriminative`",
}


def take(names: list[str]) -> dict[str, Any]:
    """Results by architecture and loss; those of others stay."""
    sys.path.insert(0, str(ROOT / "tests"))
    from dropin import model_zoo

    found: dict[str, Any] = read() if RESULTS.exists() else {"models": {}}
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    found["versions"] = {
        each: version(each) for each in ("torch", "torchvision", "timm", "transformers")
    }
    found["checks"] = model_zoo.CHECKS
    every = model_zoo.zoo()
    kept = {name: found["models"].get(name) for name in every}
    for name in names or every:
        example = every[name]
        rows: dict[str, Any] = {"layer": example.layer}
        for loss in LOSSES:
            try:
                rows[loss] = model_zoo.examine(example, loss)
            except Exception as error:  # a failure is a result, too
                rows[loss] = {"error": f"{type(error).__name__}: {error}"[:300]}
        kept[name] = rows
        found["models"] = {each: row for each, row in kept.items() if row is not None}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def read() -> Any:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def cell(row: dict[str, Any], checks: dict[str, str]) -> str:
    """What held of a model with a loss, in a word; what did not, by name."""
    if "refused" in row:
        return "refused" if row["refused"] else "**not refused**"
    if "error" in row:
        return f"**{row['error'].partition(':')[0]}**"
    failed = [name for name in checks if row.get(name) is False]
    said = [f"{name}: {row[name]}" for name in checks if isinstance(row.get(name), str)]
    held = len(checks) - len(failed) - len(said)
    return "; ".join([f"{held} of {len(checks)}", *(f"**no {name}**" for name in failed), *said])


def held(row: dict[str, Any]) -> bool:
    return all(
        row[loss].get("refused") or not any(each is False for each in row[loss].values())
        for loss in LOSSES
        if "error" not in row[loss]
    ) and not any("error" in row[loss] for loss in LOSSES)


def page(results: dict[str, Any]) -> str:
    models, checks = results["models"], results["checks"]
    refused = [name for name, row in models.items() if "refused" in row["cosine"]]
    good = sum(map(held, models.values())) - len(refused)
    used = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# Models that attach was tried with",
        "",
        "Every classification family of torchvision, and architectures of timm and transformers,",
        "small ones with random weights, through `attach` with a loss on cosines, one on logits",
        "and one on centroids. (This page is made by `docs/make_models.py` from recorded results;",
        f"do not edit it by hand. {results['date']}, {used}.)",
        "",
        f"Of {len(models)} architectures all that applies held for {good}; {len(refused)} have no",
        "linear layer, and attach says so. What was looked at:",
        "",
        *(f"- {name}: {text}." for name, text in checks.items()),
        "",
        "Images, words or sounds are random, 10 of them, so that the numbers say nothing about the",
        "accuracy of any of these models. `layer` is what attach had to be told, where there are",
        "several heads.",
        "",
        f"| model | layer | {' | '.join(LOSSES.values())} |",
        f"|---|---|{'---|' * len(LOSSES)}",
    ]
    for name, row in models.items():
        layer = f"`{row['layer']}`" if row["layer"] else ""
        cells = " | ".join(cell(row[loss], checks) for loss in LOSSES)
        lines.append(f"| {name} | {layer} | {cells} |")
    errors = {
        f"{name}, {LOSSES[loss]}": row[loss]["error"]
        for name, row in models.items()
        for loss in LOSSES
        if "error" in row[loss]
    }
    if errors:
        lines += ["", "Errors:", "", *(f"- {name}: {text}" for name, text in errors.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--take" in sys.argv[1:]:
        take(sys.argv[sys.argv.index("--take") + 1 :])
    PAGE.write_text(page(read()), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")

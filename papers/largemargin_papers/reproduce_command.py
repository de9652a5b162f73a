"""``largemargin reproduce``: a table of a paper, run again and held against what was reported."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse

from largemargin.app.cli.run_options import show_progress
from largemargin.exceptions import LargeMarginError

if TYPE_CHECKING:
    from largemargin_papers.recipes.table import Table

HELP = "run a paper's table again: reported, measured, verdict"

DESCRIPTION = """\
Run a table of a paper again. A recipe (papers/KEY/tableN.yaml) says which runs make the table; what
is missing is trained, what was interrupted is continued, and every reported number is printed
beside the measured one with a verdict by a rule that was fixed beforehand. Numbers go to measured/
beside the recipe."""

EXAMPLES = """\
Examples:
  largemargin reproduce papers/lmd/table3.yaml --list            what would be run, and on what data
  largemargin reproduce papers/lmd/table3.yaml --path cifar10=~/cifar --only "CIFAR10, *"
  largemargin reproduce papers/lmd/table3.yaml --only train_percent=20 --seeds 0,1,2
  largemargin reproduce papers/lmd/table3.yaml --epochs_fraction 0.05 --seeds 3
  largemargin reproduce papers/lmd/table3.yaml --set batch_size=512 optimizer.lr=0.004
  largemargin reproduce papers/lmd/table3.yaml --no_train        what was measured, by anyone
  largemargin reproduce papers/lmd/table3.yaml --no_train --set precision=bf16

--only takes columns of the table (dataset=CIFAR10,train_percent=20) or patterns (* is anything) of
the names that --list shows. With fewer epochs or other settings than the paper's no number counts
as reproduced; only the direction is judged. --list shows what the other options make of the table.

Runs with other settings are another protocol and a table of their own. --no_train shows all that
measured/ holds; with --set or --epochs_fraction it shows that one."""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.usage = "largemargin reproduce RECIPE [options]"
    parser.add_argument("recipe", type=str, help="YAML file, as papers/lmd/table3.yaml")
    parser.add_argument(
        "--epochs_fraction", type=float, default=1.0, help="share of the paper's epochs"
    )
    parser.add_argument(
        "--seeds",
        type=str,
        default=None,
        metavar="N | A,B,...",
        help="runs per cell, or their seeds; default the recipe's",
    )
    parser.add_argument(
        "--only", type=str, nargs="+", default=[], metavar="CELL", help="cells to run; default all"
    )
    parser.add_argument(
        "--path",
        type=str,
        nargs="+",
        action="extend",
        default=[],
        metavar="DATA=PATH",
        help="where a data set lies; a .npz or .safetensors file stands for it",
    )
    parser.add_argument(
        "--set",
        type=str,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="settings of all runs that differ from the paper's",
    )
    parser.add_argument(
        "--reading",
        type=str,
        default="",
        help='of the table, where the recipe has others than the printed one, as "authors\' code"',
    )
    parser.add_argument("--folder", type=str, default="runs/reproduce", help="of the runs")
    parser.add_argument(
        "--side_by_side", type=int, default=1, help="runs that share a GPU at a time"
    )
    parser.add_argument(
        "--list", action="store_true", help="say what would be run and on what data, and exit"
    )
    parser.add_argument(
        "--no_train",
        action="store_true",
        help="only show and measure what is there already, of every protocol",
    )


def run(options: Any) -> int:
    from largemargin.app.training.engine import Interrupted
    from largemargin_papers.recipes.reproduce import reproduce

    path, overrides = Path(options.recipe), settings_in(options.set)
    asked: dict[str, Any] = {
        "epochs_fraction": options.epochs_fraction,
        "seeds": seeds_in(options.seeds),
        "overrides": overrides,
        "reading": options.reading,
        "only": options.only,
    }
    if options.list:
        print(listing(path, **asked))
        return 0
    try:
        table = reproduce(
            path,
            **asked,
            folder=options.folder,
            paths=dict(map(pair, options.path)),
            train_missing=not options.no_train,
            side_by_side=options.side_by_side,
            progress=show_progress(),
        )
    except (KeyboardInterrupt, Interrupted):
        raise KeyboardInterrupt("the same command again") from None
    plain = not (overrides or options.reading)
    every = options.no_train and plain and options.epochs_fraction == 1
    tables = [table, *_others(path, table)] if every else [table]
    if len(tables) > 1 and not any(line.measured.n for line in table.lines):
        del tables[0]  # nothing was measured as the paper prints it
    print("\n\n".join(map(str, tables)))
    if not every and (others := [each.protocol for each in _others(path, table)]):
        print(f"Measured with other settings (--no_train alone shows them): {'; '.join(others)}.")
    return 1 if any(each.failures for each in tables) else 0


def _others(path: Path, table: "Table") -> "list[Table]":
    """What ``measured/`` holds of other protocols than this table's."""
    from largemargin_papers.recipes.pages import measured_tables
    from largemargin_papers.recipes.table_rows import AS_PRINTED

    others = [each for each in measured_tables(path) if each.protocol != table.protocol]
    return sorted(others, key=lambda each: not each.protocol.startswith(AS_PRINTED))


def listing(
    path: Path,
    *,
    epochs_fraction: float = 1.0,
    seeds: int | tuple[int, ...] | None = None,
    overrides: dict[str, Any] | None = None,
    reading: str = "",
    only: Sequence[str] = (),
) -> str:
    """The cells of a recipe that would be run, what they need and what they assume."""
    from largemargin_papers.recipes.cells import chosen_of
    from largemargin_papers.recipes.claims import read_claims
    from largemargin_papers.recipes.reproduce import prepared
    from largemargin_papers.recipes.schema import read_recipe
    from largemargin_papers.recipes.table_rows import protocol_of

    recipe = read_recipe(path, reading)
    cells = prepared(path, recipe, epochs_fraction, seeds, overrides)
    claims = read_claims(recipe, path.parent / recipe.claims, cells)
    trained = [each for each in chosen_of(cells, only) if each.train]
    protocol = protocol_of(epochs_fraction, overrides or {}, reading)
    runs = sum(len(each.seeds) for each in trained)
    lines = [recipe.title, f"Protocol: {protocol}.", "", f"{len(trained)} cells, {runs} runs:"]
    lines += [
        f"  {each.name}    {each.config.model.name}, {each.config.objective.name}, "
        f"{each.config.epochs} epochs"
        for each in trained
    ]
    left_out = {
        f"  {', '.join(value for value in each.key.values() if value)}: {each.reason}": None
        for each in claims
        if each.cell is None
    }
    lines += ["", "Left out:", *left_out] if left_out else []
    lines += ["", "Data:", *(f"  {line}" for line in recipe.data_needed.strip().splitlines())]
    lines += ["", "What the paper leaves open, and how it is read:"]
    lines += [f"  - {' '.join(each.split())}" for each in recipe.readings]
    for name in recipe.variants:
        lines += ["", f"Another reading, --reading {name!r}:"]
        lines += [f"  - {' '.join(each.split())}" for each in recipe.variant(name).differs]
    return "\n".join(lines)


def pair(text: str) -> tuple[str, str]:
    """``name=value``."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise LargeMarginError(f"NAME=VALUE is expected, but {text!r} was given.")
    return name, value


def seeds_in(text: str | None) -> int | tuple[int, ...] | None:
    """``"3"`` is how many, ``"0,1,2"`` are which."""
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise LargeMarginError(
            f"--seeds must be a number or a list as 0,1,2, but {text!r} was given."
        ) from None
    return numbers if "," in text else numbers[0]


def settings_in(words: list[str]) -> dict[str, Any]:
    """``["epochs=3"]`` as ``{"epochs": 3}``; values are read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for name, value in map(pair, words):
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise LargeMarginError(f"cannot read the value of {name}: {value!r}.") from error
    return found

"""``largemargin list``: the losses, networks and data sets there are."""

import json
import sys
import textwrap
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

import jsonargparse

from largemargin.errors import LargeMarginError

HELP = "show the losses with equation, paper and defaults; networks; data sets"

DESCRIPTION = """\
Show what there is to choose from. Without arguments: every loss in one line. With the name of a
loss: its equation, paper and settings."""

EXAMPLES = """\
Examples:
  largemargin list                    all losses, one line each
  largemargin list cosface kobayashi  two of them in full
  largemargin list --all              all of them in full
  largemargin list --models           networks
  largemargin list --data             data sets
  largemargin list cosface --json     the same for programs"""

WIDTH = 100


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.usage = "largemargin list [NAME ...] [options]"
    parser.add_argument("names", nargs="*", type=str, metavar="NAME", help="losses to show in full")
    parser.add_argument("--all", action="store_true", help="show every loss in full")
    parser.add_argument("--models", action="store_true", help="show the networks")
    parser.add_argument("--data", action="store_true", help="show the data sets")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Any) -> int:
    if options.models and options.data:
        raise LargeMarginError("--models and --data are two lists. Ask for one at a time.")
    if (options.models or options.data) and options.names:
        raise LargeMarginError(
            f"{options.names[0]!r} is looked up among the losses, but --models or --data was given "
            "too. Leave one of them out."
        )
    if options.models or options.data:
        described = _models() if options.models else _data()
        print(json.dumps(described, indent=1) if options.json else _two_columns(described))
        return 0
    _print_losses(options.names, in_full=options.all or bool(options.names), as_json=options.json)
    return 0


def _print_losses(names: list[str], *, in_full: bool, as_json: bool) -> None:
    import largemargin as lm
    from largemargin.cli.catalogue import PAPERS, describe

    for name in names:
        if name not in lm.LOSSES:
            close = get_close_matches(name, lm.LOSSES, n=3, cutoff=0.4)
            meant = f"Closest: {', '.join(close)}." if close else "largemargin list shows them all."
            raise LargeMarginError(f"there is no loss {name!r}. {meant}")
    entries = [describe(name) for name in names or lm.LOSSES]
    if as_json:
        print(json.dumps([{"loss": entry.name, **asdict(entry)} for entry in entries], indent=1))
    elif in_full:
        print("\n\n".join(_in_full(entry) for entry in entries))
    else:
        print(_two_columns({entry.name: entry.what for entry in entries}))
        used = [key for key in PAPERS if any(key in entry.paper for entry in entries)]
        print("\nPapers:\n" + _two_columns({key: PAPERS[key] for key in used}))
        print(
            "\nIn full: largemargin list NAME. Train with one: largemargin train --objective NAME, "
            "or with a sum:\n--objective 'cross_entropy + 0.5*sample_margin'."
        )


def _in_full(entry: Any) -> str:
    from largemargin.cli.catalogue import PAPERS

    lines = [f"{entry.name}  (lm.{entry.module}, {entry.kind})", *_wrapped(entry.what)]
    for equation in entry.equations:
        lines += ["", *_wrapped(equation, indent=6)]
    if entry.paper:
        papers = "; ".join(f"{key}: {PAPERS[key]}" for key in entry.paper.split(", "))
        lines += ["", *_wrapped(f"paper: {papers}")]
    if entry.settings:
        lines += ["", "  settings, with their defaults:"]
        for name, default in entry.settings.items():
            meaning = entry.helps.get(name, "")
            lines += _wrapped(f"{name} = {default!r}" + (f"  {meaning}" if meaning else ""), 4, 8)
    return "\n".join(lines)


def _models() -> dict[str, str]:
    from largemargin.models import list_models

    return {
        **list_models(),
        "torchvision/NAME": "any classification network of torchvision, as torchvision/resnet50",
        "timm/NAME": "any network of timm, as timm/convnext_tiny",
    }


def _data() -> dict[str, str]:
    """What the file of each source says about it, and its terms of use."""
    from largemargin.data.sources import SOURCES

    described = {}
    for name, read in SOURCES.items():
        module = sys.modules[read.__module__]
        known = getattr(module, "KNOWN", {}).get(name)
        if known is None:
            text = (module.__doc__ or "").split("\n\n")[0].replace("``", "")
            licence = getattr(module, "LICENCES", {}).get(name)
        else:
            text = f"{known.title}, {known.page}. In --data.path: {known.place}."
            licence = known.licence
        described[name] = " ".join(text.split()) + (f" Licence: {licence}." if licence else "")
    return described


def _two_columns(rows: dict[str, str]) -> str:
    width = max(map(len, rows)) + 2
    return "\n".join(
        textwrap.fill(
            f"{name:<{width}}{text}", WIDTH, subsequent_indent=" " * width, break_long_words=False
        )
        for name, text in rows.items()
    )


def _wrapped(text: str, indent: int = 2, hanging: int | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2 if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )

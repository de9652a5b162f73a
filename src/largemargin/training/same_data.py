"""Is the data still what a run began with? By the classes and digests of its data.json."""

from pathlib import Path
from typing import Any

from largemargin.data import Data, DataConfig, load_data
from largemargin.errors import LargeMarginError

NAMED = 5
"""Classes that a message names; of more it says how many."""


def load_again(folder: Path, config: DataConfig) -> Data:
    """The data of the run in ``folder``; where it was moved, an error says where to write that."""
    path = config.path
    if path is not None and not config.download and not Path(path).expanduser().exists():
        seen = "" if Path(path).expanduser().is_absolute() else f", seen from {Path.cwd()}"
        raise LargeMarginError(
            f"the data of {folder} is not at {path}{seen}. If it was moved, write its new place "
            f"into {folder / 'config.yaml'}, as data.path: there the run finds its images again."
        )
    return load_data(config)


def check_same_data(folder: Path, facts: dict[str, Any], data: Data, *, instead: str) -> None:
    """Refuse other images: in silence they would give another result.

    A folder to which a file was added is split anew, so that images the model was trained on turn
    up among those held out; one without a class numbers the others anew.

    Args:
        folder: of the run.
        facts: what its data.json says.
        data: as it is now.
        instead: what else can be done than to put the old images back.
    """
    changed = _classes(facts, data) or _splits(facts.get("record") or {}, data.record)
    if changed:
        raise LargeMarginError(
            f"the data is not what {folder} began with: {changed}. Put the old images back, or "
            f"{instead}."
        )


def _classes(facts: dict[str, Any], data: Data) -> str:
    before = [str(name) for name in (facts.get("record") or {}).get("classes", facts["classes"])]
    now = list(data.classes)
    if before == now:
        return ""
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    said = [
        *([f"it has no {_listed(gone)} any more"] if gone else []),
        *([f"it has {_listed(new)}, which the run does not know"] if new else []),
    ]
    return " and ".join(said) or "its classes are in another order"


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"class {names[0]}"
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"classes {', '.join(names[:NAMED])}{rest}"


def _splits(before: dict[str, Any], now: dict[str, Any]) -> str:
    digests, found = before.get("digests", {}), now.get("digests", {})
    changed = [name for name in digests if digests[name] != found.get(name)]
    counts, sizes = before.get("images", {}), now.get("images", {})
    said = [_change(name, counts.get(name), sizes.get(name)) for name in changed]
    return f"{', '.join(said)} now" if said else ""


def _change(name: str, before: int | None, now: int | None) -> str:
    if now is None:
        return f"there are no {name} images"
    if before is None or before == now:
        return f"{name} has other images or labels"
    return f"{name} has other images ({now:,} instead of {before:,})"

"""Numbers that are fitted to the validation images of a run, and kept in its folder."""

import hashlib
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from largemargin.app.cli.open_run import OpenRun
from largemargin.app.cli.run_options import show_progress
from largemargin.app.data.samples import Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring.records import Record
from largemargin.measuring.temperature import Temperature, calibrate_temperature

Kept = TypeVar("Kept", bound=Record)


class CalibrationCache:
    """Fits on first use; what was fitted before is read from the run's folder.

    A run that was taken to another machine without its data predicts there as it did here.

    Args:
        opened: the run and its model.
        say: print what was fitted.
    """

    def __init__(self, opened: OpenRun, *, say: bool = True) -> None:
        self.opened, self.say = opened, say

    def get(
        self, kind: type[Kept], name: str, fit: Callable[[Samples], Kept], *, detail: str = ""
    ) -> Kept:
        """The number called ``name``, as its option is.

        Raises:
            LargeMarginError: where the run has no validation images, or they do not allow it.
        """
        kept = self.kept(kind, name, detail=detail)
        if kept is not None:
            return kept
        found = fit(self._validation(name))
        try:
            found.save(self._path(name, detail))
        except OSError as error:  # a run that others may only read predicts all the same
            print(f"The {name} is not kept: {error.strerror}.", file=sys.stderr)
        if self.say:
            print(found, file=sys.stderr)
        return found

    def kept(self, kind: type[Kept], name: str, *, detail: str = "") -> Kept | None:
        """What was fitted before; None where nothing was."""
        path = self._path(name, detail)
        return kind.load(path) if path.is_file() else None

    def _path(self, name: str, detail: str) -> Path:
        return self.opened.run.folder / f"{name}{detail}-{self._weights}.json"

    @cached_property
    def _weights(self) -> str:
        """Of these weights, and no others: a run may have been continued since."""
        digest = hashlib.blake2b(digest_size=6)
        for tensor in self.opened.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def images(self) -> Samples | None:
        return self.opened.run.data().validation

    def _validation(self, name: str) -> Samples:
        try:
            found = self.images
        except LargeMarginError as error:
            raise LargeMarginError(
                f"the {name} is calibrated on the validation images of the run, which cannot be "
                f"read: {error} Or pass --{name} none, or a number."
            ) from None
        if found is None or len(found) == 0:
            raise LargeMarginError(
                f"the {name} is calibrated on validation images, but this run held none out "
                f"(data.validation). Pass --{name} none, or a number. Training images will not do: "
                "the model knows them too well."
            )
        return found


def number_or(option: str, given: str) -> float | str:
    """An option that is a number, or "none" or "auto"."""
    if given in ("none", "auto"):
        return given
    try:
        return float(given)
    except ValueError:
        raise LargeMarginError(
            f"--{option} must be a number, none or auto, but {given!r} was given."
        ) from None


def cached_temperature(cache: CalibrationCache) -> Temperature:
    """The temperature of the run's model, by its validation images."""
    opened = cache.opened

    def fit(validation: Samples) -> Temperature:
        return calibrate_temperature(
            opened.model, validation, device=opened.device, progress=show_progress()
        )

    return cache.get(Temperature, "temperature", fit)


def temperature_for(option: str, cache: CalibrationCache) -> Temperature | float | None:
    """What --temperature asks for; None where "auto" cannot be fitted, which is said."""
    given = number_or("temperature", option)
    if isinstance(given, float) or given == "none":
        return given if isinstance(given, float) else None
    try:
        return cached_temperature(cache)
    except LargeMarginError as error:
        print(f"Probabilities are those of the logits as they are: {error}", file=sys.stderr)
        return None

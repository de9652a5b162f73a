"""``Origin``: which images of a run an evaluation is of, and which of its models."""

import re
from dataclasses import dataclass
from pathlib import Path

from largemargin.measuring.records import Record

OF_PEOPLE = ("folder", "csv", "arrays")
"""Data that is told apart by where it lies: people's own."""


@dataclass(frozen=True)
class Origin(Record):
    """What ``largemargin evaluate`` looked at."""

    split: str
    """test, validation or train."""
    data: str
    """Name of the data set."""
    path: str | None
    """Where it lies."""
    own: bool
    """The data of the run, not other data that was given."""
    which: str
    """Model of the run: best or last."""
    usual: bool
    """What is taken where nothing is asked for: only then it is the result of the run."""

    def __str__(self) -> str:
        place = "" if self.path is None else f" {self.path}"
        whose = "of the run" if self.own else f"of {self.data}{place}"
        return f"{self.split} images {whose}, {self.which} model"

    @property
    def file_name(self) -> str:
        """In the folder of the run, where ``evaluation.json`` is its result.

        Example:
            >>> Origin("train", "folder", "my photos/", False, "last", False).file_name
            'evaluation-my_photos-train-last.json'
        """
        if self.usual:
            return "evaluation.json"
        name = Path(self.path).stem if self.data in OF_PEOPLE and self.path else ""
        parts = [] if self.own else [re.sub(r"[^\w-]+", "_", name or self.data)]
        last = [] if self.which == "best" else [self.which]
        return "-".join(["evaluation", *parts, self.split, *last]) + ".json"

"""Lets mkdocstrings read this library's docstrings: see ``docstrings.py``."""

from typing import Any

import griffe

from site_pages import api
from site_pages.docstrings import to_markdown


class Docstrings(griffe.Extension):
    """Every docstring as Markdown, when its object is found."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, api.links())

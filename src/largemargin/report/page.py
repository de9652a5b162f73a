"""The page: one HTML file with everything in it.

Jinja2 escapes every text. Scripts are allowed by their hash alone and nothing may be fetched (a
Content-Security-Policy says so to the browser), so that a class name that looks like HTML can do no
harm even if it got through.
"""

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from largemargin import __version__
from largemargin.errors import MissingPackage
from largemargin.report.chart_numbers import with_numbers
from largemargin.report.charts import Section
from largemargin.report.palette import (
    DARK,
    LIGHT,
    NEUTRAL_DARK,
    NEUTRAL_LIGHT,
    SYMBOLS,
)
from largemargin.report.plotly_form import figure
from largemargin.report.subjects import Subjects

TEMPLATES = Path(__file__).with_name("templates")
NEEDED = "a report needs {name}. Install it: pip install 'largemargin[report]'"


def render(subjects: Subjects, sections: Sequence[Section], title: str) -> str:
    """The whole page as text."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackage(NEEDED.format(name=error.name)) from error
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["slug"] = slug
    sections = [with_numbers(section) for section in sections]
    plotly, script = _inline(get_plotlyjs()), _inline(_read("script.js"))
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        sections=sections,
        subjects=subjects,
        style=Markup(_style()),
        plotly=Markup(plotly),
        script=Markup(script),
        policy=_policy(plotly, script),
        payload=_payload(subjects, sections),
        symbols="●■◆▲✚✖★▼",
    )


def slug(text: str) -> str:
    """A name as an id of the page: letters, digits and dashes, different for different names."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain == text:
        return plain
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:6]
    return f"{plain[:40]}-{digest}"


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script that cannot end its own element."""
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE)


def _style() -> str:
    def colors(palette: Sequence[str], neutral: str) -> str:
        named = "".join(f"--c{at}:{color};" for at, color in enumerate(palette))
        return f"{named}--neutral:{neutral};"

    light, dark = colors(LIGHT, NEUTRAL_LIGHT), colors(DARK, NEUTRAL_DARK)
    return _read("style.css").replace("/*light*/", light).replace("/*dark*/", dark)


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
        for each in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def strict(value: Any) -> Any:
    """NaN and infinity are no JSON: one of them and a browser reads nothing of the whole page."""
    if isinstance(value, dict):
        return {key: strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _payload(subjects: Subjects, sections: Sequence[Section]) -> dict[str, Any]:
    """What the script draws from. Written by ``tojson``, which escapes < > & and quotes."""
    pictures: dict[str, dict[str, str]] = {}
    names: dict[str, dict[str, str]] = {}
    classes: dict[str, list[str]] = {}
    for each in subjects.each:
        key = each.data_key
        classes.setdefault(key, list(each.classes))
        if each.observed is not None:
            own = {str(at): uri for at, uri in each.observed.pictures.items()}
            pictures[key] = {**own, **pictures.get(key, {})}
            names[key] = {
                **{str(at): name for at, name in each.observed.ids.items()},
                **names.get(key, {}),
            }
    return {
        "charts": {slug(c.key): strict(figure(c)) for part in sections for c in part.charts},
        "pictures": pictures,
        "names": names,
        "classes": classes,
        "symbols": list(SYMBOLS),
        # A class of one model is another's only where all have the same.
        "linked": bool(subjects.classes),
    }

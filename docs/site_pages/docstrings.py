r"""Docstrings as Markdown: their reStructuredText marks become what the site's renderer knows.

``.. math::`` becomes ``$$ ... $$``, ``:math:`` ``$ ... $``, ``:func:`` a link where the object has
an entry in the API reference, simple tables become Markdown tables.
"""

import re
import textwrap
from collections.abc import Mapping

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")
MARK = r"(?:NGY|NGR|ZHO|KOB|ODN|BAS|OPS)-[\w.]*\w"
OPEN_POINT = re.compile(r"\((O\d{1,2})(?=[:)])")


def to_markdown(text: str, links: Mapping[str, str] | None = None) -> str:
    """A docstring without common indentation as Markdown.

    Args:
        text: the docstring.
        links: identifiers of the API reference by the last part of their name.
    """
    parts = re.split(r"(?m)(^[ ]*>>> (?:.*\n?)(?:[ ]*\S.*\n?)*)", text)
    parts[::2] = [_prose(part, links or {}) for part in parts[::2]]
    return re.sub(r"(?m)^Example:$", "Examples:", "".join(parts))


def without_marks(text: str) -> str:
    """Names that formulas have in the tests, as (ZHO-COSFACE), say nothing to readers."""
    text = re.sub(rf"\s?\({MARK}(?:, {MARK})*\)", "", text)
    text = re.sub(rf"\({MARK}[;:,] ", "(", text)
    return re.sub(rf", {MARK}\)", ")", text)


def _prose(text: str, links: Mapping[str, str]) -> str:
    text = _tables(_equations(without_marks(text)))
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${' '.join(found[1].split())}$", text)
    text = ROLE.sub(lambda found: reference(found[1], links), text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(r"(?m)^(Departures?): ", r"**\1 from the paper:** ", text)


def reference(name: str, links: Mapping[str, str]) -> str:
    """A name as code, linked where the reference has it."""
    last = name.rsplit(".", 1)[-1]
    return f"[`{last}`][{links[last]}]" if last in links else f"`{name}`"


def _equations(text: str) -> str:
    """``.. math::`` with what is indented below it."""
    lines, out, at = text.splitlines(), [], 0
    while at < len(lines):
        found = re.match(r"^( *)\.\. math::(.*)$", lines[at])
        at += 1
        if not found:
            out.append(lines[at - 1])
            continue
        indent, body = found[1], [found[2].strip()]
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith(indent + "   ")):
            if not lines[at].strip() and not _goes_on(lines, at, indent):
                break
            body.append(lines[at].strip())
            at += 1
        equation = " ".join(part for part in body if part)
        out += ["", f"{indent}$$", f"{indent}{equation}", f"{indent}$$", ""]
    return "\n".join(out) + ("\n" if text.endswith("\n") else "")


def _goes_on(lines: list[str], at: int, indent: str) -> bool:
    """Whether the equation continues after the empty line."""
    rest = next((line for line in lines[at:] if line.strip()), "")
    return rest.startswith(indent + "   ")


def _tables(text: str) -> str:
    """Tables whose columns are marked by lines of ``=``, with or without a head."""
    rule = r"=+(?:[ ]+=+)+"
    headed = rf"(?m)^( *){rule}\n(.*)\n\1{rule}\n((?:.*\n)*?)\1({rule})$"
    bare = rf"(?m)^( *){rule}\n()((?:.*\n)*?)\1({rule})$"
    for pattern in (headed, bare):
        text = re.sub(
            pattern,
            lambda found: textwrap.indent(_table(found[2], found[3], found[4], found[1]), found[1]),
            text,
        )
    return text


def _table(head: str, body: str, rule: str, indent: str) -> str:
    starts = [found.start() + len(indent) for found in re.finditer(r"=+", rule)]
    ends = [*starts[1:], None]

    def cells(line: str) -> list[str]:
        return [
            re.sub(r"(?<!\\)\|", r"\\|", line[start:end].strip())
            for start, end in zip(starts, ends, strict=True)
        ]

    rows = [cells(head)]
    for line in body.splitlines():
        found = cells(line)
        if found[0] or len(rows) == 1:
            rows.append(found)
        else:  # a line that continues the one before
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], found, strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(starts) + "|", *lines[1:]])

"""Docstrings become Markdown and equations MathML, whatever marks they carry."""

import re

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")
pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")

from site_pages import api, docstrings, mathematics


def test_an_equation_on_several_lines_becomes_one() -> None:
    text = "Before.\n\n.. math:: a = b\n          + c\n\nAfter.\n"
    made = docstrings.to_markdown(text)
    assert "$$\na = b + c\n$$" in made
    assert made.index("Before.") < made.index("$$") < made.index("After.")


def test_two_equations_after_each_other_stay_two() -> None:
    made = docstrings.to_markdown(".. math:: a\n\n.. math::\n    b\n\n    c\n\nEnd.")
    assert re.findall(r"\$\$\n(.*)\n\$\$", made) == ["a", "b c"]


def test_roles_link_where_the_reference_has_the_object() -> None:
    text = ":func:`cosface` and :class:`~a.b.Unknown`, :math:`x_i`, ``code``."
    made = docstrings.to_markdown(text, {"cosface": "largemargin.losses.cosface.cosface"})
    assert made == (
        "[`cosface`][largemargin.losses.cosface.cosface] and `a.b.Unknown`, $x_i$, `code`."
    )


def test_examples_are_left_alone() -> None:
    text = "Example:\n    >>> x = ``2``\n    :math:`no`\n\nThen :math:`x`."
    made = docstrings.to_markdown(text)
    assert ">>> x = ``2``\n    :math:`no`" in made
    assert made.startswith("Examples:")
    assert made.endswith("Then $x$.")


@pytest.mark.parametrize("head", ["", "name  what\n====  ====\n"])
def test_tables_with_and_without_a_head(head: str) -> None:
    text = f"====  ====\n{head}a     x|y\nb     one\n      two\n====  ===="
    lines = docstrings.to_markdown(text).splitlines()
    assert lines[1] == "|---|---|"
    assert lines[2:] == [r"| a | x\|y |", "| b | one two |"]


def test_names_of_formulas_are_not_shown() -> None:
    assert docstrings.without_marks("A (KOB-8; LMS 8), b (ZHO-RSM), c (LMD 3, NGY-T5.3).") == (
        "A (LMS 8), b, c (LMD 3)."
    )


def every_docstring() -> list[str]:
    found, waiting = [], [api.package()]
    while waiting:
        each = waiting.pop()
        if each.docstring is not None:
            found.append(docstrings.to_markdown(each.docstring.value, api.links()))
        waiting += [child for child in each.members.values() if not child.is_alias]
    return found


def test_every_equation_of_the_library_can_be_drawn() -> None:
    count = 0
    for text in every_docstring():
        prose = re.sub(r"`[^`]*`|(?m:^ *(?:>>>|\.\.\.).*$)", "", text)
        for block in re.findall(r"(?s)\$\$\n(.*?)\n *\$\$", prose):
            count += 1
            assert all("<math" in mathematics.mathml(p, "block") for p in mathematics.parts(block))
        for inline in re.findall(r"(?<!\$)\$([^$\n]+)\$(?!\$)", prose):
            assert "<math" in mathematics.mathml(inline)
    assert count > 50


def test_an_unknown_command_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be drawn"):
        mathematics.mathml(r"\nosuchcommand x")


def test_equations_beside_each_other_are_parted_outside_of_brackets() -> None:
    assert mathematics.parts(r"a,\quad \frac{b\quad c}{d} \qquad \left(e\quad f\right)") == [
        "a,",
        r"\frac{b\quad c}{d}",
        r"\left(e\quad f\right)",
    ]


def test_escaped_html_is_read_before_it_is_drawn() -> None:
    made = mathematics.with_mathml(r'<span class="arithmatex">\(a &lt; b\)</span>')
    assert made.startswith("<math")
    assert "&lt;" in made or "&#x0003C;" in made
    assert "amp" not in made

"""The mutation check itself: what it changes, what it leaves alone, and what it records."""

import ast

import pytest
import yaml
from mutants.changes import mutants
from mutants.run import EQUIVALENT, PACKAGE, SCORE, SCORE_BEYOND, explained, read_json, score
from mutants.suites import files, is_beyond, stages

SOURCE = '''"""A text with 1 + 1 in it."""
LIMIT = 4

def loss(x: "a - b", y, *, margin=0.5):
    """Docstring 3 < 4."""
    if y < 0:
        raise ValueError(f"{y + 1} is below")
    gap = relu(x - y)
    return torch.where(gap > 0, gap.detach(), -gap).sum(1)
'''


def changes(source=SOURCE):
    return {(m.kind, m.before, m.after) for m in mutants(source, "a.py")}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("constant", "LIMIT = 4", "LIMIT = 5"),
        ("constant", "margin=0.5", "margin=1.0"),
        ("comparison", "y < 0", "y <= 0"),
        ("sign", "gap = relu(x - y)", "gap = relu(x + y)"),
        ("term", "gap = relu(x - y)", "gap = relu(x)"),
        ("term", "gap = relu(x - y)", "gap = relu(-y)"),
        ("detach", "gap = relu(x - y)", "gap = detached(relu(x - y))"),
    ],
)
def test_changes_of_a_statement(kind, before, after):
    assert (kind, before, after) in changes()


def test_loops_end_early_or_go_on():
    source = "def f(x):\n    for a in x:\n        if a:\n            continue\n        break\n"
    found = {(m.before, m.after): m.source for m in mutants(source, "a.py")}
    assert found["continue", "break"] == source.replace("continue", "break")
    assert found["break", "continue"] == source.replace("break", "continue")


def test_tests_of_other_rooms_are_those_that_speak_of_the_file():
    first, *rest = stages("measuring/robust/attacks.py")
    assert first[0].startswith("tests/measuring/robust/test_attack")
    assert all(
        path.startswith("tests/measuring/robust/") for part in (first, *rest) for path in part
    )
    assert is_beyond("app/training/step.py")
    assert not is_beyond("losses/cosface.py")
    assert not [file for file in files(PACKAGE) if file.startswith(("app/cli", "app/report"))]


def test_changes_inside_one_expression():
    line = "return torch.where(gap > 0, {}, {}).{}(1)"
    before = line.format("gap.detach()", "-gap", "sum")
    for kind, after in (
        ("branches", line.format("-gap", "gap.detach()", "sum")),
        ("reduction", line.format("gap.detach()", "-gap", "mean")),
        ("detach", line.format("gap", "-gap", "sum")),
        ("sign", line.format("gap.detach()", "gap", "sum")),
    ):
        assert (kind, before, after) in changes()


def test_texts_hints_and_messages_are_left_alone():
    for mutant in mutants(SOURCE, "a.py"):
        assert "with 1 + 1 in it" in mutant.source
        assert "Docstring 3 < 4." in mutant.source
        assert '"a - b"' in mutant.source
        assert "{y + 1} is below" in mutant.source


def test_every_mutant_is_one_change_of_the_source():
    path = PACKAGE / "losses" / "compactness.py"
    source = path.read_text(encoding="utf-8")
    made = mutants(source, "losses/compactness.py")
    assert len({each.key for each in made}) == len(made) > 30
    tree = ast.dump(ast.parse(source))
    assert all(ast.dump(ast.parse(each.source)) != tree for each in made)


def test_a_key_survives_when_the_statement_moves():
    keys = {each.key for each in mutants(SOURCE, "a.py")}
    moved = SOURCE.replace("LIMIT = 4", "LIMIT = 4\n\n\n# moved")
    assert {each.key for each in mutants(moved, "a.py")} == keys


def test_every_file_has_tests_and_kernels_are_left_out():
    found = files(PACKAGE)
    assert len(found) > 40
    for file in found:
        for stage in stages(file):
            for path in (part.partition("::")[0] for part in stage if part.startswith("tests/")):
                assert (PACKAGE.parents[1] / path).exists(), f"{file}: {path}"
    assert not [file for file in found if "triton" in file]


def test_explanations_are_of_mutants_that_exist():
    entries = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8"))
    known = set()
    for file in {entry["file"] for entry in entries}:
        known |= {m.key for m in mutants((PACKAGE / file).read_text(encoding="utf-8"), file)}
    stale = explained().keys() - known
    assert not stale, "the code has changed: look at these again, or take them out"
    assert all(len(reason) > 20 for reason in explained().values())


def test_sums_count_what_was_tried_and_leave_out_what_had_no_gradient():
    made = mutants("def f(a, b):\n    return a + b\n", "a.py")
    assert [m.after for m in made] == ["return a - b", "return a", "return b"]
    outcomes = dict(zip((m.key for m in made), ("killed", "survived", "void"), strict=True))
    rows = {key: {"outcome": outcome} for key, outcome in outcomes.items()}
    total = score({"a.py": made}, rows, 3)["total"]
    assert total["possible"] == total["tried"] == 2
    assert (total["killed"], total["survived"], total["explained"]) == (1, 1, 0)


@pytest.mark.parametrize("path", [SCORE, SCORE_BEYOND], ids=lambda path: path.stem)
def test_the_committed_score_adds_up(path):
    kept = read_json(path)
    parts = ("killed", "timed out", "explained", "survived")
    for row in (kept["total"], *kept["files"].values()):
        assert row["tried"] == sum(row[part] for part in parts) <= row["possible"]
    for name in ("tried", *parts):
        assert kept["total"][name] == sum(row[name] for row in kept["files"].values())

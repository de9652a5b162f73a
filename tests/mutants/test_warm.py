"""Mutants in forks: tests by the lines they run, swapped code, outcomes of a small package."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.changes import mutants
from mutants.swap import Swap, swappable
from mutants.touched import (
    Index,
    Recorder,
    function_at,
    functions,
    mark_of,
    statement_lines,
)

SOURCE = """LIMIT = 4


def scaled(x, *, by=2):
    total = x * by
    if x > 3:
        total = (
            total
            + 1
        )
    return total


class Shift:
    amount = 1

    def of(self, x, twice=False):
        return [each + self.amount for each in x] * (2 if twice else 1)
"""
TESTS = """from small.losses.a import Shift, scaled

def test_small():
    assert scaled(2) == 4

def test_large():
    assert scaled(5) == 11

def test_shift():
    assert Shift().of([1]) == [2]
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    (folder / "losses").mkdir(parents=True)
    (folder / "losses" / "a.py").write_text(SOURCE, encoding="utf-8")
    return folder


def loaded(package: Path):
    spec = importlib.util.spec_from_file_location("small_a", package / "losses" / "a.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ("total = x / by", (3.5, 1)),
        ("total = total - 1", (9, 1)),
        ("x >= 3", (11, 7)),
        ("by=3", (16, 1)),
        ("twice=True", (11, 2)),
    ],
)
def test_functions_that_exist_get_the_changed_code(package, after, found):
    module = loaded(package)
    shift = module.Shift()
    (mutant,) = (m for m in mutants(SOURCE, "losses/a.py") if m.after == after)
    assert swappable(mutant)
    Swap(package).put(mutant)
    three = {"x >= 3": 3}.get(after)
    large = module.scaled(5)
    small = module.scaled(three) if three else len(shift.of([1]))
    assert (large, small) == found


def test_what_is_computed_on_import_is_not_swapped():
    outside = {m.after for m in mutants(SOURCE, "losses/a.py") if not swappable(m)}
    assert outside == {"LIMIT = 5", "amount = 0"}


def test_lines_of_a_statement():
    tree = ast.parse(SOURCE)
    assert statement_lines(tree, 5) == range(5, 6)
    assert statement_lines(tree, 6) == range(6, 7)  # the head of an if
    assert statement_lines(tree, 9) == range(7, 11)  # one of four lines
    assert statement_lines(tree, 4) == range(5, 12)  # a default: all of the function
    assert statement_lines(tree, 1) == range(1, 2)


def test_tests_are_found_by_the_lines_they_run(package):
    module = loaded(package)
    notes = {}
    for name, call in (("small", lambda: module.scaled(2)), ("large", lambda: module.scaled(5))):
        with Recorder(package) as recorder:
            call()
        notes[name] = json.loads(json.dumps(recorder.row()))
    index = Index(package, notes)
    assert index.tests("losses/a.py", 5) == {"small", "large"}
    assert index.tests("losses/a.py", 9) == {"large"}
    assert index.tests("losses/a.py", 18) == set()  # never run
    path = package / "losses" / "a.py"
    new = f"{SOURCE}\n\ndef other(x):\n    return scaled(x)\n"
    for text, line, found in (
        (f"# moved\n{SOURCE}", 10, {"large"}),
        (SOURCE.replace("x > 3", "x > 4"), 9, {"small", "large"}),
        (new, 22, {"small", "large"}),
        (new, 9, {"large"}),
    ):
        path.write_text(text, encoding="utf-8")
        forget()
        assert Index(package, notes).tests("losses/a.py", line) == found
    again = loaded(package)
    with Recorder(package) as recorder:
        again.scaled(2)
    notes["again"] = recorder.row()  # knows that it does not run the other function
    assert Index(package, notes).tests("losses/a.py", 22) == {"small", "large"}
    assert Index(package, notes).tests("losses/a.py", 5) == {"small", "large", "again"}


def forget():
    for each in (functions, function_at, mark_of):
        each.cache_clear()


SCRIPT = """
import sys, time
from pathlib import Path
import pytest
from mutants.changes import mutants
from mutants.swap import swappable
from mutants.warm import Forks

package = Path("small")
source = (package / "losses" / "a.py").read_text("utf-8")
found = {}
record = lambda mutant, row: found.update({mutant.after: row})
how = {"workers": 2, "budget": 300, "ends": time.monotonic() + 300}
forks = Forks(package.resolve(), Path("notes.json"), {}, record, **how)
forks.todo = [m for m in mutants(source, "losses/a.py") if swappable(m)]
pytest.main(["-q", "-p", "no:cacheprovider", "test_it.py"], plugins=[forks])
for after, row in found.items():
    print(f"{after} | {row['outcome']} | {row['by']}")
"""


def test_forks_tell_what_became_of_each_mutant(package, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    tests = Path(__file__).parents[1]
    path = f"{tmp_path}:{tests}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    rows = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    found = {after: (outcome, by) for after, outcome, by in rows}
    assert found["total = x / by"][0] == "killed"
    assert found["total = total - 1"] == ("killed", "test_it.py::test_large")
    assert found["by=3"][0] == "killed"
    assert found["x >= 3"] == ("survived", "")  # 3 is not tried
    assert found["x > 4"] == ("survived", "")
    assert found["twice=True"] == ("killed", "test_it.py::test_shift")

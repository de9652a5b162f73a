"""Mutants in forks: tests by the lines they run, swapped code, outcomes of a small package."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.changes import mutants
from mutants.run import defined
from mutants.swap import Swap, swappable
from mutants.touched import (
    Index,
    Recorder,
    affordable,
    function_at,
    functions,
    mark_of,
    most_varied,
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

SEEN = []

def test_once():
    assert scaled(2) and not SEEN
    SEEN.append(2)

def test_once_again():
    assert scaled(2) and not SEEN
    SEEN.append(2)

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
        with Recorder(package, ("losses",)) as recorder:
            call()
        notes[name] = json.loads(json.dumps(recorder.row()))
    index = Index(package, ("losses",), notes)
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
        assert Index(package, ("losses",), notes).tests("losses/a.py", line) == found
    again = loaded(package)
    with Recorder(package, ("losses",)) as recorder:
        again.scaled(2)
    notes["again"] = recorder.row()  # knows that it does not run the other function
    assert Index(package, ("losses",), notes).tests("losses/a.py", 22) == {"small", "large"}
    assert Index(package, ("losses",), notes).tests("losses/a.py", 5) == {"small", "large", "again"}


def test_what_is_computed_on_import_is_tried_where_its_name_is_used(package):
    module = loaded(package)
    notes = {}
    for name, call in (("scaled", lambda: module.scaled(2)), ("of", lambda: module.Shift().of([]))):
        with Recorder(package, ("losses",)) as recorder:
            call()
        notes[name] = recorder.row()
    index = Index(package, ("losses",), notes)
    of_class = next(m for m in mutants(SOURCE, "losses/a.py") if m.after == "amount = 0")
    assert index.naming("losses/a.py", defined(of_class.before)) == {"of"}
    assert index.naming("losses/a.py", {"LIMIT"}) == {"scaled", "of"}  # used nowhere


def test_tests_are_varied_and_take_so_long_at_most():
    seconds = {"a[1]": 2.0, "a[2]": 1.0, "b[1]": 3.0, "b[2]": 4.0, "c": 0.5}
    notes = {name: {"seconds": each} for name, each in seconds.items()}
    tests = most_varied(seconds, notes)
    assert tests == ["c", "a[2]", "b[1]", "a[1]", "b[2]"]
    assert affordable(tests, notes, 5) == ["c", "a[2]", "b[1]"]
    assert affordable(tests, notes, 0.1) == ["c"]


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
how = {"workers": 2, "budget": 300, "ends": time.monotonic() + 300, "apart": True}
forks = Forks(package.resolve(), ("losses",), Path("notes.json"), {}, record, **how)
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
    assert found["x > 4"] == ("survived", "")  # tests that fail after others have found nothing
    assert "it fails only after other tests: test_it.py::test_once" in done.stdout
    assert found["twice=True"] == ("killed", "test_it.py::test_shift")

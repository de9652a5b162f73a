"""The page of faults, inputs and mutants: made from committed numbers, failures included."""

import make_reliability


def numbers():
    return (
        make_reliability.read(make_reliability.FIGURES),
        make_reliability.read(make_reliability.MUTANTS),
        make_reliability.read(make_reliability.BEYOND),
    )


def test_the_page_is_made_from_the_committed_numbers():
    made = make_reliability.page(*numbers())
    assert made == make_reliability.PAGE.read_text(encoding="utf-8"), (
        "run python docs/make_reliability.py"
    )


def test_a_sample_is_called_a_sample_and_survivors_lower_the_score():
    faults, mutants, beyond = numbers()
    row = {"possible": 10, "tried": 10, "killed": 6, "timed out": 1, "explained": 2, "survived": 1}
    text = make_reliability.page(faults, {**mutants, "total": row, "files": {"a.py": row}}, beyond)
    assert "**Score: 87.5%**" in text
    assert "all of them" in text
    assert "| `a.py` | 10 | 10 | 7 | 2 | 1 |" in text
    text = make_reliability.page(faults, {**mutants, "total": {**row, "possible": 11}}, beyond)
    assert "a sample of 10, not all" in text


def test_cases_become_one_row_for_a_test_and_failures_are_named():
    base = {"injected": {"a fault": 2}, "tried": {}, "suite": "quick", "says": "it holds"}
    cases = [
        {**base, "test": "tests/x.py::test_it[a]", "passed": True, "skipped": None},
        {**base, "test": "tests/x.py::test_it[b]", "passed": False, "skipped": None},
        {**base, "test": "tests/x.py::test_it[c]", "passed": False, "skipped": "no disk"},
    ]
    run = {"tests": 3, "passed": 1, "skipped": 1, "injected": {"a fault": 2}, "tried": {}}
    faults = make_reliability.taken({**run, "each": cases}, "2026-01-01")
    (row,) = faults["each"]
    assert (row["cases"], row["passed"], row["skipped"]) == (3, 1, 1)
    text = make_reliability.page(faults, *numbers()[1:])
    assert "- it holds (`tests/x.py`): 1 of 3" in text
    assert "| it holds | `tests/x.py` | quick | 1 of 3, 1 skipped |" in text
    assert "| a fault | 2 |" in text
    assert "| faults injected | 6 | 2 |" in text


def test_large_jobs_have_their_time_and_memory():
    faults, mutants, beyond = numbers()
    took = {"predict: 50,000 files": {"seconds": 71.6, "mib": 1234.0}}
    text = make_reliability.page({**faults, "took": took}, mutants, beyond)
    assert "| predict: 50,000 files | 72 | 1,234 |" in text
    assert "## Large jobs" not in make_reliability.page({**faults, "took": {}}, mutants, beyond)


def test_mutants_beyond_the_losses_are_a_sample_and_called_one():
    faults, mutants, beyond = numbers()
    row = {"possible": 90, "tried": 10, "killed": 6, "timed out": 1, "explained": 1, "survived": 2}
    part = {**beyond, "seed": 4, "sample": 12, "total": row, "files": {"measuring/a.py": row}}
    text = make_reliability.page(faults, mutants, part).partition("## Mutants beyond")[2]
    text = " ".join(text.split())
    assert "there were 90. Of 12, drawn at random with seed 4 (" in text
    assert "2 detach a number that has no gradient in any test. Of the other 10, 7" in text
    assert "7 were killed, 1 are explained and 2 survived. Those explained" in text
    assert "| `measuring/a.py` | 90 | 10 | 7 | 1 | 2 |" in text

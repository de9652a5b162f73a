"""The golden vectors, and that their runner can fail: mutated, unknown and truncated cases."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import conformance
import pytest
import torch

import largemargin.ops.chunked as chunked

GOLDEN = Path(__file__).parent / "golden"


def encoded(values):
    return {"dtype": "float64", "shape": [len(values)], "data": values}


@pytest.fixture
def folder(tmp_path):
    """Two items of four cases each."""
    for item in ("KOB-11", "KOB-13"):
        shutil.copy(GOLDEN / f"{item}.json", tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run a folder: exit status, printed lines, what went to stderr."""

    def run(path):
        status = conformance.main([str(path)])
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err

    return run


def edit(folder, item, change):
    """Apply ``change`` to the content of an item's file in the folder, copied from the golden."""
    content = json.loads((GOLDEN / f"{item}.json").read_text())
    change(content)
    (folder / f"{item}.json").write_text(json.dumps(content))


def test_every_golden_case_passes(run):
    status, lines, _ = run(GOLDEN)
    assert [line for line in lines[:-2] if "[float" in line] == []
    files = list(GOLDEN.glob("*.json"))
    items, cases = len(files), sum(len(json.loads(f.read_text())["cases"]) for f in files)
    assert (items, cases) >= (57, 344)
    assert lines[-1] == f"items {items}/{items}, cases {cases}/{cases}"
    assert len(lines) == items + 2
    assert status == 0


@pytest.mark.slow  # `make test` runs the script itself, on all golden vectors
def test_as_a_script(folder):
    script = Path(conformance.__file__)
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "items 2/2, cases 8/8", done.stderr
    assert done.returncode == 0


CHANGES = {
    "expected value": lambda case: case["expected"].update(value=1.001 * case["expected"]["value"]),
    "expected shape": lambda case: case["expected"].update(value=encoded([1.0])),
    "gradient": lambda case: case["grads"]["value"]["f"]["data"].__setitem__(0, 0.5),
    "param": lambda case: case["params"].update(lam=0.31),
    "unknown param": lambda case: case["params"].update(lambda_=0.3),
    "param of another item": lambda case: case["params"].update(label_smoothing=0.1),
    "unknown input": lambda case: case["inputs"].update(g=encoded([1.0])),
    "missing input": lambda case: case["inputs"].pop("y"),
    "unknown output": lambda case: case["expected"].update(values=1.0),
    "gradient of an unknown output": lambda case: case["grads"].update(values={}),
    "gradient to an unknown input": lambda case: case["grads"]["value"].update(
        g=case["grads"]["value"]["f"]
    ),
    "gradient to labels": lambda case: case["grads"]["value"].update(y=encoded([0.0] * 4)),
    "unknown key": lambda case: case.update(extra=1),
    "steps": lambda case: case.update(steps=[{}]),
    "nothing expected": lambda case: case.update(expected={}, grads={}),
    "truncated array": lambda case: case["inputs"]["f"]["data"].pop(),
    "unknown dtype": lambda case: case["inputs"]["f"].update(dtype="float16"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_case_fails(folder, run, change):
    edit(folder, "KOB-11", lambda content: change(content["cases"][0]))
    status, lines, _ = run(folder)
    assert lines[-1] == "items 1/2, cases 7/8"
    assert lines[0].split()[:3] == ["KOB-11", "3/4", "case0"]
    assert status == 1


SPECIFIED = {
    "ZHO-COSFACE": {"m": 0.35, "s": 64.0},
    "ZHO-NORMFACE": {"s": 64.0},
    "ZHO-LM": {"s": 64.0},
    "ZHO-GM": {"s": 64.0},
    "BAS-LDAM": {"max_m": 0.5, "s": 30.0},
}


@pytest.mark.parametrize("item", SPECIFIED)
def test_a_param_left_out_is_that_of_the_specification(tmp_path, run, item):
    """The losses' own defaults are others."""
    left_out = []

    def shorten(content):
        for case in content["cases"]:
            if SPECIFIED[item].items() <= case["params"].items():
                left_out.append([case["params"].pop(name) for name in SPECIFIED[item]])

    edit(tmp_path, item, shorten)
    status, lines, _ = run(tmp_path)
    assert left_out
    assert status == 0, lines


def test_an_unknown_item_fails(folder, run):
    edit(folder, "KOB-11", lambda content: content.update(item="KOB-12"))
    status, lines, _ = run(folder)
    assert lines[-1] == "items 1/2, cases 4/8"
    assert status == 1


def test_an_item_without_cases_fails(folder, run):
    edit(folder, "KOB-11", lambda content: content.update(cases=[]))
    status, lines, _ = run(folder)
    assert lines[-1] == "items 1/2, cases 4/4"
    assert status == 1


MALFORMED = {
    "truncated": (GOLDEN / "KOB-11.json").read_text()[:2000],
    "empty": "",
    "no JSON": "value,gradient\n1,2\n",
    "a list": "[]",
    "another format": '{"format": 2, "item": "KOB-11", "cases": []}',
    "no cases": '{"format": 1, "item": "KOB-11"}',
    "nameless case": '{"format": 1, "item": "KOB-11", "cases": [{}]}',
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_named(folder, run, text):
    (folder / "KOB-11.json").write_text(text)
    status, lines, errors = run(folder)
    assert lines[-1] == "items 1/2, cases 4/4"
    assert "KOB-11.json" in errors
    assert status == 2


def test_a_missing_or_empty_folder_is_named(tmp_path, run):
    for path, reason in ((tmp_path / "none", "is not a folder"), (tmp_path, "no .json files")):
        status, lines, errors = run(path)
        assert (status, lines) == (2, [])
        assert reason in errors


def test_steps_carry_state(tmp_path, run):
    def shuffle(content):
        content["cases"] = content["cases"][:1]
        content["cases"][0]["steps"].reverse()

    edit(tmp_path, "NGY-4.3", shuffle)
    status, lines, _ = run(tmp_path)
    assert lines[-1] == "items 0/1, cases 0/1"
    assert "step 0" in lines[0]
    assert status == 1


def test_steps_may_change_params_and_inputs(tmp_path, run):
    """Strategy none reads no bank, so it may start from any; keys of a step override the case's."""

    def override(content):
        (case,) = [case for case in content["cases"] if case["name"] == "sequence_none"]
        case["params"]["strategy"] = "both"
        for step in case["steps"]:
            step["strategy"] = "none"
            step["inputs"] = step["params"] = None
            step["b"] = case["inputs"]["b"]
        del case["inputs"]["b"]
        content["cases"] = [case]

    edit(tmp_path, "NGY-4.3", override)
    assert run(tmp_path)[1][-1] == "items 1/1, cases 1/1"


def pixels(content):
    """Down and up again by the defaults of the spec, where a case says nothing."""
    case = next(case for case in content["cases"] if case["name"] == "du_bilinear")
    case["params"] = {}
    content["cases"] = [case]


def norms(content):
    """The empirical part and the confidence, which no norm enters."""
    case = next(case for case in content["cases"] if "Lambda" in case["params"])
    names = ("rho", "delta", "N")
    case["params"] = {name: case["params"][name] for name in names if name in case["params"]}
    case["expected"] = {name: case["expected"][name] for name in ("emp", "confidence")}
    content["cases"] = [case]


def radius(content):
    """The bound of the ball, whose formula has no radius."""
    case = next(case for case in content["cases"] if "Lambda" in case["params"])
    for name in ("r", "Gamma"):
        del case["params"][name]
    case["expected"] = {"bound_5_3": case["expected"]["bound_5_3"]}
    content["cases"] = [case]


def lines(content):
    """One number for all samples: as a param, as an array of one, and as a list."""
    (case,) = [case for case in content["cases"] if case["name"] == "is_cosface"]
    names = ("alpha1", "beta1", "alpha2", "beta2")
    held = {name: case["inputs"].pop(name)["data"] for name in names}
    single = {name: encoded(data[:1]) for name, data in held.items()}
    content["cases"] = [
        {**case, "params": case["params"] | {name: data[0] for name, data in held.items()}},
        {**case, "name": "arrays of one", "inputs": case["inputs"] | single},
        {**case, "name": "lists", "params": case["params"] | held},
    ]


def powers(content):
    """Options that a loss shares with the one it is made of, at their defaults."""
    case = content["cases"][0]
    case["params"] |= {"compact_power": 2, "margin_power": 1, "agg": "max", "first_seen": "scaled"}
    content["cases"] = [case]


@pytest.mark.parametrize(
    ("item", "change"),
    [
        *(("NGR-PERT", pixels), ("NGY-5", norms), ("NGY-5", radius), ("ZHO-GM", lines)),
        *(("NGR-12", powers), ("NGR-13", powers)),
    ],
)
def test_params_may_be_left_out_or_said(tmp_path, run, item, change):
    edit(tmp_path, item, change)
    assert run(tmp_path)[1][-1].startswith("items 1/1")


def test_plain_lists_are_read_in_double_precision(folder, run):
    def plain(content):
        for case in content["cases"]:
            rows, columns = case["inputs"]["f"]["shape"]
            data = case["inputs"]["f"]["data"]
            case["inputs"]["f"] = [data[columns * n : columns * (n + 1)] for n in range(rows)]

    edit(folder, "KOB-11", plain)
    assert run(folder)[1][-1] == "items 2/2, cases 8/8"


REJECTIONS = {
    "accepted": {"target": "NGY-4.3", "gamma": 0.5},
    "unknown target": {"target": "NGY-4.33", "gamma": 1.5},
    "unknown argument": {"target": "NGY-4.3", "momentum": 1.5},
    "argument of no such loss": {"target": "any loss with class weights", "rho": -1.0},
    "no argument": {"target": "any loss"},
}


@pytest.mark.parametrize("params", REJECTIONS.values(), ids=REJECTIONS.keys())
def test_a_call_that_is_not_rejected_fails(tmp_path, run, params):
    def replace(content):
        content["cases"] = content["cases"][:1]
        content["cases"][0]["params"] = params

    edit(tmp_path, "ERR", replace)
    status, lines, _ = run(tmp_path)
    assert lines[-1] == "items 0/1, cases 0/1"
    assert status == 1


def test_every_rejection_of_the_grammar_is_known(tmp_path, run):
    """One call for each row of the two tables, with other values than the golden ones."""
    every = [
        {"target": "any loss", "C": 5, "label": 7},
        {"target": "any loss with a max or sum over other classes", "C": 1},
        {"target": "any loss", "N_q": 2, "N_y": 5},
        {"target": "any loss with q and W", "d_q": 5, "d_W": 2},
        {"target": "simplex ETF construction", "C": 9, "d": 7},
        {"target": "ODN-1", "r": 1.0, "theta": 1.0, "mu": 0.5},
        {"target": "NGY-5", "rho": -1.0},
        {"target": "NGY-4.3", "gamma": -0.5},
        {"target": "NGY-4.3", "strategy": "momentum"},
        {"target": "NGY-4.3", "first_seen": "zero"},
        {"target": "NGY-4.3", "labels": "soft"},
        {"target": "NGY-4.4", "labels": "soft"},
        {"target": "NGY-4.4", "compact_power": 0},
        {"target": "NGY-4.5", "margin_power": 3},
        {"target": "NGY-4.5", "agg": "median"},
        {"target": "ZHO-LM", "s": -2.0},
        {"target": "ZHO-ASOFTMAX", "m": 2.5},
        {"target": "ZHO-GM", "alpha1": 0.4, "alpha2": 0.4},
        {"target": "BAS-LDAM", "counts": [5, 0]},
        {"target": "OPS-STATS", "similarity": "angle"},
        {"target": "NGY-3.3", "label_smoothing": -0.1},
        {"target": "any loss", "reduction": "median"},
        {"target": "any loss with class weights", "C": 4, "len_class_weight": 3},
        {"target": "any loss with sample weights", "N": 3, "len_sample_weight": 4},
        # And items that the tables do not name.
        *({"target": item, "C": 3, "label": 3} for item in ("KOB-8", "KOB-15", "BAS-LGM")),
        *({"target": item, "N_q": 4, "N_y": 3} for item in ("OPS-STATS", "ODN-G", "BAS-CENTER")),
        {"target": "BAS-ELSAYED", "agg": "median"},
        {"target": "ODN-G", "r": 0.5, "theta": 0.7},
    ]

    def replace(content):
        content["cases"] = [
            {"name": str(number), "params": params, "expected": {"raises": "ValueError"}}
            for number, params in enumerate(every)
        ]

    edit(tmp_path, "ERR", replace)
    assert run(tmp_path)[1][-1] == f"items 1/1, cases {len(every)}/{len(every)}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunked_statistics_are_run_in_blocks(folder, run, monkeypatch, dtype):
    before = chunked.MIN_BLOCK, chunked.BLOCK_ELEMENTS
    blocks = []

    def watched(rows, columns, *rest):
        blocks.append((rows.dtype, len(columns)))
        return unwatched(rows, columns, *rest)

    unwatched = chunked._block_logits
    monkeypatch.setattr(chunked, "_block_logits", watched)
    assert run(folder)[0] == 0
    widths = [width for kind, width in blocks if kind == dtype]
    assert len(widths) > 40
    assert max(widths) == 2
    assert before == (chunked.MIN_BLOCK, chunked.BLOCK_ELEMENTS)


def test_a_wrong_block_fails(folder, run, monkeypatch):
    def last_one_wrong(rows, columns, *rest):
        logits, *others = right(rows, columns, *rest)
        return logits + 1e-6 * (len(columns) == 1), *others

    right = chunked._block_logits
    monkeypatch.setattr(chunked, "_block_logits", last_one_wrong)
    status, lines, _ = run(folder)
    assert status == 1
    assert "case0 [float64] chunked: value" in lines[0]


def test_gradients_of_finite_grad_cases_must_be_finite(tmp_path, run, monkeypatch):
    def keep_tie(content):
        content["cases"] = [case for case in content["cases"] if case["name"] == "tie"]

    edit(tmp_path, "KOB-1", keep_tie)
    assert run(tmp_path)[0] == 0
    infinite = [torch.tensor(math.inf)]
    monkeypatch.setattr(conformance, "gradients", lambda *_: infinite)
    status, lines, _ = run(tmp_path)
    assert status == 1
    assert "d hinge / d f: not finite" in lines[0]


@pytest.mark.parametrize(
    ("got", "want"),
    [(1.0, math.nan), (math.nan, 1.0), (1.0, math.inf), (math.inf, -math.inf), (math.inf, 1e300)],
)
def test_non_finite_numbers_match_themselves_only(got, want):
    conformance.compare(want, want, 1e-9)
    with pytest.raises(conformance.Mismatch):
        conformance.compare(torch.tensor(got), want, 1e-9)


def test_integers_are_compared_exactly():
    want = torch.tensor([10**12])
    conformance.compare(torch.tensor([10**12]), want, 1e-3)
    with pytest.raises(conformance.Mismatch):
        conformance.compare(torch.tensor([10**12 + 1]), want, 1e-3)


def test_a_whole_number_may_be_expected_of_a_real_one():
    conformance.compare(torch.tensor(1e-12), 0, 1e-9)
    with pytest.raises(conformance.Mismatch):
        conformance.compare(torch.tensor(1e-6), 0, 1e-9)


def test_tolerances_are_those_of_the_golden_readme():
    def tolerance(item, dtype, name="case0", tags=(), scale=None):
        return tuple(conformance.tolerance_of(item, {"name": name, "tags": tags}, scale, dtype))

    wide, single = torch.float64, torch.float32
    assert tolerance("KOB-11", wide) == (1e-9, 1e-8, False)
    assert tolerance("KOB-11", single) == (2e-5, 2e-4, False)
    assert tolerance("NGR-21", wide) == (1e-9, 1e-8, False)
    relaxed = (1e-3, 1e-3, False)
    assert tolerance("NGR-21", single) == relaxed
    assert tolerance("KOB-11", single, tags=["large_logits"]) == relaxed
    assert tolerance("NGY-3.3", single, name="large_logits") == relaxed
    assert tolerance("ZHO-UNI", single, tags=["opposite"]) == relaxed
    assert tolerance("ZHO-LM", single, scale=30.0) == relaxed
    assert tolerance("ZHO-LM", wide, scale=64.0) == (1e-9, 1e-8, False)
    assert tolerance("ZHO-LM", wide, name="aligned_feature") == (1e-6, 1e-8, False)
    assert tolerance("ZHO-LM", wide, name="aligned_feature", scale=64.0) == (1e-5, 1e-8, False)
    assert tolerance("ZHO-LM", single, name="aligned_feature") == (2e-5, 2e-4, False)
    assert tolerance("ZHO-MC", wide, name="tiny_angle") == (1e-9, 1e-8, True)

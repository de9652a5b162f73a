"""The demo a newcomer runs first: every loss learns, the table is complete, runs repeat."""

import builtins
import dataclasses
import math

import pytest

pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn")
pytest.importorskip("tqdm")

import torch

from largemargin.training import demo

METHODS = ["softmax", "softmax + LMD", "LM-Softmax", "Kobayashi"]


@pytest.fixture(scope="module")
def quick() -> list[demo.Result]:
    return demo.compare(epochs=demo.QUICK_EPOCHS, batch_size=64, seed=0, progress=False)


def test_every_method_learns(quick: list[demo.Result]) -> None:
    assert [result.method for result in quick] == METHODS
    for result in quick:
        assert result.accuracy > 0.9, result.method
        assert result.seconds > 0


def test_measurements_are_possible(quick: list[demo.Result]) -> None:
    ceiling = math.degrees(math.acos(-1 / 9))
    for result in quick:
        assert 0 < result.class_margin_degrees <= ceiling + 1e-3
        assert -2 <= result.min_sample_margin <= result.mean_sample_margin <= 2
        assert 0 < result.relative_dispersion < result.max_dispersion / 1e-6


def test_lm_softmax_opens_the_widest_class_margin(quick: list[demo.Result]) -> None:
    margins = {result.method: result.class_margin_degrees for result in quick}
    assert max(margins, key=margins.__getitem__) == "LM-Softmax"


def test_same_seed_same_numbers(quick: list[demo.Result]) -> None:
    torch.rand(3)  # what the global generator did before must not matter
    method, split = demo.METHODS[1], demo.load_digits()
    network = demo.train(method, split, epochs=demo.QUICK_EPOCHS, batch_size=64, seed=0)
    again = demo.measure(method, network, split, seconds=quick[1].seconds)
    assert dataclasses.asdict(again) == dataclasses.asdict(quick[1])


def test_every_method_starts_from_the_same_weights() -> None:
    starts = [demo.initial_network(method, seed=3).state_dict() for method in demo.METHODS]
    for state in starts[1:]:
        for name in state:
            assert torch.equal(state[name], starts[0][name]), name


def test_main_prints_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "QUICK_EPOCHS", 1)
    assert demo.main(["--quick", "--batch-size", "128"]) == 0
    out = capsys.readouterr().out
    for text in (*METHODS, "accuracy", "class margin", "96.4°", "dispersion", "seconds"):
        assert text in out
    rows = [line for line in out.splitlines() if line.startswith(tuple(METHODS)) and "%" in line]
    assert len(rows) == len(METHODS)


def test_missing_extra_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def without_tqdm(name: str, *args: object, **kwargs: object) -> object:
        if name == "tqdm":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    assert demo.main(["--quick"]) == 1
    assert "pip install 'largemargin[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--batch-size", "1"]])
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(options)
    assert "at least" in capsys.readouterr().err

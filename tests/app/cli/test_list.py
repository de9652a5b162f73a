"""``largemargin list``: what the docstrings say, readable in a terminal."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

from app.cli.command import largemargin

import largemargin as lm
from largemargin.app.cli import command as cli
from largemargin.app.cli.list import PAPERS, as_text, describe
from largemargin.app.data.sources import SOURCES
from largemargin.app.models import list_models


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["list", *words]) == 0
    return capsys.readouterr().out


def test_lists_every_loss(tmp_path: Path) -> None:
    out = largemargin("list", folder=tmp_path).stdout
    starts = [line.split(" ")[0] for line in out.splitlines()]
    assert set(lm.LOSSES) <= set(starts)
    assert "Learning Towards the Largest Margins" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_loss_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    out = listed(capsys, "cosface")
    assert "ℓ = - log (e^(s(cos θ_y - m))) / (e^(s(cos θ_y - m)) + Σ_(j≠y) e^(s cos θ_j))" in out
    assert "paper: LTLM: Learning Towards the Largest Margins" in out
    assert "margin = 0.2  m in cosine units" in out
    assert "arcface" not in out


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_every_loss_is_described(name: str) -> None:
    entry = describe(name)
    assert len(entry.what) > 10
    assert entry.equations or name == "super_symmetry"  # said in words
    assert all(key in PAPERS for key in entry.paper.split(", ") if key)
    assert entry.paper or name == "super_symmetry"
    for text in (entry.what, *entry.equations, *entry.helps.values()):
        assert not {"\\", "`", "{\\"} & set(text), text
    for equation in entry.equations:
        assert equation.count("(") == equation.count(")"), equation
        assert "{" not in equation


def test_settings_are_those_of_the_signature() -> None:
    assert describe("cosface").settings == {"margin": 0.2, "scale": "auto", "class_counts": None}
    assert describe("discriminative").settings["margin"] == 6.0
    assert "num_classes" not in describe("discriminative").settings
    assert "delta_v" in describe("robust_discriminative").helps["radius"]  # said by its parent


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac12(a + b)", "1 / 2 (a + b)"),
        (r"\frac{a + b}{c}", "(a + b) / c"),
        (r"\lambda\tilde D", "λ D\u0303"),
        (r"e^{z_j} - z_y", "e^(z_j) - z_y"),
        (r"\max_{j\ne y}\cos\theta_j", "max_(j≠y) cos θ_j"),
        (r"\sqrt{\tfrac1N\sum_n x_n}", "√(1 / N Σ_n x_n)"),
        (r"\|W_c - W_i\|", "‖W_c - W_i‖"),
        (r"\begin{cases}u^2 & u\le\tau\\ 0 & u>\tau\end{cases}", "u^2 for u≤τ; 0 for u>τ"),
        (r"\mathrm{CE}(f, y),\quad c", "CE(f, y), c"),
    ],
)
def test_equations_as_text(latex: str, text: str) -> None:
    assert as_text(latex) == text


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = json.loads(listed(capsys, "kobayashi", "--json"))
    assert entry["loss"] == "kobayashi"
    assert entry["settings"]["strength"] == 0.3
    assert len(json.loads(listed(capsys, "--json"))) == len(lm.LOSSES)
    assert json.loads(listed(capsys, "--models", "--json")).keys() >= list_models().keys()


def test_networks_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    out = listed(capsys, "--models")
    assert all(f"{name} " in out for name in list_models())
    assert "timm/NAME" in out
    out = listed(capsys, "--data")
    assert all(f"{name} " in out for name in SOURCES)
    assert "Licence: non-commercial use only" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cosfase"], "there is no loss 'cosfase'. Closest: cosface"),
        (["--models", "--data"], "one at a time"),
        (["cosface", "--models"], "looked up among the losses"),
        (["--model"], "Did you mean --models?"),
    ],
)
def test_wrong_questions(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list", *words]) == 2
    assert message in capsys.readouterr().err

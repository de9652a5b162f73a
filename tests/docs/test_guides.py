"""The guides about training and predicting: their Python runs, their commands do too."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from app.cli.test_docs import photos

from largemargin.app.cli import command as cli

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "how-to"
GUIDES = (
    *("fine_tuning.md", "tabular.md", "logging.md", "early_stopping.md"),
    *("ood.md", "calibration.md", "texts.md"),
)


def blocks(page: str, language: str) -> list[str]:
    text = (FOLDER / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", GUIDES)
def test_the_python_of_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page, "python")
    assert found
    names: dict[str, object] = {}
    for block in found:  # one goes on from the other
        exec(compile(block, page, "exec"), names)
    check = CHECKS.get(page)
    assert check is None or eval(check, names), check


CHECKS = {
    "fine_tuning.md": "torch.isfinite(loss) and not model.bn1.training and model.fc.training",
    "tabular.md": "accuracy > 0.8 and geometry.accuracy > 0.8",
    "logging.md": "set(pulls) == {'softmax'} and row['pull/cosface'] > 0",
    "early_stopping.md": "best > 0.5 and torch.isfinite(loss)",
    "ood.md": "found.chosen in found.auroc and threshold.accuracy > 0.9",
    "texts.md": "accuracy > 0.85 and geometry.accuracy > 0.85 and probabilities[0, 0] > 0.9",
    "calibration.md": "after.ece < before.ece and after.loss < before.loss",
}
"""What the page says of what it does."""


def commands(page: str) -> list[list[str]]:
    return [
        shlex.split(line)[1:]
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]


PAGES = [page for page in GUIDES if commands(page)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_can_be_given(page: str, tmp_path: Path) -> None:
    for name, *words in commands(page):
        cli.parser_of(name).parse_args(words)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One epoch each, with a file in place of what would be fetched, and trackers that are here."""
    torchvision = pytest.importorskip("torchvision", reason="torchvision has the network")
    safetensors = pytest.importorskip("safetensors.torch", reason="weights are safetensors")
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    photos(tmp_path / "photos", 40, generator)
    photos(tmp_path / "other_photos", 3, generator)
    state = torchvision.models.resnet18().state_dict()
    safetensors.save_file(state, tmp_path / "some.safetensors")
    for name, *given in commands(page):
        runs = sorted((tmp_path / "runs").glob("*"), key=lambda run: run.stat().st_mtime_ns)
        instead = {"RUN": str(runs[-1]) if runs else "", "default": "some.safetensors"}
        words = [instead.get(word, word) for word in given]
        if "mlflow" in words:
            continue
        short = ("--epochs", "1", "--batch_size", "32", "--device", "cpu")
        status = cli.main([name, *words, *(short if name == "train" else ())])
        assert status == 0, capsys.readouterr().err

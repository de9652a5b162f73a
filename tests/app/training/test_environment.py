"""The command of a run as its record tells it."""

import pytest

from largemargin.app.training.processes import command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("/home/me/.venv/bin/largemargin", ["largemargin"]),
        ("/home/me/src/largemargin/__main__.py", ["python", "-m", "largemargin"]),
        ("train.py", ["train.py"]),
    ],
)
def test_a_command_can_be_typed_again_and_names_no_folder(
    typed: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [typed, "train", "--epochs", "3"])
    assert command() == [*told, "train", "--epochs", "3"]

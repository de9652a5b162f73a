"""``largemargin advise``: the advice for a data set, as text and as JSON."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
pytest.importorskip("sklearn", reason="label noise is estimated by a linear head")

from largemargin.app.cli.command import COMMANDS, main


def test_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "digits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("data        1,257 samples, 10 classes")
    assert lines[1] == "label noise about 0%: a linear head, cross-validated on 1,257 samples"
    assert lines[-1].startswith("check       largemargin compare --data digits --seeds 5 ")
    assert len(lines) <= 14


def test_what_is_changed_stands_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "digits", "--label_noise", "0.4", "--pretrained", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["preset"] == "fine_tuning"
    assert found["data"]["label_noise"] == pytest.approx(0.4, abs=0.05)
    assert "--data digits --data.label_noise=0.4 --seeds 5" in found["command"]


def test_a_folder_of_large_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="reads image files")
    for name, count in (("cat", 12), ("dog", 2)):
        (tmp_path / name).mkdir()
        for index in range(count):
            picture = image.new("RGB", (80, 90), (index, count, 0))
            picture.save(tmp_path / name / f"{index}.png")
    assert main(["advise", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "14 samples, 2 classes of 2 to 12 (ratio 6.0)" in told
    assert "label noise unknown: images of 224 x 224 are too large" in told
    assert "advice      preset long_tail: ldam" in told
    assert main(["advise", "nothing"]) == 2
    assert "there is no data called 'nothing'" in capsys.readouterr().err


def test_it_is_a_command() -> None:
    assert "advise" in COMMANDS

"""Full disks, folders that cannot be written, data that is gone: an error, and nothing lost."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from app.data.pictures import class_folders
from faults.children import NEEDS_FORK, Child, Ended, as_nobody, ended, open_folder
from faults.counting import Faults
from faults.small_runs import (
    STEPS,
    assert_same,
    assert_tidy,
    config,
    digits,
    released,
    steps_in,
    trained,
)

from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.training import Run, RunConfig, train
from largemargin.errors import LargeMarginError

pytestmark = NEEDS_FORK
CONTINUE = "Checkpoints written before are whole. When the cause is gone, continue: largemargin"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    digits()
    return trained(tmp_path_factory.mktemp("whole") / "run")


def assert_explained(end: Ended, *reasons: str) -> None:
    assert end.kind == "LargeMarginError", end.error
    assert "the run stopped: " in end.error
    assert any(reason in end.error for reason in reasons), end.error


def assert_continues(folder: Path, whole: Run) -> None:
    """The last checkpoint is whole, and what comes of it is what would have come of the run."""
    if (folder / "checkpoints" / "last.json").exists():
        assert Run(folder).model("last") is not None
    resumed = ended(lambda: str(trained(folder).folder))
    assert resumed.value == str(folder), resumed.error
    assert_same(whole, Run.open(folder))
    assert_tidy(Run.open(folder))


def file_sizes(run: Run) -> list[int]:
    return sorted({path.stat().st_size for path in run.folder.rglob("*") if path.is_file()})


@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_files_that_cannot_grow_any_further(
    tmp_path: Path, whole: Run, faults: Faults, times: int
) -> None:
    """The system refuses every byte after the limit, in whatever file, as a full disk does."""
    chance = random.Random(times)
    sizes = file_sizes(whole)
    for number in range(times):
        folder, limit = tmp_path / f"{number}", chance.randint(sizes[0] // 2 + 40, sizes[-1] - 1)

        def limited(folder: Path = folder, limit: int = limit) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return trained(folder).result

        end = ended(limited)
        faults.inject("no byte more in a file")
        assert_explained(end, "File too large", "a checkpoint could not be written")
        if folder.exists():
            assert CONTINUE in end.error
            assert_continues(folder, whole)
        shutil.rmtree(folder, ignore_errors=True)


def fail_after(count: int, number: int) -> Callable[[], None]:
    """In a child: the ``count``-th file that is brought to the disk finds none."""

    def patch() -> None:
        real, left = os.fsync, [count]

        def fsync(handle: int) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(number, os.strerror(number))
            real(handle)

        os.fsync = fsync

    return patch


@pytest.mark.parametrize(
    ("number", "points"),
    [
        (errno.ENOSPC, (30,)),
        pytest.param(errno.EIO, (17,), marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, range(1, 60, 2), marks=pytest.mark.slow),
    ],
    ids=["full", "broken", "full, everywhere"],
)
def test_a_disk_that_fails_while_a_run_writes(
    tmp_path: Path, whole: Run, faults: Faults, number: int, points: tuple[int, ...]
) -> None:
    for point in points:
        folder, patch = tmp_path / f"{point}", fail_after(point, number)

        def failing(folder: Path = folder, patch: Callable[[], None] = patch) -> Any:
            patch()
            return trained(folder).result

        assert_explained(ended(failing), os.strerror(number))
        faults.inject(os.strerror(number))
        if folder.exists():
            assert_continues(folder, whole)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many kilobytes."""
    mounted: list[Path] = []

    def make(kilobytes: int) -> Path:
        place = tmp_path / f"disk{kilobytes}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount on this system")
def test_a_disk_that_is_really_full(
    tmp_path: Path, whole: Run, faults: Faults, small_disk: Callable[[int], Path]
) -> None:
    for kilobytes in (16, 40, 64, 90, 120):
        place = small_disk(kilobytes)
        end = ended(lambda place=place: trained(place / "run").result)
        faults.inject("a full disk")
        assert_explained(end, "No space left on device")
        if (place / "run").exists():
            shutil.copytree(place / "run", tmp_path / f"{kilobytes}")
            assert_continues(tmp_path / f"{kilobytes}", whole)


def test_a_folder_that_cannot_be_written(tmp_path: Path, faults: Faults) -> None:
    closed = open_folder(tmp_path / "closed")
    closed.chmod(0o555)
    digits()
    end = ended(as_nobody(lambda: trained(closed / "run").result))
    faults.inject("a folder without permission to write")
    assert end.kind == "LargeMarginError", end.error
    assert "cannot make the folder" in end.error
    assert "Permission denied" in end.error


@pytest.mark.slow
def test_a_folder_that_becomes_read_only(tmp_path: Path, whole: Run, faults: Faults) -> None:
    folder = open_folder(tmp_path) / "run"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)

    def closing() -> Any:
        def close(row: dict[str, Any]) -> None:
            if row["epoch"] == 1:
                folder.joinpath("checkpoints").chmod(0o555)
                folder.joinpath("metrics.jsonl").chmod(0o444)

        return train(config(), folder=folder, data=digits(), progress=False, on_epoch=close).result

    end = ended(as_nobody(closing))
    faults.inject("a folder that becomes read-only")
    assert_explained(end, "Permission denied")
    folder.joinpath("checkpoints").chmod(0o777)
    folder.joinpath("metrics.jsonl").chmod(0o666)
    assert_continues(folder, whole)


def photos(folder: Path, **changes: Any) -> RunConfig:
    """A run that reads its images from files all the time."""
    data = DataConfig("folder", str(folder), resident="no", **changes)
    return RunConfig(
        data=data,
        model=ModelConfig("mlp", options={"hidden": (8,)}),
        epochs=400,
        batch_size=4,
        device="cpu",
        gradients_every=0,
        geometry_samples=0,
        measure=False,
    )


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_data_that_vanishes(tmp_path: Path, faults: Faults, workers: int) -> None:
    images = class_folders(tmp_path / "photos", ("a", "b"), 8, height=8, width=8)
    folder = tmp_path / "run"
    settings = photos(images, workers=workers)
    child = Child(lambda: train(settings, folder=folder, progress=False).result)
    child.until((folder / "checkpoints" / "last.json").exists)
    images.rename(tmp_path / "gone")
    end = child.wait()
    faults.inject("images that vanish while they are read")
    assert end.kind == "LargeMarginError", end.error
    assert "cannot be read: No such file or directory" in end.error
    assert len(end.error) < 500  # no traceback of a worker in it
    assert Run(folder).model("last") is not None
    with pytest.raises(LargeMarginError, match="is not at"):
        train(settings, folder=folder, resume=True, progress=False)
    (tmp_path / "gone").rename(images)
    (images / "a" / "000.png").rename(images / "a" / "new.png")
    with pytest.raises(LargeMarginError, match=r"the data is not what .* began with: "):
        train(settings, folder=folder, resume=True, progress=False)
    assert Run(folder).model("last") is not None


def test_two_runs_at_once_in_one_folder(tmp_path: Path, faults: Faults) -> None:
    """Whoever comes first trains; the other touches nothing, not even the settings."""
    folder, log = tmp_path / "run", tmp_path / "steps"
    digits()
    first = Child(lambda: trained(folder, log=log, linger=STEPS, seed=1).result)
    first.until(lambda: steps_in(log) >= STEPS)
    first.kill(signal.SIGSTOP)  # it is alive, and still trains there
    second = ended(lambda: trained(folder, seed=2).result)
    third = ended(lambda: train(config(seed=3), folder=folder, data=digits()).result)
    first.kill(signal.SIGCONT)
    released(log)
    assert first.wait().error == ""
    faults.inject("another run in the same folder", 2)
    assert "another process is training in" in second.error
    assert "exists already and is not empty" in third.error
    assert Run.open(folder).config.seed == 1
    assert_tidy(Run.open(folder))


def test_runs_that_begin_in_the_same_moment(tmp_path: Path, faults: Faults) -> None:
    digits()
    folder = tmp_path / "run"

    def begun(seed: int) -> Any:
        run = train(config(seed=seed, epochs=1), folder=folder, data=digits(), progress=False)
        return run.config.seed

    children = [Child(lambda seed=seed: begun(seed)) for seed in range(4)]
    ends = [child.wait() for child in children]
    faults.inject("another run in the same folder", 3)
    (winner,) = [end.value for end in ends if not end.error]
    assert Run.open(folder).config.seed == winner
    for end in ends:
        assert end.value == winner or end.kind == "LargeMarginError", end.error
    assert_tidy(Run.open(folder))

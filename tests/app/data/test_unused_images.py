"""Folders that are laid out a little differently: nothing in them is left out in silence."""

import shutil

import pytest
from app.data.pictures import class_folders, picture

from largemargin.app.data import DataConfig, load_data
from largemargin.errors import LargeMarginError


def load(path):
    return load_data(DataConfig("folder", str(path), validation=0))


def test_images_beside_the_class_folders(tmp_path):
    class_folders(tmp_path, ("a", "b"), 3)
    picture(tmp_path / "lost.png", 50)
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"^1 image files are not used, .* in them: lost\.png\.$"):
        data = load(tmp_path)
    assert (len(data.train), data.record["other_files"]) == (6, 2)


def test_a_part_by_a_name_that_means_nothing(tmp_path):
    class_folders(tmp_path / "train", ("a", "b"), 3)
    (tmp_path / "notebooks" / "old").mkdir(parents=True)
    load(tmp_path)
    class_folders(tmp_path / "holdout", ("b",), 3, first=50)
    with pytest.warns(UserWarning, match=r"holdout has folders of the same classes .* not used"):
        load(tmp_path)


def test_test_images_without_classes(tmp_path):
    class_folders(tmp_path / "train", ("a", "b"), 3)
    picture(tmp_path / "test" / "1.png", 50)
    with pytest.raises(LargeMarginError, match=r"images in .*test lie in no folders of classes"):
        load(tmp_path)


@pytest.mark.parametrize("parts", [("",), ("train", "test")])
def test_a_folder_around_the_data(tmp_path, parts):
    for place, part in enumerate(parts):
        class_folders(tmp_path / "archive" / part, ("a", "b"), 3, first=50 * place)
    with pytest.raises(
        LargeMarginError, match=r"only the folder archive, .* set path to .*archive"
    ):
        load(tmp_path)
    assert len(load(tmp_path / "archive").train) == 6
    shutil.rmtree(tmp_path / "archive")
    class_folders(tmp_path, ("a",), 3)
    with pytest.raises(LargeMarginError, match="at least 2 classes"):
        load(tmp_path)

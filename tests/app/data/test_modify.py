"""Modifiers: exact counts, nested fractions, what they leave alone, and that they compose."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from largemargin.app.data import DataConfig, class_counts_profile, load_data
from largemargin.app.data.modify import modified, round_half_up, shares
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.errors import LargeMarginError

SIZES = (100, 60, 40)


def source(sizes=SIZES, test=10, classes=("ant", "bee", "cat")):
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    pixels = torch.arange(len(labels), dtype=torch.float32).reshape(-1, 1, 1, 1) / len(labels)
    held = torch.arange(test) % len(sizes)
    return Source(
        tuple(classes[: len(sizes)]),
        {
            "train": in_memory("train", pixels, labels),
            "test": in_memory("test", torch.zeros(test, 1, 1, 1), held),
        },
    )


def counts(samples, classes=3):
    return torch.bincount(samples.labels, minlength=classes).tolist()


def test_every_modifier_at_once_in_the_documented_order():
    config = DataConfig(
        classes=("cat", "ant"),
        validation=0.2,
        fraction=0.5,
        imbalance="exp",
        imbalance_ratio=4,
        label_noise=0.25,
        seed=3,
    )
    after, record = modified(source(), config)
    assert [each["name"] for each in record] == [
        "classes",
        "validation",
        "fraction",
        "imbalance",
        "label_noise",
    ]
    # ant 100, cat 40 -> validation 20 + 8 -> 80, 32 -> half 40, 16 -> largest 40: 40, 10.
    assert after.classes == ("ant", "cat")
    assert counts(after.splits["validation"], 2) == [20, 8]
    clean = after.train.extra["clean_label"]
    assert torch.bincount(clean).tolist() == [40, 10]
    assert int((after.train.labels != clean).sum()) == round(0.25 * 50 + 0.25)  # 12.5 rounds up
    assert [each["images"] for each in record[1:]] == [28, 56, 50, 50]
    assert [record[1]["share"], record[2]["share"], record[4]["share"]] == [0.2, 0.5, 0.25]
    assert (record[3]["kind"], record[3]["ratio"]) == ("exp", 4)
    assert record[4]["changed"] == 13
    assert len(after.splits["test"]) == 4 + 3


def test_what_is_not_asked_for_is_not_done():
    after, record = modified(source(), DataConfig(validation=0))
    assert record == []
    assert after.train.ids == source().train.ids
    assert "clean_label" not in after.train.extra


def test_test_images_may_choose_the_best_epoch():
    """All training images stay, whatever share would be held out; without test images: an error."""
    before = source()
    after, record = modified(before, DataConfig(validation_from="test", validation=0.5))
    assert after.splits["validation"].ids == before.splits["test"].ids
    assert after.train.ids == before.train.ids
    assert (record[0]["part"], record[0]["images"]) == ("test", 10)
    alone = Source(before.classes, {"train": before.train})
    with pytest.raises(LargeMarginError, match="validation_from is test, but there are no test"):
        modified(alone, DataConfig(validation_from="test"))


def test_validation_images_of_the_data_are_taken_as_they_are():
    before = source()
    own = in_memory("validation", torch.zeros(3, 1, 1, 1), torch.arange(3))
    after, record = modified(before.with_splits({"validation": own}), DataConfig(validation=0.2))
    assert record == []
    assert after.splits["validation"].ids == own.ids
    assert after.train.ids == before.train.ids


def test_draws_depend_on_the_seed_alone():
    """Neither on torch's own random numbers nor on what was drawn before."""
    settings = {"validation": 0.1, "fraction": 0.9, "imbalance": "exp", "imbalance_ratio": 4}

    def drawn(seed):
        config = DataConfig(label_noise=0.3, seed=seed, **settings)
        train = modified(source((60, 60, 60)), config)[0].train
        return train.ids, train.extra["clean_label"].tolist(), train.labels.tolist()

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert first == again
    assert first[0] != other[0]
    assert first[2] != other[2]


@pytest.mark.parametrize("name", ["imbalance", "label_noise"])
def test_every_modifier_has_a_seed_of_its_own(name):
    settings = {"imbalance": {"imbalance": "exp", "imbalance_ratio": 4}}.get(name, {name: 0.3})

    def drawn(seed):
        config = DataConfig(validation=0, seed=seed, **settings)
        train = modified(source((60, 60, 60)), config)[0].train
        return train.ids, train.labels.tolist()

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_the_held_out_part_is_the_same_whatever_follows():
    plain, _ = modified(source(), DataConfig(validation=0.1))
    settings = {"fraction": 0.5, "imbalance": "step", "imbalance_ratio": 5, "label_noise": 0.4}
    busy, _ = modified(source(), DataConfig(validation=0.1, **settings))
    held = busy.splits["validation"]
    assert held.ids == plain.splits["validation"].ids
    assert set(held.ids).isdisjoint(plain.train.ids)
    original = source().train
    assert held.labels.tolist() == [original.labels[original.ids.index(i)] for i in held.ids]
    assert torch.equal(busy.splits["test"].labels, source().splits["test"].labels)


def test_smaller_fractions_are_parts_of_larger_ones():
    parts = [
        set(modified(source(), DataConfig(validation=0, fraction=each))[0].train.ids)
        for each in (0.1, 0.35, 0.8)
    ]
    assert parts[0] < parts[1] < parts[2]
    assert [len(each) for each in parts] == [20, 70, 160]


def test_fractions_of_unequal_classes_that_add_an_image_to_each_are_parts_too():
    sizes = torch.tensor([7, 11, 19, 23, 40])
    steps = [i / 100 for i in range(1, 101)]
    for low, high in itertools.combinations(steps, 2):
        if (high - low) * int(sizes.min()) >= 1:
            assert (shares(sizes, low) <= shares(sizes, high)).all(), (low, high)


def test_a_tiny_fraction_keeps_one_of_every_class():
    after, _ = modified(source((100, 3, 1)), DataConfig(validation=0, fraction=0.01))
    assert counts(after.train) == [1, 1, 1]


def test_images_follow_their_labels():
    original = source().train
    after, _ = modified(source(), DataConfig(validation=0.3, fraction=0.5))
    for i in range(len(after.train)):
        before = original.ids.index(after.train.ids[i])
        assert torch.equal(after.train.pixels[i], original.pixels[before])
        assert after.train.labels[i] == original.labels[before]


def test_label_noise_goes_to_every_other_class_alike():
    sizes = (3000, 3000, 3000)
    after, record = modified(source(sizes), DataConfig(validation=0, label_noise=0.4))
    clean, noisy = after.train.extra["clean_label"], after.train.labels
    assert record[0]["changed"] == 3600
    for label in range(3):
        went = torch.bincount(noisy[(clean == label) & (noisy != clean)], minlength=3).tolist()
        assert went[label] == 0
        others = [count for other, count in enumerate(went) if other != label]
        assert abs(others[0] - others[1]) < 5 * sum(others) ** 0.5


def test_no_label_survives_full_noise():
    after, _ = modified(source(), DataConfig(validation=0, label_noise=1.0))
    assert bool((after.train.labels != after.train.extra["clean_label"]).all())


@pytest.mark.parametrize("kind", ["exp", "step"])
def test_imbalance_has_the_counts_of_the_profile(kind):
    config = DataConfig(validation=0, imbalance=kind, imbalance_ratio=10)
    after, _ = modified(source((100, 100, 100)), config)
    wanted = class_counts_profile(3, largest=100, ratio=10, kind=kind)
    assert counts(after.train) == wanted.tolist()


def test_imbalance_of_unequal_classes_is_as_large_as_they_allow():
    after, _ = modified(
        source((50, 90, 90)), DataConfig(validation=0, imbalance="exp", imbalance_ratio=4)
    )
    assert counts(after.train) == [50, 25, 12]


@pytest.mark.parametrize(
    ("kind", "ratio", "sizes", "kept"),
    [
        # What has the profile already stays as it is.
        ("exp", 100, (300, 139, 64, 30, 13, 6, 3), None),
        ("step", 7.5, (59, 59, 59, 7, 7, 7), None),
        ("exp", 2, (3, 1), (3, 1)),
        # The smallest that the ratio allows.
        ("exp", 4, (4, 4, 4), (4, 2, 1)),
        ("step", 2, (88, 19), (39, 19)),
    ],
)
def test_imbalance_leaves_out_no_more_than_it_must(kind, ratio, sizes, kept):
    config = DataConfig(validation=0, imbalance=kind, imbalance_ratio=ratio)
    after, _ = modified(source(sizes, classes="abcdefg"), config)
    assert counts(after.train, len(sizes)) == list(kept or sizes)


def test_other_seeds_draw_other_images():
    ids = [
        modified(source(), DataConfig(validation=0.2, fraction=0.5, seed=seed))[0].train.ids
        for seed in (0, 0, 1)
    ]
    assert ids[0] == ids[1] != ids[2]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.floats(0, 1, allow_subnormal=False),
)
def test_shares_add_up_and_are_at_most_one_off(sizes, share):
    found = shares(torch.tensor(sizes), share)
    exact = np.array(sizes) * share
    assert abs(int(found.sum()) - sum(sizes) * share) <= 0.5 + 1e-6
    assert (np.abs(found.numpy() - exact) < 1 + 1e-6).all()
    assert (found.numpy() <= np.array(sizes)).all()


def test_of_equal_shares_the_first_are_rounded_up():
    assert shares(torch.full((10,), 3), 0.1).tolist() == [1] * 3 + [0] * 7


def test_halves_are_rounded_up_however_they_are_computed():
    """0.58 * 25 is computed as 14.499999999999998."""
    assert round_half_up(0.58 * 25) == 15
    assert round_half_up(14.49) == 14
    after, _ = modified(source((5, 10, 10)), DataConfig(validation=0, label_noise=0.58))
    assert int((after.train.labels != after.train.extra["clean_label"]).sum()) == 15


def test_a_class_of_one_image_stays_in_training():
    after, _ = modified(source((10, 10, 1)), DataConfig(validation=0.5))
    assert counts(after.train) == [5, 5, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": ("ant", "dat")}, "classes holds 'dat', .* Did you mean cat"),
        ({"classes": ("ant",)}, "at least 2 classes are needed"),
        ({"validation": 1.0}, "validation must be"),
        ({"validation": -0.1}, "validation must be"),
        ({"fraction": 0.0}, "fraction must be"),
        ({"fraction": 1.5}, "fraction must be"),
        ({"label_noise": 1.5}, "label_noise must be"),
        ({"label_noise": -0.1}, "label_noise must be"),
        ({"imbalance": "exp", "imbalance_ratio": 0.5}, "imbalance_ratio must be"),
        ({"imbalance": "exp", "imbalance_ratio": 1000}, "Lower the ratio"),
        ({"validation": 0.001}, "less than one image"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(LargeMarginError, match=message):
        modified(source(), DataConfig(**settings))


def test_a_class_without_training_images_is_an_error():
    with pytest.raises(LargeMarginError, match="no training images of bee"):
        modified(source((5, 0, 5)), DataConfig())
    with pytest.raises(LargeMarginError, match="no training images of cat"):
        modified(source((5, 5, 0)), DataConfig())
    after, _ = modified(source((5, 0, 5)), replace(DataConfig(), classes=("ant", "cat")))
    assert after.classes == ("ant", "cat")


def test_what_is_held_out_of_many_small_classes_comes_from_all_over():
    many = source((3,) * 200, classes=[f"{number:03d}" for number in range(200)])
    held = [
        modified(many, DataConfig(validation=0.1, seed=seed))[0].splits["validation"].labels
        for seed in (0, 0, 1)
    ]
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])
    for labels in held:
        assert len(labels.unique()) == len(labels) == 60
        # By order it would be the first 60. Of 60 out of 200, 30 are expected in either half.
        assert 15 <= int((labels < 100).sum()) <= 45


def test_classes_of_one_image_each_have_none_to_hold_out():
    with pytest.raises(LargeMarginError, match="each has one, which training needs"):
        modified(source((1, 1, 1)), DataConfig(validation=0.5))
    with pytest.raises(LargeMarginError, match="less than one image"):
        modified(source((1, 9, 9)), DataConfig(validation=0.01))


def test_digits_keep_their_split():
    """The one of the first release: numbers in documents depend on it."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_data(DataConfig(validation=0))
    digits = load_digits()
    train, test = train_test_split(
        list(range(1797)), test_size=0.3, stratify=digits.target.tolist(), random_state=0
    )
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    assert torch.equal(data.train.pixels, images[train])
    assert torch.equal(data.test.labels, torch.as_tensor(digits.target)[test])
    assert data.size == (8, 8)
    assert data.channels == 1

"""Batches: a function of (seed, epoch), whatever the ranks, the workers and the first step."""

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from app.data.pictures import class_folders

from largemargin.app.data import Augment, Batches, DataConfig, Samples, load_data
from largemargin.errors import LargeMarginError


def samples(count=22, channels=3, size=6, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, channels, size, size), generator=generator)
    pixels = pixels.to(torch.uint8) if dtype == torch.uint8 else pixels / 255
    ids = tuple(f"train/{i}" for i in range(count))
    return Samples(torch.arange(count) % 3, ids, pixels)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve image files of two classes, not in memory."""
    root = class_folders(tmp_path_factory.mktemp("files"), ("a", "b"), 6, height=20, width=28)
    config = DataConfig("folder", str(root), size=16, validation=0, resident="no")
    return load_data(config).train


def same(first, second):
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.indices, b.indices)


@pytest.mark.parametrize("kind", ["none", "flip", "crop_flip", "road", "perspective_flip"])
def test_a_batch_holds_what_it_says(kind):
    source = samples()
    batches = Batches(source, 8, seed=5, augment=Augment(kind))
    seen = []
    for batch in batches.epoch(2):
        assert batch.images.dtype == torch.float32
        assert batch.images.min() >= 0
        assert batch.images.max() <= 1
        assert batch.images.shape == (len(batch.labels), 3, 6, 6)
        assert torch.equal(batch.labels, source.labels[batch.indices])
        assert batch.labels.dtype == batch.indices.dtype == torch.int64
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(22))
    assert seen != sorted(seen)
    assert [len(batch.labels) for batch in batches.epoch(0)] == [8, 8, 6]


def test_images_without_augmentation_are_the_stored_ones():
    for dtype in (torch.uint8, torch.float32):
        source = samples(dtype=dtype)
        for batch in Batches(source, 4).epoch(1):
            for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
                torch.testing.assert_close(image, source.image(index), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["none", "crop_flip", "road"])
def test_resuming_gives_what_was_left(kind):
    batches = Batches(samples(), 4, seed=1, augment=Augment(kind, padding=2))
    whole = list(batches.epoch(3))
    for start in range(len(batches)):
        same(list(batches.epoch(3, start=start)), whole[start:])
    assert list(batches.epoch(3, start=len(batches))) == []


@pytest.mark.parametrize("kind", ["none", "crop_flip", "resized_crop"])
def test_epochs_and_seeds_differ_and_repeat(kind, files):
    for source in (samples(), files):
        make = lambda seed, source=source: Batches(source, 4, seed=seed, augment=Augment(kind))  # noqa: E731
        same(list(make(0).epoch(1)), list(make(0).epoch(1)))
        for other in (make(0).epoch(2), make(1).epoch(1)):
            first, second = next(make(0).epoch(1)), next(other)
            assert not torch.equal(first.indices, second.indices)


def test_augmentation_differs_between_epochs_and_images():
    source = samples(64)
    plain = Batches(source, 64, shuffle=False)
    changed = Batches(source, 64, shuffle=False, augment=Augment("crop_flip", padding=2))
    first, second = (next(changed.epoch(epoch)).images for epoch in (0, 1))
    same_as_stored = (first == next(plain.epoch(0)).images).flatten(1).all(1)
    assert same_as_stored.float().mean() < 0.2  # 1 in 50 draws changes nothing
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["none", "crop_flip", "road"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_are_one_process(kind, world, files):
    for source in (samples(24), files):
        settings = {"seed": 3, "augment": Augment(kind)}
        one = list(Batches(source, 8, **settings).epoch(1))
        each = [
            list(Batches(source, 8, rank=rank, world=world, **settings).epoch(1))
            for rank in range(world)
        ]
        for step, batch in enumerate(one):
            parts = [each[rank][step] for rank in range(world)]
            assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
            assert torch.equal(torch.cat([part.indices for part in parts]), batch.indices)


def test_the_last_batch_is_cut_to_a_multiple_of_the_ranks():
    sizes = {
        (22, 1, False): [8, 8, 6],
        (22, 4, False): [2, 2, 1],
        (17, 2, False): [4, 4],
        (22, 1, True): [8, 8],
    }
    for (count, world, drop), wanted in sizes.items():
        for rank in range(world):
            batches = Batches(samples(count), 8, rank=rank, world=world, drop_last=drop)
            assert [len(batch.labels) for batch in batches.epoch(0)] == wanted
            assert len(batches) == len(wanted)


@pytest.mark.parametrize("kind", ["crop_flip", "resized_crop"])
def test_workers_change_nothing(kind, files):
    settings = {"seed": 2, "augment": Augment(kind)}
    here = Batches(files, 4, **settings)
    there = Batches(files, 4, workers=2, **settings)
    same(list(here.epoch(0)), list(there.epoch(0)))
    next(there.epoch(5))  # an epoch that is broken off
    same(list(here.epoch(1, start=1)), list(there.epoch(1, start=1)))


def test_an_epoch_does_not_go_on_with_the_images_of_another(files):
    batches = Batches(files, 4, workers=1)
    left = batches.epoch(0)
    next(left)
    for batch in batches.epoch(1):  # one that was left early does not disturb the next
        for index, image in zip(batch.indices.tolist(), batch.images, strict=True):
            assert torch.equal(image, files.image(index))
    with pytest.raises(LargeMarginError, match=r"epoch 0 .* cannot go on: another was begun"):
        next(left)
    both = Batches(files, 4, workers=0)
    for one, two in zip(both.epoch(0), both.epoch(1), strict=True):
        for batch in (one, two):
            assert torch.equal(batch.images[0], files.image(int(batch.indices[0])))


def test_workers_end_with_their_batches(files):
    before = set(multiprocessing.active_children())  # of other tests
    batches = Batches(files, 4, workers=2)
    list(batches.epoch(0))
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    del batches
    assert not workers & set(multiprocessing.active_children())


def test_a_worker_that_its_parent_ends_has_not_failed(files):
    # As at the end of a program that still holds the batches: torch would report it as killed.
    batches = Batches(files, 4, workers=1)
    list(batches.epoch(0))
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0


def test_files_and_memory_give_the_same_images(files):
    held = Samples(files.labels, files.ids, torch.stack([files.raw(i) for i in range(len(files))]))
    same(list(Batches(held, 5).epoch(0)), list(Batches(files, 5).epoch(0)))
    for i in range(len(files)):
        one = Augment("road").one
        assert torch.equal(one(files, i, 0, 4), one(held, i, 0, 4))


@pytest.mark.parametrize("kind", ["resized_crop", "road"])
def test_one_image_changes_with_seed_epoch_and_index(kind, files):
    one = Augment(kind).one
    same_twice = [one(files, 0, 3, 5) for _ in range(2)]
    assert torch.equal(*same_twice)
    for seed, epoch in ((4, 5), (3, 6)):
        assert not torch.equal(one(files, 0, seed, epoch), same_twice[0])
    # The same picture at two places of the data is changed in two ways.
    twice = files.subset([0, 0])
    assert not torch.equal(one(twice, 0, 3, 5), one(twice, 1, 3, 5))


def test_drawing_images_leaves_the_global_generator_alone(files):
    before = torch.get_rng_state()
    list(Batches(files, 4, augment=Augment("road")).epoch(0))
    list(Batches(samples(), 4, augment=Augment("crop_flip")).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_iterating_gives_pairs_as_loaders_do():
    batches = Batches(samples(5), 2, shuffle=False)
    labels = [labels.tolist() for images, labels in batches]
    assert labels == [[0, 1], [2, 0], [1]]
    assert labels == [labels.tolist() for images, labels in batches]
    drawn = Batches(samples(), 8, seed=5, augment=Augment("crop_flip"))
    for (images, labels), batch in zip(drawn, drawn.epoch(0), strict=True):
        assert torch.equal(images, batch.images)
        assert torch.equal(labels, batch.labels)
    usual = Batches(samples(), 8)
    assert torch.equal(usual.order(3), Batches(samples(), 8, seed=0).order(3))
    assert usual.workers == 0


@pytest.mark.parametrize("kind", ["crop_flip", "flip"])
def test_crop_and_flip_are_torchvisions(kind):
    """The batched form against padding, slicing and flipping one image at a time."""
    augment = Augment(kind, padding=2)
    images = samples(40).pixels
    draws = augment.draw(40, (6, 6), torch.Generator().manual_seed(0))
    found = augment.apply(images, draws)
    padding = 2 if kind == "crop_flip" else 0
    for i in range(40):
        padded = F.pad(images[i], [padding] * 4)
        dy, dx = int(draws.dy[i]), int(draws.dx[i])
        wanted = padded[:, dy : dy + 6, dx : dx + 6]
        wanted = wanted.flip(-1) if draws.flip[i] else wanted
        assert torch.equal(found[i], wanted)
    if kind == "crop_flip":
        assert draws.dy.unique().tolist() == draws.dx.unique().tolist() == [0, 1, 2, 3, 4]
    assert 10 < int(draws.flip.sum()) < 30


def test_taking_is_indexing_and_applying():
    augment = Augment("crop_flip")
    images = samples(10).pixels
    index = torch.tensor([7, 7, 2])
    draws = augment.draw(3, generator=torch.Generator().manual_seed(4))
    assert torch.equal(augment.take(images, index, draws), augment.apply(images[index], draws))


def test_the_plan_is_what_the_batches_are():
    batches = Batches(samples(), 8, seed=9, augment=Augment("crop_flip"), rank=1, world=2)
    plan = batches.plan(4)
    for step, batch in enumerate(batches.epoch(4)):
        first, last = batches.rows(step)
        index = plan.order[first:last]
        images = batches.augment.take(batches.pixels, index, plan.draws.rows(first, last))
        assert torch.allclose(images.float() / 255, batch.images, rtol=1e-6, atol=0)
        assert torch.equal(index, batch.indices)


def test_images_may_be_changed_twice():
    """The first images are those of batches that are changed once, the second ones others."""
    augment = Augment("crop_flip")
    once = Batches(samples(), 8, seed=9, augment=augment)
    twice = Batches(samples(), 8, seed=9, augment=augment, twice=True)
    again = Batches(samples(), 8, seed=9, augment=augment, twice=True)
    for one, two, same in zip(once.epoch(1), twice.epoch(1), again.epoch(1), strict=True):
        first, second = two.images.chunk(2)
        assert torch.equal(first, one.images)
        assert not torch.equal(first, second)
        assert torch.equal(two.images, same.images)
        assert torch.equal(two.labels, one.labels)
    index, plan = twice.plan(0).order[:3], twice.plan(0)
    wanted = augment.take(twice.pixels, index, plan.others.rows(0, 3)).float() / 255
    found = next(twice.epoch(0)).images[8 : 8 + 3]
    assert torch.allclose(found, wanted, rtol=1e-6)


def test_images_are_changed_twice_only_in_memory(files):
    with pytest.raises(LargeMarginError, match=r"noise\.crop own needs images in memory"):
        Batches(files, 4, augment=Augment("crop_flip"), twice=True)


def test_resized_crops_are_cut_from_the_whole_picture(files):
    """A crop from the file keeps detail that a crop from the small image has lost."""
    held = Samples(files.labels, files.ids, torch.stack([files.raw(i) for i in range(len(files))]))
    augment = Augment("resized_crop")
    sharp = torch.stack([augment.one(files, i, 0, 0) for i in range(12)]).float()
    soft = torch.stack([augment.one(held, i, 0, 0) for i in range(12)]).float()
    assert sharp.shape == soft.shape == (12, 3, 16, 16)
    detail = [each.diff(dim=-1).abs().mean() for each in (sharp, soft)]
    assert detail[0] > detail[1]


@pytest.mark.gpu
def test_the_device_gives_the_images_of_the_cpu():
    source = samples(64)
    settings = {"seed": 1, "augment": Augment("crop_flip")}
    on_device = list(Batches(source, 16, device="cuda", **settings).epoch(2))
    assert on_device[0].images.is_cuda
    assert not on_device[0].indices.is_cuda
    for a, b in zip(on_device, Batches(source, 16, **settings).epoch(2), strict=True):
        assert torch.equal(a.images.cpu(), b.images)
        assert torch.equal(a.labels.cpu(), b.labels)


@pytest.mark.gpu
def test_a_cuda_graph_holds_the_augmentation():
    batches = Batches(samples(64), 16, device="cuda", seed=1, augment=Augment("crop_flip"))
    plan = batches.plan(0)
    index, draws = plan.order[:16].clone(), plan.draws.rows(0, 16)
    held = type(draws)(*(each.clone() for each in draws))
    batches.augment.take(batches.pixels, index, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images = batches.augment.take(batches.pixels, index, held).float().div(255)
    for step, batch in enumerate(batches.epoch(0)):
        first, last = batches.rows(step)
        index.copy_(plan.order[first:last])
        for own, new in zip(held, plan.draws.rows(first, last), strict=True):
            own.copy_(new)
        graph.replay()
        assert torch.equal(images, batch.images)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Batches(samples(), 0), "batch_size must be"),
        (lambda: Batches(samples(), 6, world=4), "multiple of their number, 4"),
        (lambda: Batches(samples(), 6, world=2, rank=2), "rank must be"),
        (lambda: Batches(samples(), 4).epoch(0, start=9), "start must be"),
        (lambda: Augment("mixup"), "augment must be one of"),
        (lambda: Augment("road").draw(3), "image by image"),
        (lambda: Samples(torch.zeros(2).long(), ("a",), torch.zeros(2, 1, 1, 1)), "2 labels and 1"),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call()

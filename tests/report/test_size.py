"""Five runs of 10,000 samples fit into the size a page may have."""

import random
from dataclasses import replace

import torch
from report.made import geometry

from largemargin.data import Samples
from largemargin.measuring import embed_arrays
from largemargin.measuring.distributions import describe
from largemargin.report.observed import HOVER_SIDE, WORST_SIDE, Observed, pictures
from largemargin.report.page import render
from largemargin.report.sections import all_sections
from largemargin.report.subjects import Subject, Subjects

LIMIT = 15_000_000


def observed(seed: int) -> Observed:
    """The largest there can be: every picture is noise, which no PNG makes smaller."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(500) % 10
    rows = torch.randn(500, 8, generator=generator)
    pixels = torch.randint(0, 256, (240, 3, 96, 96), generator=generator, dtype=torch.uint8)
    samples = Samples(labels[:240], [f"test/{at}" for at in range(240)], pixels)
    logits = torch.randn(500, 10, generator=generator)
    return Observed(
        embeddings=embed_arrays(
            rows,
            labels,
            noisy=rows + 0.1,
            logits=logits,
            noisy_logits=logits,
            method="pca",
            samples=500,
        ),
        own_angle=describe(90 * torch.rand(10_000, generator=generator)),
        rival_angle=describe(90 * torch.rand(10_000, generator=generator)),
        angle_samples=10_000,
        ids={at: f"test/{at}" for at in range(500)},
        pictures=pictures(samples, range(240), HOVER_SIDE),
        worst_pictures=pictures(samples, range(20), WORST_SIDE),
    )


def test_five_runs_of_ten_thousand_samples() -> None:
    found = geometry(classes=10, samples=10_000, dim=64)
    seen = observed(0)
    rows = tuple(
        {
            "kind": "epoch",
            "epoch": epoch,
            "step": epoch,
            "loss": random.random(),
            "lr": 0.1,
            "terms": {"a": random.random(), "b": random.random()},
            "validation": {"accuracy": random.random(), "loss": random.random()},
        }
        for epoch in range(300)
    )
    first = Subject("model 0", found, tuple("abcdefghij"), rows=rows, observed=seen)
    each = tuple(
        replace(first, name=f"model {at}", data={"record": {"digests": {"test": f"data {at}"}}})
        for at in range(5)
    )
    subjects = Subjects(each)
    text = render(subjects, all_sections(subjects), "five")
    assert len(text.encode()) < LIMIT
    assert len(seen.pictures) == 240

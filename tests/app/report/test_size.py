"""Five runs of 10,000 samples fit into the size a page may have, also with 1,000 classes."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from app.report.made import geometry
from app.report.reading import Page

from largemargin.app.data import Samples
from largemargin.app.report.page import render, report
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.report.sample_views import (
    HOVER_PICTURES,
    HOVER_SIDE,
    NEIGHBOURS,
    WORST_SIDE,
    Neighbour,
    SampleViews,
    pictures,
)
from largemargin.app.report.sections import all_sections
from largemargin.app.report.sections.margins import DRAWN, SHOWN
from largemargin.measuring import embed_arrays

LIMIT = 15_000_000


def observed(seed: int) -> SampleViews:
    """The largest there can be: every picture is noise, which no PNG makes smaller."""
    generator = torch.Generator().manual_seed(seed)
    count = HOVER_PICTURES
    labels = torch.arange(count) % 10
    rows = torch.randn(count, 8, generator=generator)
    pixels = torch.randint(0, 256, (count, 3, 48, 48), generator=generator, dtype=torch.uint8)
    samples = Samples(labels, [f"test/{at}" for at in range(count)], pixels)
    logits = torch.randn(count, 10, generator=generator)
    return SampleViews(
        embeddings=embed_arrays(
            rows,
            labels,
            noisy=rows + 0.1,
            logits=logits,
            noisy_logits=logits,
            method="pca",
            max_samples=count,
        ),
        confusion=tuple(tuple(range(10)) for _ in range(10)),
        neighbours={at: (Neighbour(at + 20, 0, 10.0),) * NEIGHBOURS for at in range(20)},
        near_pictures=pictures(samples, range(20 * NEIGHBOURS), HOVER_SIDE),
        ids={at: f"test/{at}" for at in range(count)},
        pictures=pictures(samples, range(count), HOVER_SIDE),
        worst_pictures=pictures(samples, range(20), WORST_SIDE),
    )


def five_runs() -> ReportModels:
    """Five models on five data sets, each of 10,000 samples, with everything a report shows."""
    found = geometry(classes=10, samples=10_000, dim=64)
    seen = observed(0)
    names = ("class_margin_degrees", "mean_cosine_margin", "min_cosine_margin")
    names += ("largest_dispersion", "magnitude_ratio", "softmax_bias")
    rows = tuple(
        {
            "kind": "epoch",
            "epoch": epoch,
            "step": epoch,
            "loss": random.random(),
            "lr": 0.1,
            "terms": {"a": random.random(), "b": random.random()},
            "validation": {"accuracy": random.random(), "loss": random.random()},
            "geometry": {name: random.random() for name in names},
        }
        for epoch in range(300)
    )
    first = ReportModel("model 0", found, tuple("abcdefghij"), metrics=rows, views=seen)
    each = tuple(
        replace(
            first,
            name=f"model {at}",
            color=at,
            data={"record": {"digests": {"test": f"data {at}"}}},
        )
        for at in range(5)
    )
    return ReportModels(each)


def test_five_runs_of_ten_thousand_samples() -> None:
    models = five_runs()
    text = render(models, all_sections(models), "five")
    assert len(text.encode()) < LIMIT
    assert all(len(each.views.pictures) == HOVER_PICTURES for each in models)  # type: ignore[union-attr]


@pytest.mark.slow
def test_five_models_of_a_thousand_classes(tmp_path: Path) -> None:
    found = {f"model {seed}": geometry(seed, 64, samples=10_000, classes=1000) for seed in range(5)}
    path = report(found, tmp_path / "report.html")
    assert path.stat().st_size < LIMIT
    page = Page(path)
    assert len(page.tables["table-classes"]) == 1 + SHOWN
    drawn = page.payload["charts"]["class-margins"]["data"]
    assert {len(trace["x"]) for trace in drawn} == {DRAWN}
    assert all(len(each["x"]) == 1000 for each in page.payload["charts"]["margins-cosine"]["marks"])

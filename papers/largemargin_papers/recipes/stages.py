"""Features along a network: after every part of it that has a width of its own."""

from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.app.data.samples import Batches, Samples
from largemargin.app.models.build import Classifier
from largemargin.app.training.run_scores import spread
from largemargin.measuring.layers import LayerReader, block_names
from largemargin.measuring.probe import Probe

FEATURES = "features"
"""What enters the head."""

BATCH = 500


class Stages(NamedTuple):
    """Of some samples, on the CPU."""

    rows: dict[str, Tensor]
    """(N, D) by stage: "block 1", "block 2", ..., and "features"."""
    labels: Tensor


def stages_of(
    model: Classifier,
    samples: Samples,
    *,
    count: int,
    noise: float = 0.0,
    device: torch.device | str = "cpu",
) -> Stages:
    """Features after the last block of every width, averaged over space (LMD 7.4), and the last.

    The four groups of a ResNet are four stages; the widths of other networks likewise.

    Args:
        model: a network of this library.
        samples: from which as many of every class are taken.
        count: of the samples, at most.
        noise: standard deviation of Gaussian noise on the images, in units of [0, 1] pixels; the
            same noise for every model.
        device: for the passes.
    """
    probe = Probe(model, layer="head")
    names = [f"backbone.{name}" for name in block_names(model.backbone, model.head)]
    reader = LayerReader(probe, names)
    chosen = samples.subset(spread(samples.labels, count))
    parts: dict[str, list[Tensor]] = {}
    labels = []
    generator = torch.Generator(device).manual_seed(0)
    with probe.evaluating():
        for images, label in Batches(chosen, BATCH, device=device, shuffle=False):
            if noise:
                drawn = torch.randn(images.shape, generator=generator, device=device)
                images = images + noise * drawn
            features = probe.read(images, reader.hooks(label)).features
            for name, each in {**reader.taken(), FEATURES: features}.items():
                parts.setdefault(name, []).append(each.float().cpu())
            labels.append(label.cpu())
    rows = {name: torch.cat(batches) for name, batches in parts.items()}
    last = {rows[name].shape[1]: name for name in names}
    ends = [name for name in names if name in last.values()]
    found = {f"block {number}": rows[name] for number, name in enumerate(ends, 1)}
    return Stages({**found, FEATURES: rows[FEATURES]}, torch.cat(labels))

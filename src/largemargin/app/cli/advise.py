"""``largemargin advise``: what to train with on a data set, and the evidence behind it."""

import json
import shlex
from typing import Any

import jsonargparse

from largemargin.app.cli.parser import expand
from largemargin.app.cli.run_options import add_options, add_switches

HELP = "propose a loss for a data set: imbalance, label noise, labels a class, with the evidence"

DESCRIPTION = """\
Look at the training labels of a data set and propose what to train with: classes, images a class,
imbalance and, where images are small, the share of wrong labels by a cross-validated linear head
on their pixels. The proposal comes with what was measured, what speaks against it, and the command
that checks it on the data."""

EXAMPLES = """\
Examples:
  largemargin advise photos/
  largemargin advise photos/ --pretrained           the network to be trained is
  largemargin advise labels.csv --label_column kind
  largemargin advise digits --label_noise 0.4       what it says of 40 % wrong labels
  largemargin advise photos/ --json"""

CHANGES = (
    *("label_column", "image_column", "fraction", "imbalance", "imbalance_ratio", "label_noise"),
    "seed",
)
"""Settings of the data that the command which checks the advice repeats."""

PIXELS = 3072
"""Of an image (channels x height x width) up to which label noise is estimated on them: 3 x 32 x
32."""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin advise DATA [options]"
    parser.add_argument(
        "data",
        type=str,
        metavar="DATA",
        help="image folder, CSV or array file, or the name of a data set (largemargin list --data)",
    )
    add_options(
        parser,
        ("path", str | None, None, "of a known data set"),
        ("label_column", str, "label", "of a CSV file or Hugging Face data set"),
        ("image_column", str, "image", "likewise"),
        ("fraction", float, 1.0, "share of the training images that is used"),
        ("imbalance_ratio", float, 1.0, "thin out the classes to a long tail"),
        ("label_noise", float, 0.0, "share of the labels that is replaced, to try this out"),
        ("seed", int, 0, "of what is drawn"),
    )
    add_switches(parser, pretrained="the network to be trained is pretrained", json="print JSON")


def run(options: Any) -> int:
    import torch

    from largemargin.app.config import DataConfig
    from largemargin.app.data.load import load_data
    from largemargin.app.training.advice import MOST, NoiseEstimate, estimate_label_noise, proposal
    from largemargin.measuring.sample_draws import generator_for

    config = _config(options)
    data = load_data(config)
    train, (height, width) = data.train, data.size
    noise = NoiseEstimate(None, f"images of {height} x {width} are too large for a linear head")
    if data.channels * height * width <= PIXELS:
        drawn = torch.randperm(len(train), generator=generator_for("advise", options.seed))[:MOST]
        some = train.subset(drawn)
        pixels = torch.cat([batch.images.flatten(1) for batch in some.read(256)])
        noise = estimate_label_noise(pixels.numpy(), some.labels.numpy(), seed=options.seed)
        noise = noise._replace(frozen=False)  # of pixels
    plain = DataConfig()
    changed = (name for name in CHANGES if getattr(config, name) != getattr(plain, name))
    words = [options.data, *(["--data.path", options.path] if options.path else [])]
    words += [*(f"--data.{name}={getattr(config, name)}" for name in changed)]
    told = shlex.join(words)
    found = proposal(train.labels, noise, pretrained=options.pretrained, data_name=told)
    print(json.dumps(found.as_dict(), indent=1) if options.json else found)
    return 0


def _config(options: Any) -> Any:
    """All training images, without reading those that are only to be counted."""
    from largemargin.app.config import DataConfig

    words = dict(word[2:].split("=", 1) for word in expand(["--data", options.data], ["data"]))
    thinned = options.imbalance_ratio > 1
    return DataConfig(
        name=words["data.name"],
        path=options.path or words.get("data.path"),
        label_column=options.label_column,
        image_column=options.image_column,
        fraction=options.fraction,
        imbalance="exp" if thinned else "none",
        imbalance_ratio=options.imbalance_ratio if thinned else 100.0,
        label_noise=options.label_noise,
        seed=options.seed,
        validation=0.0,
        normalize="none",
        resident="no",
    )

"""Four losses, one small network, one table: ``python -m largemargin.training.demo``.

A small CNN is trained on scikit-learn's bundled digits (1797 real 8 x 8 images, no download) with
the same split, initial weights, batch order, number of epochs and optimizer for every loss. Only
the loss and its learning rate differ; the rates come from one grid, tried alike for each loss on
images taken from the training part (``--tune`` repeats that search).
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import largemargin as lm
from largemargin.geometry import class_dispersion, class_margin, sample_margins
from largemargin.training.small_cnn import SmallCNN

CLASSES = 10
DIM = 32
QUICK_EPOCHS = 6
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
MISSING = "The demo needs scikit-learn and tqdm. Install them: pip install 'largemargin[demo]'"


@dataclass(frozen=True)
class Method:
    """A loss as the demo trains it; ``similarity`` and ``scale`` are those of its class head."""

    name: str
    objective: Callable[[], lm.Objective]
    learning_rate: float
    similarity: str = "dot"
    scale: float = 1.0


# Learning rates: the best of RATES by `--tune`, ties to the smaller. Loss parameters: the papers'
# defaults, except LM-Softmax's scale (16 for 10 classes instead of 64 for thousands of faces) and
# the discriminative margin (3, the value of the sequel's road images, instead of 6).
METHODS = (
    Method("softmax", lambda: lm.Objective(softmax=lm.CrossEntropy()), 0.3),
    Method(
        "softmax + LMD",
        lambda: lm.Objective(
            softmax=lm.CrossEntropy(),
            discriminative=lm.Discriminative(CLASSES, DIM, margin=3.0),
        ),
        0.1,
    ),
    Method(
        "LM-Softmax",
        lambda: lm.Objective(lm_softmax=lm.LMSoftmax(scale=16.0)),
        0.1,
        similarity="cosine",
        scale=16.0,
    ),
    Method("Kobayashi", lambda: lm.Objective(kobayashi=lm.Kobayashi(strength=0.3)), 0.1),
)


@dataclass(frozen=True)
class Split:
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Result:
    """One row of the table; margins and dispersions are measured on the test images."""

    method: str
    accuracy: float
    class_margin_degrees: float
    mean_sample_margin: float
    min_sample_margin: float
    max_dispersion: float
    relative_dispersion: float
    seconds: float


def load_digits() -> Split:
    """The 1797 digits, 70 % for training and 30 % for testing, each class split alike."""
    from sklearn.datasets import load_digits as bundled_digits

    digits = bundled_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return stratified(images, torch.as_tensor(digits.target, dtype=torch.long))


def stratified(images: Tensor, labels: Tensor) -> Split:
    """A fixed 70/30 split that keeps the share of every class."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        list(range(len(labels))), test_size=0.3, stratify=labels.tolist(), random_state=0
    )
    return Split(images[train], labels[train], images[test], labels[test])


def initial_network(method: Method, seed: int) -> SmallCNN:
    """The untrained network; its weights depend on the seed alone, not on the method."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SmallCNN(DIM, CLASSES, similarity=method.similarity, scale=method.scale)
    # Heads of different kinds draw their prototypes differently, so these are drawn again.
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(network.head.weight, std=1 / math.sqrt(DIM), generator=generator)
    if network.head.bias is not None:
        torch.nn.init.zeros_(network.head.bias)
    return network


def train(
    method: Method,
    split: Split,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    after_epoch: Callable[[float], None] = lambda loss: None,
) -> SmallCNN:
    """Train one network; equal arguments give equal weights, whatever ran before."""
    network = initial_network(method, seed)
    order = torch.Generator().manual_seed(seed)
    objective = method.objective()
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=method.learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
    )
    steps_per_epoch = math.ceil(len(split.train_labels) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=method.learning_rate,
        total_steps=epochs * steps_per_epoch,
        pct_start=0.2,
        cycle_momentum=False,
    )
    network.train()
    for _ in range(epochs):
        loss = math.nan
        shuffled = torch.randperm(len(split.train_labels), generator=order)
        for start in range(0, len(shuffled), batch_size):
            batch = shuffled[start : start + batch_size]
            features = network.features(split.train_images[batch])
            value = objective(features, network.head, split.train_labels[batch])
            optimizer.zero_grad()
            value.total.backward()
            # The discriminative loss diverges at ordinary learning rates without clipping; the
            # others hardly notice it.
            torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            loss = value.total.item()
        after_epoch(loss)
    return network.eval()


@torch.no_grad()
def measure(method: Method, network: SmallCNN, split: Split, seconds: float) -> Result:
    labels = split.test_labels
    features = network.features(split.test_images)
    predicted = network.head.logits(features).argmax(1)
    margins = sample_margins(features, network.head.weight, labels, similarity="cosine")
    centroids = torch.stack([features[labels == c].mean(0) for c in range(CLASSES)])
    largest = class_dispersion(features, labels, CLASSES).max().item()
    return Result(
        method=method.name,
        accuracy=(predicted == labels).float().mean().item(),
        class_margin_degrees=math.degrees(class_margin(network.head.weight).item()),
        mean_sample_margin=margins.mean().item(),
        min_sample_margin=margins.min().item(),
        max_dispersion=largest,
        relative_dispersion=largest / torch.pdist(centroids).mean().item(),
        seconds=seconds,
    )


def compare(*, epochs: int, batch_size: int, seed: int, progress: bool = True) -> list[Result]:
    """Train every method of ``METHODS`` on the same split and measure it."""
    from tqdm import tqdm

    split = load_digits()
    results = []
    with tqdm(total=len(METHODS) * epochs, unit="epoch", disable=not progress) as bar:
        for method in METHODS:
            bar.set_description(f"{method.name:<13}")

            def after_epoch(loss: float) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()

            start = time.perf_counter()
            network = train(
                method,
                split,
                epochs=epochs,
                batch_size=batch_size,
                seed=seed,
                after_epoch=after_epoch,
            )
            results.append(measure(method, network, split, time.perf_counter() - start))
    return results


def tune(*, epochs: int, batch_size: int, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Try every rate of ``RATES`` for every method; the test images are never looked at."""
    split = load_digits()
    inner = stratified(split.train_images, split.train_labels)
    for method in METHODS:
        for rate in RATES:
            tried = replace(method, learning_rate=rate)
            accuracies = [
                measure(
                    tried,
                    train(tried, inner, epochs=epochs, batch_size=batch_size, seed=seed),
                    inner,
                    seconds=0.0,
                ).accuracy
                for seed in seeds
            ]
            mean = 100 * sum(accuracies) / len(accuracies)
            each = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
            used = "  <- used" if rate == method.learning_rate else ""
            print(f"{method.name:<14} rate {rate:<5} {mean:6.2f} % ({each}){used}", flush=True)


def table(results: Sequence[Result]) -> str:
    ceiling = math.degrees(math.acos(-1 / (CLASSES - 1)))
    lines = [
        f"{'':<14}{'test':>9}{'class':>9}{'ceiling':>9}{'mean':>9}{'minimum':>9}"
        f"{'largest':>12}{'relative':>12}{'':>9}",
        f"{'method':<14}{'accuracy':>9}{'margin':>9}{'':>9}{'margin':>9}{'margin':>9}"
        f"{'dispersion':>12}{'dispersion':>12}{'seconds':>9}",
    ]
    lines.append("-" * len(lines[0]))
    lines += [
        f"{r.method:<14}{100 * r.accuracy:>8.2f}%{r.class_margin_degrees:>8.1f}°{ceiling:>8.1f}°"
        f"{r.mean_sample_margin:>9.3f}{r.min_sample_margin:>9.3f}"
        f"{r.max_dispersion:>12.2f}{r.relative_dispersion:>12.2f}{r.seconds:>9.1f}"
        for r in results
    ]
    return "\n".join(lines)


EXPLANATION = """
class margin         smallest angle between two class prototypes; its ceiling is arccos(-1/(C-1))
mean, minimum margin cosine to the own prototype minus that to the nearest rival; < 0: rival nearer
largest dispersion   largest distance between two test images of one class, in feature units
relative dispersion  the same divided by the mean distance of two class centres: compare this one,
                     because losses on the angle leave the scale of the features free

One test image is {image:.2f} points of accuracy and this is one seed: read small differences as
noise, the geometry as the point. Try next: --seed 1, --epochs 60, and your own model in two lines
(README.md)."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m largemargin.training.demo",
        description="Train a small CNN on scikit-learn's digits with four losses and compare them.",
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs per loss (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="initial weights and batch order")
    parser.add_argument("--batch-size", type=int, default=64, help="default 64")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_EPOCHS} epochs: a look, not a result"
    )
    parser.add_argument("--tune", action="store_true", help="repeat the search for learning rates")
    options = parser.parse_args(argv)
    if options.epochs < 1 or options.batch_size < 2:
        parser.error("--epochs must be at least 1 and --batch-size at least 2")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    epochs = QUICK_EPOCHS if options.quick else options.epochs
    try:
        import sklearn  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError:
        print(MISSING, file=sys.stderr)
        return 1
    threads = torch.get_num_threads()
    # Tensors this small gain little from a second thread and lose much when it has to wait.
    torch.set_num_threads(1)
    try:
        if options.tune:
            tune(epochs=epochs, batch_size=options.batch_size)
        else:
            show(epochs, options.batch_size, options.seed)
    finally:
        torch.set_num_threads(threads)
    return 0


def show(epochs: int, batch_size: int, seed: int) -> None:
    print(
        f"Training a small CNN on 1257 digits, {epochs} epochs for each of {len(METHODS)} losses; "
        "the table is measured on 540 others.",
        flush=True,
    )
    results = compare(epochs=epochs, batch_size=batch_size, seed=seed)
    print()
    print(table(results))
    print(EXPLANATION.format(image=100 / 540))


if __name__ == "__main__":
    sys.exit(main())

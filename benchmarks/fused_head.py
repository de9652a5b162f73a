"""Forward and backward of a head of 10 thousand to 10 million classes, against the alternatives.

One GPU, all providers in one run, each checked against float64 (small head) or strict float32
(large ones) before it is timed. Features float32, prototypes float32 (bfloat16 at 10 million),
products bfloat16. A row: median of the repetitions with CUDA events, of single steps, without
and with a CUDA graph, and the most memory a step takes beyond inputs and gradients. Without a graph
the CPU that launches is measured too; a GPU busy for longer than these steps gets slower by itself.

    python benchmarks/fused_head.py              # results/fused_head_cuda.json, about 3 minutes
    python benchmarks/fused_head.py --quick      # ours and the bare products only
"""

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rows import Row, captured, cuda_seconds, environment, verdict, write
from torch import Tensor

import largemargin as lm

SCALE, MARGIN = 64.0, 0.35
LOSSES: dict[str, Callable[..., lm.Loss]] = {
    "ArcFace": lambda **how: lm.ArcFace(scale=SCALE, margin=MARGIN, **how),
    "CosFace": lambda **how: lm.CosFace(scale=SCALE, margin=MARGIN, **how),
    "LMSoftmax": lambda **how: lm.LMSoftmax(scale=SCALE, **how),
    "Kobayashi": lambda **how: lm.Kobayashi(**how),
}
REQUIRED = {10_000: 0.45, 100_000: 1.3, 1_000_000: 10.0, 10_000_000: 110.0}
AIM = {10_000: 0.25, 100_000: 1.0, 1_000_000: 8.0, 10_000_000: 85.0}
MEMORY = {10_000: 64, 100_000: 128, 1_000_000: 256, 10_000_000: 512}
"""Milliseconds, and MiB beyond gradients: the targets of this head, by number of classes."""

GRAPHS = "reduce-overhead"
"""How torch.compile captures CUDA graphs by itself."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    features: Tensor
    weight: Tensor
    labels: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.features, self.weight


def problem(samples: int, classes: int, dim: int, dtype: torch.dtype) -> Problem:
    generator = torch.Generator("cuda").manual_seed(0)
    features = torch.randn(samples, dim, device="cuda", generator=generator)
    weight = torch.empty(classes, dim, device="cuda", dtype=dtype)
    for block in weight.split(2**20):  # no float32 copy of ten million rows
        block.copy_(torch.randn(block.shape, device="cuda", generator=generator) * dim**-0.5)
    labels = torch.randint(classes, (samples,), device="cuda", generator=generator)
    # Some samples lie near their class, as in training: losses then have large targets too.
    features[::2] = 0.5 * features[::2] + dim**0.5 * weight[labels[::2]].float()
    return Problem(features.requires_grad_(), weight.requires_grad_(), labels)


def gradients(at: Problem, value: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = value()
    return (loss.detach(), *torch.autograd.grad(loss, at.inputs))


def plain_arcface(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """ArcFace as one writes it in ten lines of torch."""
    cosine = F.linear(F.normalize(features), F.normalize(weight)).float()
    own = cosine.gather(1, labels[:, None]).clamp(-1 + 1e-7, 1 - 1e-7)
    angle = torch.acos(own) + MARGIN
    logits = SCALE * cosine.scatter(1, labels[:, None], torch.cos(angle))
    return F.cross_entropy(logits, labels)


def ours(at: Problem, name: str, **how: str) -> Step:
    loss = LOSSES[name](**how).cuda()
    return lambda: gradients(at, lambda: loss(at.features, at.weight, at.labels))


def products(at: Problem) -> Step:
    """The three products that no implementation can do without: logits, and both gradients."""
    x, w = at.features.detach().bfloat16(), at.weight.detach().bfloat16()

    def step() -> None:
        logits = x @ w.T
        _ = logits @ w, logits.T @ x

    return step


def compiled_arcface(at: Problem, mode: str | None) -> Iterator[tuple[str, str, Step]]:
    loss = LOSSES["ArcFace"](impl="triton").cuda()
    written = {"torch": plain_arcface, "largemargin triton,": lambda *given: loss(*given)}
    for provider, function in written.items():
        compiled = torch.compile(function, dynamic=False, mode=mode)
        name = f"{provider} compiled" + ("" if mode is None else f", {mode}")
        yield name, "ArcFace", partial(gradients, at, partial(compiled, *at.inputs, at.labels))


def others(at: Problem) -> Iterator[tuple[str, str, Step]]:
    """Provider, loss, step; those whose package is missing are left out and said to be.

    Last what breaks later captures of graphs: a peer that cannot be captured, and torch's own.
    """
    yield (
        "torch eager",
        "ArcFace",
        lambda: gradients(at, lambda: plain_arcface(*at.inputs, at.labels)),
    )
    yield from compiled_arcface(at, None)
    try:
        from cut_cross_entropy import linear_cross_entropy

        x, w = at.features.detach().bfloat16(), at.weight.detach().bfloat16()
        x.requires_grad_(), w.requires_grad_()
        yield (
            "CCE, bfloat16 prototypes",
            "cross entropy, no margin",
            lambda: torch.autograd.grad(linear_cross_entropy(x, w, at.labels), (x, w)),
        )
    except ImportError as error:
        print(f"left out: {error}")
    if hasattr(F, "linear_cross_entropy"):
        yield (
            "torch linear_cross_entropy",
            "cross entropy, no margin",
            lambda: gradients(at, lambda: F.linear_cross_entropy(*at.inputs, at.labels)),
        )
    else:
        print(f"left out: torch {torch.__version__} has no F.linear_cross_entropy")
    try:
        from pytorch_metric_learning.losses import ArcFaceLoss

        dim, classes = at.weight.shape[1], at.weight.shape[0]
        peer = ArcFaceLoss(2, dim, margin=57.3 * MARGIN, scale=SCALE).cuda()
        peer.num_classes = classes
        peer.W = torch.nn.Parameter(at.weight.detach().T.contiguous())

        def step() -> tuple[Tensor, ...]:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                value = peer(at.features, at.labels)
            return (value.detach(), *torch.autograd.grad(value, (at.features, peer.W)))

        yield "pytorch-metric-learning", "ArcFace", step
    except ImportError as error:
        print(f"left out: {error}")
    yield from compiled_arcface(at, GRAPHS)


def check(at: Problem, name: str, step: Step) -> Row:
    """Largest error of value and gradients relative to their norm, against wide arithmetic."""
    small = at.weight.shape[0] <= 20_000
    wide = torch.float64 if small else torch.float32
    inputs = [x.detach().to(wide).requires_grad_() for x in at.inputs]
    loss = LOSSES[name](impl="chunked", precision="highest").cuda()
    reference = loss(inputs[0], inputs[1], at.labels)
    expected = torch.autograd.grad(reference, inputs)
    value, *found = step()  # type: ignore[misc]
    errors = [
        float((a.to(wide) - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)
    ]
    errors.append(float((value - reference).abs() / reference.abs()))
    assert max(errors) < 0.02, f"{name}: relative errors {errors}"
    return {"largest_relative_error": max(errors), "reference": str(wide)}


def timed(step: Step, *, repetitions: int, graph: bool) -> float:
    """Median milliseconds."""
    run = captured(step) if graph else step
    for _ in range(2):
        run()
    return 1e3 * statistics.median(cuda_seconds(run) for _ in range(repetitions))


def measure(at: Problem, step: Step, *, repetitions: int = 5) -> Row:
    """Without and, where the step can be captured, with a CUDA graph: for every provider alike.

    A graph that fails to be captured can spoil the next capture: those come last.
    """
    for _ in range(3):  # compiles, and where the compiler captures a graph, does so
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    gradient_bytes = sum(x.numel() * x.element_size() for x in at.inputs)
    extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
    row: Row = {"ms": timed(step, repetitions=repetitions, graph=False), "extra_mib": extra / 2**20}
    try:
        row["graph_ms"] = timed(step, repetitions=repetitions, graph=True)
    except RuntimeError as error:
        row["graph_failed"] = str(error).splitlines()[0][:200]
    return row


def replayed(step: Step) -> Row:
    """A step that captures graphs by itself; their memory is not counted."""
    for _ in range(4):
        step()
    return {"ms": timed(step, repetitions=5, graph=False)}


def top(at: Problem, repetitions: int) -> Iterator[Row]:
    """predict(x, k) against one bfloat16 product with all logits."""
    head = lm.ClassHead(at.weight.shape[1], 2, similarity="cosine", bias=False).cuda()
    for dtype in (torch.bfloat16, torch.float32):
        head.weight = torch.nn.Parameter(at.weight.detach().to(dtype))
        head.num_classes = at.weight.shape[0]
        x, w = at.features.detach(), head.weight.detach().bfloat16()
        gemm = partial(torch.mm, x.bfloat16(), w.T)
        base = timed(gemm, repetitions=repetitions, graph=False)
        graph_base = timed(gemm, repetitions=repetitions, graph=True)
        wide = F.normalize(head.weight.detach()[:].double()) if w.shape[0] <= 10**6 else None
        for k in (1, 5, 10):
            step = partial(head.predict, x, k, precision="bf16")
            row: Row = {
                "provider": "predict",
                "loss": f"top {k}",
                "prototypes": str(dtype),
                "ms": timed(step, repetitions=repetitions, graph=False),
                "gemm_ms": base,
                "graph_ms": timed(step, repetitions=repetitions, graph=True),
                "gemm_graph_ms": graph_base,
            }
            if wide is not None:
                best = (F.normalize(x[:128].double()) @ wide.T).topk(k, 1).indices
                row["same_as_float64"] = float((step().classes[:128] == best).float().mean())
            row["ratio_to_gemm"] = row["ms"] / base
            row["graph_ratio_to_gemm"] = row["graph_ms"] / graph_base
            limit = 1.5 if k == 1 else 3.0
            row["target"] = limit
            row["verdict"] = verdict(row["graph_ratio_to_gemm"], limit)
            yield row
        del wide, w


def rows_of(classes: int, samples: int, quick: bool) -> Iterator[Row]:
    huge = classes > 2_000_000
    at = problem(samples, classes, 512, torch.bfloat16 if huge else torch.float32)
    repetitions = 5 if huge else 10
    common = {"C": classes, "N": samples, "D": 512, "prototypes": str(at.weight.dtype)}
    if not huge:
        row = measure(at, products(at), repetitions=repetitions)
        yield common | {"provider": "three bare bfloat16 products", "loss": "none"} | row
    for name in LOSSES:
        step = ours(at, name, impl="triton")
        row = {} if huge else check(at, name, step)
        row |= measure(at, step, repetitions=repetitions)
        row |= {"required_ms": REQUIRED[classes], "aim_ms": AIM[classes]}
        row |= {"memory_limit_mib": MEMORY[classes]}
        row["verdict"] = verdict(row["graph_ms"], REQUIRED[classes])
        row["verdict_aim"] = verdict(row["graph_ms"], AIM[classes])
        row["verdict_memory"] = verdict(row["extra_mib"], MEMORY[classes])
        yield common | {"provider": "largemargin triton", "loss": name} | row
    if not huge and classes >= 1_000_000:
        for row in top(at, repetitions):
            yield common | row
    if quick or huge:
        return
    if classes < 1_000_000:
        row = measure(at, ours(at, "CosFace", impl="dense"), repetitions=repetitions)
        yield common | {"provider": "largemargin dense", "loss": "CosFace"} | row
    if classes >= 1_000_000:
        loss = LOSSES["CosFace"](impl="chunked").cuda()
        compiled = torch.compile(lambda x, w, y: loss(x, w, y), dynamic=False)
        step = lambda: gradients(at, lambda: compiled(*at.inputs, at.labels))  # noqa: E731
        row = check(at, "CosFace", step) | measure(at, step)
        row |= {"required_ms": 20.0, "verdict": verdict(row["graph_ms"], 20.0)}
        yield common | {"provider": "largemargin chunked, compiled", "loss": "CosFace"} | row
    for provider, name, step in others(at):
        try:
            row = check(at, name, step) if "compiled" in provider or "eager" in provider else {}
            row |= replayed(step) if GRAPHS in provider else measure(at, step)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            row = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        yield common | {"provider": provider, "loss": name} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ours and the bare products only")
    parser.add_argument("--name", default="fused_head_cuda", help="name of the file in results/")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device; none was found.")
    warnings.simplefilter("ignore")
    common = environment(torch.get_num_threads())
    common |= {"device": torch.cuda.get_device_name(), "deterministic": True}
    rows: list[Row] = []
    for classes, samples in ((10_000, 512), (100_000, 1024), (1_000_000, 1024), (10_000_000, 1024)):
        for row in rows_of(classes, samples, options.quick):
            rows.append(row)
            numbers = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            print(numbers, flush=True)
            path = write(options.name, rows, common)
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    print("rows in", path)


if __name__ == "__main__":
    main()

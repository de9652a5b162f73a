"""Small kernels compile for GPUs that are not here: interpreters take more than compilers do."""

import importlib

import pytest
import torch
from interpreted import NEEDS_TRITON

import largemargin as lm
from largemargin.ops.centroid_terms import CentroidTerms
from largemargin.ops.row_values import KINDS, Angle, RowLoss

pytestmark = [NEEDS_TRITON, pytest.mark.filterwarnings("ignore::UserWarning:triton")]

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def kernels_of(module):
    from largemargin.ops.triton.compiled_launch import Kernel

    return {id(each): each for each in vars(module).values() if isinstance(each, Kernel)}


@pytest.fixture
def module_of(monkeypatch):
    """Modules whose kernels are compiled in place of being launched; all of them must be."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from largemargin.ops.triton.compiled_launch import Kernel

    compiled = set()

    def compile_only(self, grid, *args, num_warps):
        signature, constants = {}, {}
        for parameter, arg in zip(self.function.params, args, strict=True):
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", arg
            elif isinstance(arg, torch.Tensor):
                signature[parameter.name] = TYPES[arg.dtype]
            else:
                signature[parameter.name] = "fp32" if type(arg) is float else "i32"
        source = ASTSource(fn=self.function, signature=signature, constexprs=constants)
        made = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
        )
        assert made.asm["cubin"]
        compiled.add(id(self))

    monkeypatch.setattr(Kernel, "__call__", compile_only)
    asked = []

    def module(name):
        asked.append(importlib.import_module(f"largemargin.ops.triton.{name}"))
        return asked[-1]

    yield module
    for each in asked:
        assert compiled == set(kernels_of(each))


def test_kernels_of_centroids(module_of):
    kernels = module_of("centroids")
    for dtype, count, classes, ignore in (
        (torch.float32, 6, 4, -100),
        (torch.bfloat16, 3, 9, None),
    ):
        features, labels = torch.zeros(count, 8, dtype=dtype), torch.zeros(count, dtype=torch.int64)
        bank = lm.CentroidBank(classes, 8)
        found = kernels.class_rows(
            *(features, labels, bank.centroids, bank.seen, bank.counts),
            num_classes=classes,
            ignore=ignore,
            weight=0.01,
            write=True,
        )
        terms = CentroidTerms(
            *(found.of_sample, labels, found.means, found.blended, found.means, found.held),
            None,
            classes <= count,
            through_compact=1.0,
            through_points=1.0,
            radius=0.5,
            power=2 if dtype == torch.float32 else 0,
            tail=0.5,
            margin=6.0,
            margin_power=1 if dtype == torch.float32 else 2,
            with_norm=True,
        )
        weight = torch.zeros(classes, 8, dtype=dtype)
        bias = torch.zeros(classes) if ignore is None else None
        _, saved = kernels.centroid_terms(features, labels, weight, bias, terms, ignore)
        grads = torch.ones(3).unbind()
        kernels.features_gradient(grads, features, labels, weight, terms, ignore, saved)
        kernels.prototypes_gradient(grads[1], labels, weight, bias, terms, saved)


def test_kernels_of_rows(module_of):
    kernels = module_of("rows")
    logits, labels = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    features, weight = torch.zeros(3, 8), torch.zeros(5, 8)
    _, inverse = kernels.unit_rows(features, torch.bfloat16, 2.0)
    kernels.unit_rows_gradient(torch.zeros(3, 8), features, inverse)
    stats = kernels.row_stats(logits, labels, True)
    kernels.row_stats_gradient(logits, labels, stats, (torch.ones(3),) * 5)
    angle = Angle(16.0, 0.3, "hard", 0.99, 1e-6, torch.add)
    for loss in (*(RowLoss(kind, strength=0.3) for kind in KINDS), RowLoss(angle=angle)):
        _, kept, chosen = kernels.row_values(logits, labels, loss, -100, True, features, weight)
        kernels.row_values_gradient(torch.ones(3), logits, labels, loss, kept, chosen)

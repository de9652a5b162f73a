"""The right layer is found, or the error says which ones it may be."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from dropin.nets import LABELS, C, ConvNet, Mlp, vectors
from torch import nn

import largemargin as lm
from largemargin.dropin.find_head import find_layer

# timm's own names are deprecated one after the other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:timm", "ignore::FutureWarning")

TORCHVISION = {
    "alexnet": "classifier.6",
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "mnasnet0_5": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
    "regnet_y_400mf": "fc",
    "resnet18": "fc",
    "shufflenet_v2_x0_5": "fc",
    "swin_t": "head",
    "swin_v2_t": "head",
    "vgg11": "classifier.6",
    "vit_b_16": "heads.head",
}


def empty(make: Callable[[str], nn.Module], name: str) -> nn.Module:
    """The model without its numbers, unless it reads some while it is built."""
    try:
        with torch.device("meta"):
            return make(name)
    except (NotImplementedError, RuntimeError):
        return make(name)


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_heads(name: str) -> None:
    model = empty(torchvision.models.get_model, name)
    assert find_layer(model, None)[0] == TORCHVISION[name]


TIMM = {
    "convnext_atto": "head.fc",
    "deit_tiny_patch16_224": "head",
    "efficientnet_lite0": "classifier",
    "mixer_s32_224": "head",
    "mobilenetv3_small_050": "classifier",
    "nf_regnet_b0": "head.fc",
    "resnet10t": "fc",
    "vit_tiny_patch16_224": "head",
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_heads(name: str) -> None:
    model = empty(timm.create_model, name)
    assert find_layer(model, None)[0] == TIMM[name]


@pytest.mark.slow
def test_every_family_of_timm_is_found_or_refused() -> None:
    """One model of each family: never another layer than timm names as the classifier."""
    wrong, found = [], 0
    for module in timm.list_modules():
        name = timm.list_models(module=module)[0]
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except (NotImplementedError, RuntimeError):
            continue  # reads numbers while it is built, which the meta device does not have
        classifier = model.get_classifier()
        try:
            path, layer = find_layer(model, None)
        except lm.LargeMarginError as error:
            linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
            heads = sum(each.out_features == model.num_classes for each in linear)
            if (linear and heads < 2) or ("several" in str(error)) != bool(linear):
                wrong.append(f"{name}: {error}")
            continue
        found += 1
        if layer is not classifier and isinstance(classifier, nn.Linear):
            wrong.append(f"{name}: {path}")
    assert not wrong
    assert found >= 60


def hf(kind: str, **config: object) -> Callable[[], nn.Module]:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 24, "num_labels": C}

    def make() -> nn.Module:
        settings = getattr(transformers, f"{kind}Config")(**small, **config)
        task = "Image" if kind in ("ViT", "DeiT", "Swin", "ConvNext") else "Sequence"
        return getattr(transformers, f"{kind}For{task}Classification")(settings)

    return make


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (hf("ViT", image_size=8, patch_size=4), "classifier"),
        (hf("DeiT", image_size=8, patch_size=4), "classifier"),
        (hf("Bert", vocab_size=20), "classifier"),
        (hf("Roberta", vocab_size=20), "classifier.out_proj"),
    ],
    ids=["vit", "deit", "bert", "roberta"],
)
def test_hugging_face_heads(make: Callable[[], nn.Module], path: str) -> None:
    assert find_layer(make(), None)[0] == path


class Chain(nn.Module):
    """Layers in no ``nn.Sequential`` that widen and narrow again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.fc = nn.Linear(6, 3)


def test_layers_that_follow_each_other_are_no_rivals() -> None:
    assert find_layer(Chain(), None)[0] == "fc"
    assert find_layer(nn.ModuleList(Chain().children()), None)[0] == "2"
    longer = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 6), *Chain().children()])
    assert find_layer(longer, None)[0] == "4"
    assert find_layer(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3))), None)[0] == (
        "1.0"
    )


def test_attention_is_not_a_head() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(8, 3), "mix": nn.MultiheadAttention(8, 2)})
    assert find_layer(model, None)[0] == "fc"


def test_class_head_and_simplex_head_are_heads() -> None:
    for head in (lm.ClassHead(8, 3, similarity="cosine", scale=4.0), lm.SimplexHead(8, 3)):
        model = nn.Sequential(nn.Linear(4, 8), head)
        criterion = lm.attach(model, lm.CrossEntropy())
        assert criterion.layer is head
        loss = criterion(model(vectors()), LABELS % 3)
        torch.testing.assert_close(loss, nn.functional.cross_entropy(model(vectors()), LABELS % 3))


def refused(match: str, make: Callable[[], object]) -> None:
    with pytest.raises(lm.LargeMarginError, match=match):
        make()


def test_no_linear_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1))
    refused("no linear layer", lambda: lm.attach(model, lm.CrossEntropy()))


def two_heads(**heads: nn.Module) -> nn.Module:
    model = ConvNet()
    del model.fc
    for name, head in heads.items():
        model.add_module(name, head)
    return model


@pytest.mark.parametrize(
    "model",
    [
        two_heads(head=nn.Linear(8, 5), head_dist=nn.Linear(8, 5)),
        two_heads(heads=nn.ModuleDict({"head": nn.Linear(8, 5), "head_dist": nn.Linear(8, 3)})),
        two_heads(heads=nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 7)])),
        two_heads(heads=nn.ModuleList([nn.Linear(12, 5), nn.Linear(8, 5)])),
        two_heads(head=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5)), head_dist=nn.Linear(8, 9)),
    ],
    ids=["names", "dict", "list", "widths", "deep"],
)
def test_several_likely_heads_are_named(model: nn.Module) -> None:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with pytest.raises(lm.LargeMarginError, match="several layers") as error:
        lm.attach(model, lm.CrossEntropy())
    # None of them alone after "pass": it would be read as advice.
    assert " or ".join(f"layer={name!r}" for name in names) in str(error.value)
    criterion = lm.attach(model, lm.CrossEntropy(), layer=names[0])
    assert criterion.layer is model.get_submodule(names[0])


def test_distilled_timm_model_has_two_heads() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_distilled_patch16_224")
    refused("'head'.*'head_dist'", lambda: lm.attach(model, lm.CrossEntropy()))
    assert lm.attach(model, lm.CosFace(), layer="head_dist").layer is model.head_dist


def test_names_that_do_not_exist_or_are_no_heads() -> None:
    model = nn.ModuleDict({"backbone": ConvNet(), "head": nn.Sequential(nn.Linear(8, 5))})
    attach = functools.partial(lm.attach, model, lm.CrossEntropy())
    refused("no layer 'backbone.fcc'. Closest: 'backbone.fc'", lambda: attach(layer="backbone.fcc"))
    refused("'head' must be.*Sequential.*Inside it is 'head.0'", lambda: attach(layer="head"))
    refused("must be.*Conv2d", lambda: attach(layer="backbone.stem.0"))
    refused(
        "no layer 'body'.*Closest: 'backbone.body'", lambda: attach(layer="head.0", features="body")
    )
    refused("no layer 'stam'", lambda: attach(layer="head.0", layers=["stam"]))
    assert attach(layer="backbone.fc").layer is model["backbone"].fc


def test_lazy_bare_and_parametrized_layers() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    refused("lazy", lambda: lm.attach(lazy, lm.CrossEntropy()))
    refused("bare nn.Linear", lambda: lm.attach(nn.Linear(4, 3), lm.CosFace()))
    bare = nn.Linear(4, C)
    loss = lm.attach(bare, lm.CrossEntropy())(bare(vectors()), LABELS)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(bare(vectors()), LABELS))
    model = Mlp()
    torch.nn.utils.parametrizations.weight_norm(model.fc)
    refused("parametrizations", lambda: lm.attach(model, lm.CosFace()))
    loss = lm.attach(model, lm.CrossEntropy())(model(vectors()), LABELS)
    loss.backward()
    assert all(p.grad is not None for p in model.fc.parameters())


def test_wrappers_that_cannot_work_are_refused() -> None:
    refused("DataParallel", lambda: lm.attach(nn.DataParallel(ConvNet()), lm.CrossEntropy()))
    fsdp = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    wrapped = fsdp.__new__(fsdp)
    nn.Module.__init__(wrapped)
    refused("fully_shard", lambda: lm.attach(wrapped, lm.CrossEntropy()))


def test_a_layer_that_is_not_the_head_is_noticed() -> None:
    """The last linear layer need not be the head: the first call says so."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)
            self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(x))

    model = Odd()
    criterion = lm.attach(model, lm.CrossEntropy())
    outputs = model(vectors())
    refused("4 columns.*layer=", lambda: criterion(outputs, LABELS % 3))
    criterion.undo()
    assert lm.attach(model, lm.CrossEntropy(), layer="out")(model(vectors()), LABELS % 3) > 0


def test_layers_have_names() -> None:
    """Those of an nn.Sequential look like numbers."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, C))
    loss = lm.CrossEntropy()
    wrong: Any = 2
    refused("but int was given. Its name is '2'", lambda: lm.attach(model, loss, layer=wrong))
    assert lm.attach(model, loss, layer="2").layer is model[2]


def test_counts_of_another_number_of_classes() -> None:
    model = nn.Sequential(nn.Linear(8, 10))
    with pytest.raises(
        lm.LargeMarginError, match="with 7 class_counts, but the head has 10 classes"
    ):
        lm.attach(model, lm.LDAM([5] * 7))
    for count in (0, 7):
        with pytest.raises(lm.LargeMarginError, match=f"with {count} margin, but the head has 10"):
            lm.attach(model, lm.CosFace(margin=torch.full((count,), 0.1)))
    assert isinstance(model[0], nn.Linear)


def test_arguments_the_wrong_way_round() -> None:
    with pytest.raises(lm.LargeMarginError, match=r"CosFace was given.*attach\(model, objective\)"):
        lm.attach(lm.CosFace(), nn.Linear(4, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
@pytest.mark.parametrize("objective", [lm.CosFace(), lm.CrossEntropy()])
def test_heads_prepared_for_quantization(objective: lm.Loss) -> None:
    """They round their weight, which the loss would not see; attach first, or leave the head."""
    quantization = torch.ao.quantization

    def model() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
        made.qconfig = quantization.get_default_qat_qconfig("x86")
        return made

    prepared = quantization.prepare_qat(model())
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    with pytest.raises(lm.LargeMarginError, match=r"qconfig = None before prepare_qat\.$"):
        lm.attach(prepared, objective)
    after = prepared.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    kept = model()
    kept[2].qconfig = None
    kept = quantization.prepare_qat(kept)
    criterion = lm.attach(kept, objective)
    criterion(kept(torch.randn(6, 3)), torch.arange(6) % 4).backward()
    assert all(weight.grad is not None for weight in (kept[0].weight, kept[2].weight))
    early = model()
    criterion = lm.attach(early, objective)
    early = quantization.prepare_qat(early, inplace=True)
    if isinstance(objective, lm.CosFace):  # its head is none that is quantized
        assert criterion(early(torch.randn(6, 3)), torch.arange(6) % 4).isfinite()
    else:
        with pytest.raises(lm.LargeMarginError, match="Call attach again"):
            criterion(early(torch.randn(6, 3)), torch.arange(6) % 4)


def test_outputs_and_heads_of_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    criterion, labels = lm.attach(model, lm.CosFace()), torch.arange(6) % 4
    with torch.inference_mode():
        outputs = model(torch.randn(6, 3))
        assert criterion(outputs, labels).isfinite()
        late = labels.clone()
        made = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    with pytest.raises(lm.LargeMarginError, match="features were made under"):
        criterion(outputs, labels)
    with pytest.raises(lm.LargeMarginError, match="labels were made under"):
        criterion(model(torch.randn(6, 3)), late)
    with pytest.raises(lm.LargeMarginError, match=r"copy\.deepcopy"):
        lm.attach(made, lm.CosFace())


class Returns(nn.Module):
    """What comes before the features and after, logits of another layer, and of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other, self.last = nn.Linear(4, 6), nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        before = self.body(x)
        features = before.relu()
        return before, features.tanh(), self.other(x), self.last(features)


def test_logits_of_another_layer_that_are_returned_first_may_be_those_meant() -> None:
    model, x, labels = Returns(), torch.randn(5, 4), torch.arange(5) % 3
    with pytest.raises(lm.LargeMarginError, match=r"output of 'other' .* before that of 'last'"):
        lm.attach(model, lm.CrossEntropy(), warn=False)(model(x), labels)
    model = Returns()
    criterion = lm.attach(model, lm.CrossEntropy(), layer="other")
    value = criterion(model(x), labels)
    torch.testing.assert_close(value, nn.functional.cross_entropy(model.other(x), labels))

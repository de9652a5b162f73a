"""Architectures of torchvision, timm and transformers, and what attach has to do with each.

Small ones with random weights. ``examine`` trains one with a loss and says what holds of it; the
table in docs/models.md is made of that.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import largemargin as lm
from largemargin.dropin.find_head import find_module

C = 5
"""Classes."""
N = 10
"""Samples."""
STEPS = 20
LABELS = torch.arange(N) % C

LOSSES: dict[str, Callable[[int, int], Any]] = {
    "cosine": lambda num_classes, dim: lm.CosFace(scale=8.0, margin=0.1),
    "logits": lambda num_classes, dim: lm.CrossEntropy(),
    "centroids": lambda num_classes, dim: lm.CrossEntropy() + lm.Discriminative(num_classes, dim),
}
CHECKS = {
    "gradients": "gradients reach the first layer",
    "falls": f"the loss falls in {STEPS} steps",
    "prediction": "the model predicts with the geometry it was trained with",
    "state_dict": "a new model with the same state predicts the same",
    "deepcopy": "a copy predicts the same and trains by itself",
    "ema": "an exponential moving average of the weights predicts",
    "pickle": "model and criterion are pickled together",
    "undo": "undo gives the layer back, with the trained weight",
}


@dataclass(frozen=True)
class Example:
    """An architecture, what it is called with, and what attach has to be told."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor] | Tensor]
    layer: str | None = None
    """Of the head, where there are several."""
    refused: str = ""
    """A part of the message where attach cannot serve."""
    rate: float = 1e-3
    """Learning rate."""
    distilled: bool = False
    """Two heads, which training returns apart and evaluation as their mean."""


def images(size: int, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, channels, size, size)


def tv(
    name: str, size: int = 32, layer: str | None = None, rate: float = 1e-3, **settings: Any
) -> Example:
    def build() -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, num_classes=C, **settings)
        return model

    return Example(build, images(size), layer, rate=rate)


def torchvision_examples() -> dict[str, Example]:
    models = torchvision.models
    block = models.convnext.CNBlockConfig
    return {
        "alexnet": tv("alexnet", 64, rate=1e-4),
        "convnext": Example(
            lambda: models.ConvNeXt([block(8, 16, 1), block(16, None, 1)], num_classes=C),
            images(32),
        ),
        "densenet": Example(lambda: models.DenseNet(8, (2, 2, 2, 2), 8, num_classes=C), images(32)),
        "efficientnet": tv("efficientnet_b0"),
        "efficientnet_v2": tv("efficientnet_v2_s"),
        "googlenet": tv("googlenet", 64, "fc", init_weights=False, aux_logits=True),
        "inception": tv("inception_v3", 128, init_weights=False, aux_logits=False),
        "maxvit": Example(
            lambda: models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=C),
            images(32),
        ),
        "mnasnet": tv("mnasnet0_5"),
        "mobilenet_v2": tv("mobilenet_v2"),
        "mobilenet_v3": tv("mobilenet_v3_small"),
        "regnet": tv("regnet_x_400mf"),
        "resnet": tv("resnet18"),
        "resnext": Example(
            lambda: models.ResNet(
                models.resnet.Bottleneck, [1, 1, 1, 1], C, groups=8, width_per_group=4
            ),
            images(32),
        ),
        "shufflenet_v2": tv("shufflenet_v2_x0_5"),
        "squeezenet": Example(
            lambda: models.squeezenet1_1(num_classes=C), images(64), refused="1x1 convolution"
        ),
        "swin": Example(
            lambda: models.SwinTransformer([2, 2], 16, [1, 1], [2, 4], [4, 4], num_classes=C),
            images(32),
        ),
        "swin_v2": Example(
            lambda: models.SwinTransformer(
                *([2, 2], 16, [1, 1], [2, 4], [4, 4]),
                num_classes=C,
                block=models.swin_transformer.SwinTransformerBlockV2,
                downsample_layer=models.swin_transformer.PatchMergingV2,
            ),
            images(32),
        ),
        "vgg": tv("vgg11_bn", rate=1e-4),
        "vit": Example(
            lambda: models.VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=C), images(32)
        ),
        "wide_resnet": Example(
            lambda: models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], C, width_per_group=128),
            images(32),
        ),
    }


def tm(name: str, size: int = 32, layer: str | None = None, **settings: Any) -> Example:
    def build() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=C, **settings)
        return model

    return Example(build, images(size), layer)


def distilled(example: Example) -> Example:
    def build() -> nn.Module:
        model: Any = example.build()
        model.set_distilled_training(True)
        made: nn.Module = model
        return made

    return replace(example, build=build, distilled=True)


def timm_examples() -> dict[str, Example]:
    tiny = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}
    return {
        "resnet10t": tm("resnet10t"),
        "convnext_atto": tm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        "convnextv2_atto": tm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        "efficientnet_lite0": tm("efficientnet_lite0"),
        "mobilenetv3_small_050": tm("mobilenetv3_small_050"),
        "mobilenetv4_conv_small_035": tm("mobilenetv4_conv_small_035"),
        "ghostnet_050": tm("ghostnet_050"),
        "lcnet_035": tm("lcnet_035"),
        "tinynet_e": tm("tinynet_e"),
        "regnetx_002": tm("regnetx_002"),
        "repvgg_a0": tm("repvgg_a0"),
        "mobileone_s0": tm("mobileone_s0"),
        "edgenext_xx_small": tm("edgenext_xx_small", 64),
        "mobilevit_xxs": tm("mobilevit_xxs", 64),
        "fastvit_t8": tm("fastvit_t8", 64),
        "dla46_c": Example(tm("dla46_c").build, images(32), refused="1x1 convolution"),
        "vit_tiny_patch16_224": tm("vit_tiny_patch16_224", **tiny),
        "deit_tiny_distilled_patch16_224": distilled(
            tm("deit_tiny_distilled_patch16_224", layer="head", **tiny)
        ),
        "eva02_tiny_patch14_224": tm(
            *("eva02_tiny_patch14_224", 28), **{**tiny, "img_size": 28}
        ),
        "mixer_s32_224": tm("mixer_s32_224", img_size=32),
        "resmlp_12_224": tm("resmlp_12_224", img_size=32),
        "poolformer_s12": tm("poolformer_s12"),
        "pvt_v2_b0": tm("pvt_v2_b0"),
        "levit_128s": distilled(tm("levit_128s", 64, "head.linear", img_size=64)),
        "xcit_nano_12_p16_224": tm(
            "xcit_nano_12_p16_224", img_size=32, depth=2, embed_dim=32, num_heads=2
        ),
        "cait_xxs24_224": tm("cait_xxs24_224", **tiny),
        "swin_tiny_patch4_window7_224": tm(
            "swin_tiny_patch4_window7_224", 56,
            img_size=56, embed_dim=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
        ),
        "starnet_s1": tm("starnet_s1", depths=(1, 1, 1, 1)),
    }  # fmt: skip


def tokens() -> dict[str, Tensor]:
    words = torch.randint(3, 30, (N, 9))
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(N, 3, 32, 32)}


def hf(kind: str, inputs: Callable[[], dict[str, Tensor]] = tokens, **settings: Any) -> Example:
    """``kind`` is the class of the model; its configuration is called likewise."""

    def build() -> nn.Module:
        config = getattr(transformers, kind.split("For")[0] + "Config")
        model: nn.Module = getattr(transformers, kind)(config(num_labels=C, **settings))
        return model

    return Example(build, inputs)


def hugging_face_examples() -> dict[str, Example]:
    text = {
        "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 32,
    }  # fmt: skip
    sight = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 24, "image_size": 32, "patch_size": 16,
    }  # fmt: skip
    classes = "ForSequenceClassification"
    small = {"num_key_value_heads": 2, "pad_token_id": 0}
    return {
        "Bert": hf("Bert" + classes, **text),
        "Roberta": hf("Roberta" + classes, **text),
        "Electra": hf("Electra" + classes, embedding_size=16, **text),
        "Albert": hf("Albert" + classes, embedding_size=16, **text),
        "DebertaV2": hf("DebertaV2" + classes, **text),
        "DistilBert": hf(
            "DistilBert" + classes,
            vocab_size=30, dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=32,
        ),
        "GPT2": hf(
            "GPT2" + classes,
            vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=32, pad_token_id=0,
        ),
        "Llama": hf("Llama" + classes, **text, **small),
        "Mistral": hf("Mistral" + classes, **text, **small),
        "ViT": hf("ViTForImageClassification", pixels, **sight),
        "Beit": hf("BeitForImageClassification", pixels, **sight),
        "ConvNext": hf(
            "ConvNextForImageClassification", pixels, hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
        ),
        "ResNet": hf(
            "ResNetForImageClassification", pixels,
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        ),
        "Wav2Vec2": hf(
            "Wav2Vec2" + classes, lambda: {"input_values": torch.randn(N, 400)},
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, classifier_proj_size=12,
            apply_spec_augment=False,
        ),
    }  # fmt: skip


def zoo() -> dict[str, Example]:
    """All of them, by library and name."""
    every = {
        "torchvision": torchvision_examples(),
        "timm": timm_examples(),
        "transformers": hugging_face_examples(),
    }
    return {f"{lib}/{name}": each for lib, found in every.items() for name, each in found.items()}


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def logits_of(outputs: Any) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    logits = logits[0] if isinstance(logits, tuple) else logits
    assert isinstance(logits, Tensor)
    return logits


def predicted(model: nn.Module, inputs: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return logits_of(outputs_of(model, inputs)).float()


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-4, atol=1e-4))


class Trial:
    """One model with one loss: attached, trained a little, and looked at."""

    def __init__(self, example: Example, loss: str) -> None:
        torch.manual_seed(0)
        self.example, self.loss = example, loss
        self.inputs = example.inputs()
        self.model = self.without_dropout(example.build())
        self.criterion = self.attached(self.model)
        self.head = self.criterion.layer

    @staticmethod
    def without_dropout(model: nn.Module) -> nn.Module:
        """Noise of 20 steps must not hide that a loss falls."""
        for module in model.modules():
            for name in ("p", "drop_prob", "dropout", "layerdrop"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return model

    def attached(self, model: nn.Module) -> Any:
        return lm.attach(model, LOSSES[self.loss], layer=self.example.layer)

    def step(
        self, model: nn.Module, criterion: Any, optimizer: Any, labels: Tensor = LABELS
    ) -> float:
        model.train()
        optimizer.zero_grad()
        loss = criterion(outputs_of(model, self.inputs), labels)
        loss.backward()
        return float(loss.detach())

    def train(self) -> dict[str, bool]:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.example.rate)
        average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        values, reached = [], False
        for number in range(STEPS):
            values.append(self.step(self.model, self.criterion, optimizer))
            if number == 1:  # a head of zeros gives none in the first step
                reached = self.first_layer_has_gradient()
            optimizer.step()
            average.update_parameters(self.model)
        found = predicted(average.module, self.inputs)
        unlike = not torch.equal(found, predicted(self.model, self.inputs))
        return {
            "gradients": reached,
            "falls": min(values[-3:]) < values[0],
            "ema": bool(found.isfinite().all()) and unlike,
        }

    def first_layer_has_gradient(self) -> bool:
        first = next(
            parameter
            for module in self.model.modules()
            if not list(module.children()) or isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad and parameter.dim() > 1
        )
        return first.grad is not None and bool(first.grad.abs().sum() > 0)

    def prediction(self) -> bool | str:
        if self.example.distilled:
            return "the mean of two heads, as always"
        seen: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        got = predicted(self.model, self.inputs)
        handle.remove()
        features, weight = seen[-1].detach().float(), self.head.weight.detach().float()
        if self.loss == "cosine":
            unit = torch.nn.functional.normalize
            want = 8.0 * unit(features, dim=-1) @ unit(weight, dim=-1).T
        else:
            want = torch.nn.functional.linear(features, weight, self.head.bias)
        if want.dim() == 3:  # of decoders: every token, of which the last counts
            want = want[:, -1]
        return close(got, want)

    def state_dict(self) -> bool:
        stored = io.BytesIO()
        torch.save((self.model.state_dict(), self.criterion.state_dict()), stored)
        stored.seek(0)
        torch.manual_seed(1)
        other = self.without_dropout(self.example.build())
        criterion = self.attached(other)
        of_model, of_criterion = torch.load(stored, weights_only=True)
        other.load_state_dict(of_model)
        criterion.load_state_dict(of_criterion)
        return close(predicted(other, self.inputs), predicted(self.model, self.inputs))

    def deepcopy(self) -> bool:
        other, criterion = copy.deepcopy((self.model, self.criterion))
        before = predicted(self.model, self.inputs)
        same = close(predicted(other, self.inputs), before)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        self.step(other, criterion, optimizer, LABELS.roll(1))  # those it knows may move nothing
        optimizer.step()
        moved = not torch.equal(predicted(other, self.inputs), before)
        return same and moved and torch.equal(predicted(self.model, self.inputs), before)

    def pickled(self) -> bool | str:
        try:
            pickle.dumps(self.example.build())
        except Exception as error:
            return f"not without attach either ({type(error).__name__})"
        other, criterion = pickle.loads(pickle.dumps((self.model, self.criterion)))
        same = close(predicted(other, self.inputs), predicted(self.model, self.inputs))
        self.step(other, criterion, torch.optim.SGD(other.parameters(), lr=0.1))
        return same

    def undone(self) -> bool:
        weight = self.head.weight.detach().clone()
        self.criterion.undo()
        fresh = self.example.build()
        where = next(name for name, each in self.model.named_modules() if each is self.layer_now())
        kind = type(find_module(fresh, where))
        keys = self.model.state_dict().keys() == fresh.state_dict().keys()
        kept = torch.equal(self.layer_now().weight, weight)
        return (
            keys and kept and type(self.layer_now()) is kind and not self.layer_now()._forward_hooks
        )

    def layer_now(self) -> Any:
        weight = self.head.weight
        return next(
            each for each in self.model.modules() if each._parameters.get("weight") is weight
        )


def examine(example: Example, loss: str) -> dict[str, bool | str]:
    """What holds of a model with a loss: by the names of CHECKS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if example.refused:
            try:
                lm.attach(example.build(), LOSSES[loss])
            except lm.LargeMarginError as error:
                return {"refused": str(error) if example.refused in str(error) else False}
            return {"refused": False}
        trial = Trial(example, loss)
        found: dict[str, bool | str] = {**trial.train()}
        looks: dict[str, Callable[[], bool | str]] = {
            "prediction": trial.prediction,
            "state_dict": trial.state_dict,
            "deepcopy": trial.deepcopy,
            "pickle": trial.pickled,
            "undo": trial.undone,
        }
        for name, look in looks.items():
            found[name] = look()
    return {name: found[name] for name in CHECKS}

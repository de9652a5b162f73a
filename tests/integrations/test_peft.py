"""PEFT: adapters below a head that is trained whole, attached before or after they are made."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.dropin.find_head import find_layer
from largemargin.errors import LargeMarginError, MarginWarning

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from largemargin.integrations.hugging_face import record_head, restore_head  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:from_pretrained will build a plain"),
    pytest.mark.filterwarnings("ignore:this state dict holds"),
]

CLASSES = 4
X, Y = torch.rand(12, 1, 8, 8), torch.arange(12) % CLASSES
TOKENS = torch.randint(1, 20, (12, 6))


def vit() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=CLASSES,
        initializer_range=0.2,
    )
    return transformers.ViTForImageClassification(config)


def gpt2() -> Any:
    """A head without bias: a plain one takes its weight without complaint."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, num_labels=CLASSES, pad_token_id=0)
    return transformers.GPT2ForSequenceClassification(config)


class Plain(nn.Module):
    """No model of transformers, and no configuration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classifier = nn.Linear(64, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x.flatten(1)).tanh())


def lora(model: Any, *, head: str | None = None, task: str | None = None) -> Any:
    targets = {"GPT2ForSequenceClassification": ["c_attn"], "Plain": ["body"]}
    name = type(model).__name__
    config = peft.LoraConfig(
        r=2,
        target_modules=targets.get(name, ["q_proj", "v_proj"]),
        modules_to_save=[head or ("score" if name.startswith("GPT2") else "classifier")],
        task_type=task,
        fan_in_fan_out=name.startswith("GPT2"),
    )
    return peft.get_peft_model(model, config)


ORDERS = ["attach first", "attach second"]


def adapted(base: nn.Module, order: str, objective: Any) -> tuple[Any, lm.Criterion]:
    if order == "attach first":
        criterion = lm.attach(base, objective)
        return lora(base), criterion
    model = lora(base)
    return model, lm.attach(model, objective)


def logits(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def train(model: Any, criterion: lm.Criterion, x: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), Y).backward()
        optimizer.step()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [vit, gpt2, Plain])
def test_saved_adapters_reload_to_equal_logits(
    build: Callable[[], Any], order: str, tmp_path: Path
) -> None:
    x = TOKENS if build is gpt2 else X
    model, criterion = adapted(build(), order, lm.CosFace(scale=9.0))
    before = {name: each.clone() for name, each in model.named_parameters() if each.requires_grad}
    train(model, criterion, x)
    moved = [
        name for name, each in before.items() if not torch.equal(each, model.get_parameter(name))
    ]
    assert any("lora_A" in name for name in moved)
    assert any("modules_to_save.default.weight" in name for name in moved)
    head = find_layer(model, None)[1]
    assert criterion.layer is head
    groups = criterion.param_groups(model, head={"lr": 1.0})
    assert [id(each) for each in groups[1]["params"]] == [id(head.weight)]
    wanted = logits(model.eval()(x)).detach()
    own = 9 * torch.nn.functional.cosine_similarity(
        criterion.read(model(x)).features[:, None], head.weight, dim=-1
    )
    torch.testing.assert_close(own, wanted)

    record_head(model, criterion)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(restore_head(build(), tmp_path), tmp_path)
    assert torch.equal(logits(loaded.eval()(x)), wanted)
    if build is not Plain:
        merged = restore_head(copy.deepcopy(model).merge_and_unload())
        torch.testing.assert_close(logits(merged(x)), wanted)
    model.save_pretrained(tmp_path)
    base = build()
    lm.attach(base, lm.CosFace(scale=9.0))
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(again(x)), wanted)


@pytest.mark.parametrize("order", ORDERS)
def test_both_orders_train_the_same(order: str) -> None:
    """As the other order, and as the plain model with the same trainable weights."""
    results = []
    for each in (order, "attach second"):
        model, criterion = adapted(vit(), each, lm.CosFace(scale=9.0) + 0.1 * lm.SampleMargin())
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                torch.manual_seed(len(name))
                nn.init.normal_(parameter)
        train(model, criterion, X)
        results.append(model.eval()(X).logits.detach())
    assert torch.equal(*results)


def test_schedules_move_the_copy() -> None:
    model = vit()
    ramp = lm.schedules.Ramp("cosface.scale", 2.0, 9.0, steps=2)
    criterion = lm.attach(model, lm.CosFace(scale=9.0), schedule=ramp)
    model = lora(model)
    train(model, criterion, X, steps=2)
    assert criterion.layer.scale == find_layer(model, None)[1].scale == 9.0


def test_a_copy_of_the_head_alone_is_no_copy_of_the_model() -> None:
    """And two heads, of which one is a copy, stay two."""
    model = Plain()
    criterion = lm.attach(model, lm.CosFace())
    other = copy.deepcopy(model.classifier)
    assert next(iter(other._forward_hooks.values())).owner.model is model
    model.add_module("second", other)
    other(model.body(X.flatten(1)))
    criterion(model(X), Y).backward()
    assert criterion.layer is model.classifier
    whole = copy.deepcopy(model)
    assert next(iter(whole.classifier._forward_hooks.values())).owner.model is whole


def test_an_adapter_that_is_switched_off() -> None:
    """The head from before is in its place then, and read."""
    model, criterion = adapted(vit(), "attach first", lm.CosFace(scale=9.0))
    train(model, criterion, X)
    with model.disable_adapter():
        assert criterion.layer is model.base_model.model.classifier.original_module
        features = criterion.read(model(X)).features
        assert find_layer(model, None)[1] is criterion.layer
    assert features.shape == (12, 8)
    assert criterion.layer is model.base_model.model.classifier.modules_to_save["default"]
    assert criterion(model(X), Y).requires_grad


@pytest.mark.parametrize("layer", [None, "base_model.model.classifier"])
def test_a_head_with_an_adapter_is_refused(layer: str | None) -> None:
    config = peft.LoraConfig(r=2, target_modules=["body", "classifier"])
    model = peft.get_peft_model(Plain(), config)
    with pytest.raises(LargeMarginError, match=r"modules_to_save=\['classifier'\]") as caught:
        lm.attach(model, lm.CosFace(), layer=layer)
    assert "adapted by PEFT" in str(caught.value)
    named = lora(vit())
    assert (
        lm.attach(named, lm.CosFace(), layer="base_model.model.classifier").layer
        is (named.base_model.model.classifier.modules_to_save["default"])
    )


def test_the_head_is_that_of_the_adapter_in_use() -> None:
    """Also of one that was used before."""
    model, criterion = adapted(Plain(), "attach first", lm.CrossEntropy())
    model.add_adapter("second", model.peft_config["default"])
    heads = model.base_model.model.classifier.modules_to_save
    nn.init.normal_(heads["second"].weight)
    for name in ("default", "second", "default", "second"):
        model.set_adapter(name)
        outputs = model(X)
        wanted = torch.nn.functional.cross_entropy(outputs, Y)
        torch.testing.assert_close(criterion(outputs, Y), wanted)
        assert criterion._hooks.layer is heads[name]


@pytest.mark.filterwarnings("default::largemargin.errors.MarginWarning")
@pytest.mark.parametrize("build", [vit, Plain])
def test_what_loading_needs_is_said(build: Callable[[], Any], tmp_path: Path) -> None:
    model = lora(build())
    lm.attach(model, lm.CosFace(scale=9.0))
    with pytest.warns(MarginWarning, match=r"restore_head\(base_model, folder\) before PeftModel"):
        model.save_pretrained(tmp_path)
    assert "similarity" in (tmp_path / "largemargin_head.json").read_text()
    with pytest.raises(LargeMarginError, match=r"holds no readable largemargin_head\.json"):
        restore_head(vit(), tmp_path / "elsewhere")
    bare = gpt2()
    lm.attach(bare, lm.CosFace(scale=9.0))  # nothing stands beside this adapter
    with pytest.warns(MarginWarning, match="holds the weight of the head but not its form"):
        lora(bare).save_pretrained(tmp_path)


@pytest.mark.parametrize("build", [vit, gpt2])
def test_an_adapter_without_its_form_is_said_once(
    build: Callable[[], Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Of heads with a bias, too: PEFT ends in a KeyError when such an adapter is loaded."""

    def said(objective: Any, recorded: bool) -> list[str]:
        base = build()
        criterion = lm.attach(base, objective)
        model = lora(base)
        if recorded:
            record_head(model, criterion)
        recwarn.clear()
        model.save_pretrained(tmp_path)
        model.save_pretrained(tmp_path)
        return [str(each.message) for each in recwarn if each.category is MarginWarning]

    (message,) = said(lm.CosFace(scale=9.0), recorded=False)
    assert "record_head(peft_model, criterion) before you save it" in message
    assert not said(lm.CosFace(scale=9.0), recorded=True)
    assert not said(lm.CrossEntropy(), recorded=False)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "peft.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "peft.md", "exec"), names)
    assert torch.isfinite(names["loss"])

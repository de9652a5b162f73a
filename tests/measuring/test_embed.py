"""Features in the plane: who is shown, where, and what is said about it."""

import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from largemargin.errors import LargeMarginError
from largemargin.geometry import variance_split
from largemargin.measuring import Embeddings, embed, embed_arrays
from largemargin.measuring.robust import Patches, Perturbation
from largemargin.measuring.sample_draws import SampleDraws

C = 10


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    given = load_digits()
    return torch.tensor(given.images / 16)[:300, None], torch.tensor(given.target)[:300]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(256, 12), nn.Tanh(),
        nn.Linear(12, C),
    ).double()  # fmt: skip


def batches(x: Tensor, y: Tensor, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def plane(made: Embeddings, layer: int = 0, condition: str = "clean") -> Tensor:
    return torch.tensor(made.layers[layer].points[condition], dtype=torch.float64)


def test_samples_are_of_all_classes_and_the_same_whatever_the_batches(
    digits: tuple[Tensor, Tensor],
) -> None:
    x, y = digits
    made = embed(network(), batches(x, y), method="pca", max_samples=123)
    counts = Counter(made.labels)
    assert sorted(counts.values()) == [12] * 7 + [13] * 3
    assert list(made.index) == sorted(made.index)
    assert made.labels == tuple(y[list(made.index)].tolist())
    keys = SampleDraws(0, "subset").keys(torch.arange(len(y)))
    for label, count in counts.items():
        own = sorted((y == label).nonzero()[:, 0].tolist(), key=keys.__getitem__)
        assert set(own[:count]) == {i for i in made.index if y[i] == label}
    again = embed(network(), batches(x, y, 37), method="pca", max_samples=123)
    assert again.index == made.index
    # It is the samples' own chance: another model, an order of its own, another seed.
    other = embed(network().apply(_shift), [(x, y)], method="pca", max_samples=123)
    assert other.index == made.index
    assert embed(network(), [(x, y)], method="pca", max_samples=123, seed=1).index != made.index
    few = embed(network(), [(x, y)], method="pca", max_samples=20, classes=[3, 7])
    assert Counter(few.labels) == {3: 10, 7: 10}
    all_of_them = embed(network(), [(x, y)], method="pca")
    assert all_of_them.samples == 300
    more = "there are no more of class 0, 1, 2, 3, 4, 5, 6, 7, ..."
    assert any(note.endswith(more) for note in all_of_them.notes)
    both = embed(network(), [(x, y)], method="pca", classes=[3, 7])
    assert any(note.endswith("there are no more of class 3, 7") for note in both.notes)


def _shift(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data += 0.1


def test_layers_predictions_and_margins_are_those_of_the_model(
    digits: tuple[Tensor, Tensor],
) -> None:
    x, y = digits
    net = network()
    made = embed(net, batches(x, y), layers=["1", "penultimate", "3"], method="pca", noise=0.5)
    assert [each.layer for each in made.layers] == ["1", "penultimate", "3"]
    assert [each.dim for each in made.layers] == [4, 12, 12]
    assert made.layers[0].pooling == "mean over space"
    kept = list(made.index)
    with torch.no_grad():
        logits = net(x[kept])
        maps = net[:2](x[kept]).mean((2, 3))
    assert made.predictions["clean"] == tuple(logits.argmax(1).tolist())
    own = logits[range(len(kept)), y[kept]]
    rival = logits.scatter(1, y[kept][:, None], -math.inf).amax(1)
    assert made.margins["clean"] == pytest.approx((own - rival).tolist())
    split = variance_split(maps, y[kept])
    found = made.layers[0].feature_variance["clean"]
    assert (found.within, found.between) == pytest.approx(
        (float(split.within), float(split.between))
    )
    for layer in made.layers:
        for condition, points in layer.points.items():
            split = variance_split(torch.tensor(points).double(), torch.tensor(made.labels))
            assert layer.variance[condition].ratio == pytest.approx(float(split.ratio))
    assert made.noise == "Gaussian, sigma 0.5"
    assert any("noise: Gaussian, sigma 0.5, seed 0" in each for each in made.assumed)
    still = embed(net, batches(x, y), layers=["3"], method="pca", max_samples=20)
    assert not any("noise" in each for each in still.assumed)
    assert made.predictions["noisy"] != made.predictions["clean"]
    assert all(not module._forward_hooks for module in net.modules())
    assert all(module.training for module in net.modules())


def test_clean_and_noisy_are_one_fit() -> None:
    y = torch.arange(300) % C
    clean, noisy = torch.randn(300, 5).double(), torch.randn(300, 5).double() + 3
    made = embed_arrays(clean, y, noisy=noisy, method="pca")
    whole = PCA(2, svd_solver="full").fit_transform(torch.cat([clean, noisy]).numpy())
    got = torch.cat([plane(made), plane(made, 0, "noisy")]).numpy()
    np.testing.assert_allclose(np.abs(got), np.abs(whole), atol=1e-9)
    assert plane(made, 0, "noisy")[:, 0].mean() * plane(made)[:, 0].mean() < 0
    assert (got[np.abs(got).argmax(0), [0, 1]] > 0).all()


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_equal_seeds_give_equal_points(digits: tuple[Tensor, Tensor], method: str) -> None:
    x, y = digits
    options: dict[str, Any] = {"method": method, "max_samples": 60, "noise": 0.1, "layers": ["1"]}
    made = embed(network(), batches(x, y), **options)
    assert embed(network(), batches(x, y), **options) == made
    assert Embeddings.from_json(made.to_json()) == made
    other = embed(network(), batches(x, y), **options, seed=5)
    assert other.layers[0].points != made.layers[0].points
    assert (made.layers[0].perplexity is None) == (method == "pca")
    assert (len(made.layers[0].explained) == 2) == (method == "pca")
    assert f"by {method}" in str(made)


def test_turned_features_have_the_same_components() -> None:
    features, labels = torch.randn(50, 6).double() * torch.arange(1, 7), torch.arange(50) % 3
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    straight = embed_arrays(features, labels, method="pca")
    turned = embed_arrays(features @ turn, labels, method="pca")
    torch.testing.assert_close(plane(turned), plane(straight), rtol=1e-9, atol=1e-9)
    centred = features - features.mean(0)
    values = torch.linalg.svdvals(centred).square()
    shares = (values[:2] / values.sum()).tolist()
    assert straight.layers[0].explained == pytest.approx(shares)


def test_tsne_keeps_neighbours_together() -> None:
    """Clusters far apart stay clusters, and the classes in them are separated in the plane."""
    labels = torch.arange(90) % 3
    features = 30 * torch.eye(3, 60)[labels] + torch.randn(90, 60)
    made = embed_arrays(features, labels, perplexity=10.0)
    assert made.layers[0].components == 50
    assert any("perplexity 10.0 of 50 principal components" in each for each in made.assumed)
    narrow = embed_arrays(features[:, :3], labels, perplexity=10.0)
    assert not any("components" in each for each in narrow.assumed)
    assert made.layers[0].perplexity == 10
    assert made.layers[0].variance["clean"].ratio > 5
    points = plane(made)
    apart = torch.cdist(points, points).fill_diagonal_(math.inf)
    assert bool((labels[apart.argmin(1)] == labels).all())


def test_noise_is_added_before_normalisation(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    mean, std = 0.3, 0.25
    plain = embed(network(), [(x, y)], method="pca", noise=0.2, max_samples=50)

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs * std + mean)

    made = embed(
        Normalized(), [((x - mean) / std, y)], method="pca", noise=0.2, max_samples=50,
        normalization=(mean, std),
    )  # fmt: skip
    torch.testing.assert_close(plane(made, 0, "noisy"), plane(plain, 0, "noisy"))


def test_perturbations_of_images(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    noise = Perturbation(occlusion=Patches(1, 8, 8))  # nothing is left of any image
    made = embed(network(), batches(x, y), method="pca", noise=noise, max_samples=40)
    assert plane(made, 0, "noisy").std(0).max() < 1e-12 < plane(made).std(0).min()
    assert made.noise == "Perturbation(occlusion=Patches(number=1, height=8, width=8))"
    flat = nn.Sequential(nn.Linear(64, 12), nn.Linear(12, C)).double()
    with pytest.raises(LargeMarginError, match="images must have shape"):
        embed(flat, [(x.flatten(1), y)], noise=noise, method="pca")


def test_arrays_of_several_layers() -> None:
    labels = torch.tensor([4, 4, 9, 9] * 5)
    rows = {"a": np.random.default_rng(0).normal(size=(20, 3)), "b": torch.randn(20, 7)}
    made = embed_arrays(rows, labels, method="pca", logits=torch.randn(20, 10), max_samples=10)
    assert [(each.layer, each.dim) for each in made.layers] == [("a", 3), ("b", 7)]
    assert Counter(made.labels) == {4: 5, 9: 5}
    assert len(made.predictions["clean"]) == 10
    assert "noisy" not in made.layers[0].points
    with pytest.raises(LargeMarginError, match=r"the same layers, but \['b'\]"):
        embed_arrays(rows, labels, noisy={"a": rows["a"]})
    with pytest.raises(LargeMarginError, match=r"must have shape \(20, D\)"):
        embed_arrays(torch.randn(19, 3), labels)


def test_few_samples_and_few_dimensions() -> None:
    line, labels = torch.arange(12.0)[:, None], torch.arange(12) % 2
    made = embed_arrays(line, labels, method="pca")
    assert plane(made)[:, 1].abs().max() == 0
    small = embed_arrays(line, labels)
    assert small.layers[0].perplexity == pytest.approx(11 / 3)
    assert any("perplexity 30 is too large for 12 points" in note for note in small.notes)
    same = embed_arrays(torch.ones(12, 3), labels)
    assert set(same.layers[0].points["clean"]) == {(0.0, 0.0)}
    assert math.isnan(same.layers[0].variance["clean"].ratio)
    assert any("all features are equal" in note for note in same.notes)
    str(same)
    with pytest.raises(LargeMarginError, match="t-SNE needs 4 points"):
        embed_arrays(line[:3], labels[:3])
    two = embed_arrays(line[:2], labels[:2], method="pca")
    assert plane(two).norm(dim=1).tolist() == pytest.approx(
        [float((line[0] - line[1]).norm()) / 2] * 2
    )
    with pytest.raises(LargeMarginError, match="2 samples at least"):
        embed_arrays(line[:1], labels[:1], method="pca")


X, Y = torch.randn(20, 3), torch.arange(20) % 2
NET = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "nothing was found to embed: the loader is empty"),
        ([X], {}, "without labels"),
        ([(X, Y + 1)], {}, r"lie in \[0, 2\)"),
        ([(X, Y)], {"method": "umap"}, "one of 'tsne', 'pca'"),
        ([(X, Y)], {"layers": ["2"]}, "has no layer '2'"),
        ([(X, Y)], {"layers": []}, "different names"),
        ([(X, Y)], {"layers": "0"}, r"Write \['0'\]"),
        ([(X, Y)], {"max_samples": 1}, "at least 2, one for each class"),
        ([(X, Y)], {"classes": [2]}, r"different class indices in \[0, 2\)"),
        ([(X, Y)], {"noise": -1.0}, "noise must be a finite number > 0"),
        ([(X, Y)], {"noise": "gaussian"}, "a standard deviation or a robust.Perturbation"),
        ([(X, Y)], {"perplexity": 0}, "perplexity must be"),
        ([({"input": X}, Y)], {"noise": 0.1}, "noise needs a model of one floating point tensor"),
        ([(X / 0, Y)], {}, "features at layer 'penultimate' must be finite, but sample 0"),
        ([(X, Y[:, None].expand(-1, 3))], {}, "one label per sample"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    loader: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LargeMarginError, match=message):
        embed(NET, loader, **options)


def test_loaders_of_any_kind() -> None:
    want = embed(NET, [(X, Y)], method="pca")
    loader = DataLoader(TensorDataset(X, Y), batch_size=6)
    assert embed(NET, loader, method="pca").index == want.index
    dicts = [{"input": X, "labels": Y, "flag": None}]

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = NET

        def forward(self, input: Tensor, flag: None) -> Tensor:
            return self.net(input)

    made = embed(Named(), dicts, method="pca")
    torch.testing.assert_close(plane(made), plane(want))
    shuffled = embed(NET, DataLoader(TensorDataset(X, Y), shuffle=True), method="pca")
    assert any("order of its own" in note for note in shuffled.notes)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(LargeMarginError, match=r"largemargin\[sklearn\]"):
        embed(NET, [(X, Y)], method="pca")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integers(dtype: torch.dtype) -> None:
    rows, logits, labels = torch.randn(12, 5), torch.randn(12, 3), torch.arange(12) % 3
    want = embed_arrays(rows, labels, method="pca", logits=logits)
    assert embed_arrays(rows, labels.to(dtype), method="pca", logits=logits) == want


def test_arrays_skip_labels() -> None:
    rows, labels = torch.randn(12, 5), torch.arange(12) % 3
    labels[2] = -100
    found = embed_arrays(rows, labels, method="pca")
    assert found.samples == 11
    assert 2 not in found.index


def test_features_of_length_one(digits: tuple[Tensor, Tensor]) -> None:
    """As a head on cosines sees them: what lengths add to the picture is gone, nothing else."""
    x, y = digits
    made, kept = (
        embed(network(), [(x, y)], method="pca", layers=["3", "penultimate"], unit=unit)
        for unit in (True, False)
    )
    assert made.layers[0] == kept.layers[0]
    features = network()[:5](x).detach()
    for rows, found in ((nn.functional.normalize(features), made), (features, kept)):
        total = float(variance_split(rows, y)[2])
        assert found.layers[1].feature_variance["clean"].total == pytest.approx(total, rel=1e-6)
    assert "features of length 1" in made.assumed
    assert "features of length 1" not in kept.assumed

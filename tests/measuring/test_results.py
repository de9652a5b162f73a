"""Results as JSON, as text, and two of them side by side."""

import doctest
import importlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Geometry,
    GeometryComparison,
    compare_geometry,
    measure,
    measure_arrays,
)
from largemargin.measuring.records import Record


@pytest.fixture
def arrays() -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(4, 6)
    labels = torch.arange(40) % 3
    return weight[labels] + torch.randn(40, 6), labels, weight


def test_json_comes_back_equal(arrays: tuple[Tensor, ...], tmp_path: Path) -> None:
    g = measure_arrays(*arrays, pairwise=True, ood=torch.randn(5, 6))
    assert math.isnan(g.margins["raw"].classes.mean[3])
    text = g.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Geometry.from_json(text) == g
    assert Geometry.from_json(text).to_json() == text
    path = tmp_path / "new" / "geometry.json"
    g.save(path)
    assert Geometry.load(path) == g
    assert [each.name for each in path.parent.iterdir()] == ["geometry.json"]
    changed = json.loads(text)
    changed["margins"]["raw"]["classes"]["mean"][0] += 1e-12
    assert Geometry.from_dict(changed) != g


def test_a_result_says_what_it_is_of(arrays: tuple[Tensor, ...], tmp_path: Path) -> None:
    g = measure_arrays(*arrays, data_name="flowers, test")
    g.save(tmp_path / "geometry.json")
    assert Geometry.load(tmp_path / "geometry.json").data == "flowers, test"
    assert str(g).splitlines()[1] == "flowers, test"
    model, loader = nn.Linear(6, 4), [(arrays[0], arrays[1])]
    assert measure(model, loader, data_name="flowers, train", bounds=True).data == "flowers, train"
    other = measure(model, loader, data_name="flowers, train")
    (note,) = (each for each in compare_geometry(g, other).notes if "different data" in each)
    assert note == "they are of different data: a of flowers, test, b of flowers, train"
    unsaid = measure(model, loader)
    assert unsaid.data is None
    assert not any("different data" in each for each in compare_geometry(g, unsaid).notes)
    with pytest.raises(LargeMarginError, match="in words"):
        measure(model, loader, data_name=loader)


def test_classes_are_called_by_their_names(arrays: tuple[Tensor, ...], tmp_path: Path) -> None:
    names = ["ant", "bee", "cat", "dog"]
    g = measure_arrays(*arrays, class_names=names)
    g.save(tmp_path / "geometry.json")
    assert Geometry.load(tmp_path / "geometry.json").class_names == tuple(names)
    first, second = (names[each] for each in g.prototypes.closest_classes)
    assert f"° between classes {first} and {second}\n" in str(g)
    first, second = (names[each] for each in g.centers.closest_classes)
    (means,) = (line for line in str(g).splitlines() if line.startswith("closest class means"))
    assert means.endswith(f" between classes {first} and {second}")
    model, loader = nn.Linear(6, 4), [(arrays[0], arrays[1])]
    other = measure(model, loader, class_names=names[::-1])
    assert other.class_names == tuple(names[::-1])
    (note,) = (each for each in compare_geometry(g, other).notes if "names" in each)
    assert note == "their classes have different names: differences by class mean nothing"


def test_names_of_classes_are_asked_for_one_by_one(arrays: tuple[Tensor, ...]) -> None:
    for wrong in (["ant", "bee"], "abcd", [1, 2, 3, 4], [f"{each}" for each in range(9)]):
        with pytest.raises(LargeMarginError, match="class_names must be 4 names"):
            measure_arrays(*arrays, class_names=wrong)


def test_a_result_without_names_still_loads(arrays: tuple[Tensor, ...]) -> None:
    g = measure_arrays(*arrays)
    old = {k: v for k, v in g.to_dict().items() if k not in ("class_names", "data")}
    assert Geometry.from_dict(old) == g
    numbers = " and ".join(str(each) for each in g.prototypes.closest_classes)
    assert f"between classes {numbers}\n" in str(g)


def test_files_that_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"samples": 3}', '{"accuracy": {}}'):
        path.write_text(text)
        with pytest.raises(LargeMarginError):
            Geometry.load(path)
    path.write_text('{"colour": 1}')
    with pytest.raises(LargeMarginError, match="newer one"):
        Geometry.load(path)


def test_a_newer_format_is_refused_by_its_number(
    arrays: tuple[Tensor, ...], tmp_path: Path
) -> None:
    """Even where no entry is new: what one means may have changed."""
    path = tmp_path / "x.json"
    made = measure_arrays(*arrays)
    path.write_text(json.dumps({**made.to_dict(), "format": 1}))  # of every release so far
    assert Geometry.load(path) == made
    path.write_text(json.dumps({**made.to_dict(), "format": 2}))
    with pytest.raises(LargeMarginError, match="newer version of largemargin: its format is"):
        Geometry.load(path)


@dataclass(frozen=True)
class Sample(Record):
    pair: tuple[int, float]
    names: dict[int, tuple[float, ...]]
    maybe: float | None = None


def test_records_of_any_kind() -> None:
    record = Sample((1, math.inf), {3: (math.nan, -math.inf)}, None)
    again = Sample.from_json(record.to_json())
    assert again == record
    assert isinstance(again.pair[1], float)
    assert again != Sample((1, math.inf), {3: (math.nan, math.inf)})
    assert record != 3
    with pytest.raises(LargeMarginError, match="has no place in a result"):
        Sample((1, 2.0), {}, torch.ones(1)).to_json()  # type: ignore[arg-type]


def test_the_table(arrays: tuple[Tensor, ...]) -> None:
    g = measure_arrays(*arrays, pairwise=True, ood=torch.randn(5, 6), similarity="cosine", scale=4)
    lines = str(g).splitlines()
    assert lines[0] == "40 samples, 4 classes, 6 dimensions, cosine head, scale 4"
    assert lines[-1] == "note: no samples of class 3: numbers by class are NaN there"
    heads = next(line for line in lines if line.startswith("sample margins"))
    ends = [match.end() for match in re.finditer(r"mean/std|mean|std|min|5 %|median", heads)]
    for label in ("logits", "cosine", "distance to the boundary"):
        line = next(each for each in lines if each.startswith(f"  {label}"))
        columns = [match.end() for match in re.finditer(r"(?<= )-?[\d.e+-]+(?= |$)", line)]
        assert columns == ends, line
    facts = {line[:33].strip(): line[33:].strip() for line in lines[1:-1]}
    assert facts["accuracy"] == f"{100 * g.accuracy:.2f} %"
    assert facts["class margin"].startswith(f"{g.prototypes.class_margin:.2f}° between classes")
    assert facts["at most"] == "109.47°, which can be reached"
    assert facts["within 0.5 of the class mean"].endswith("%")
    assert max(len(line) for line in lines) < 110
    wrong = str(measure_arrays(torch.eye(2), torch.tensor([1, 0]), torch.eye(2)))
    assert "nothing right to tell them from" in wrong
    plain = str(measure_arrays(*arrays))
    assert "dispersion" not in plain
    assert "OOD" not in plain


def test_side_by_side(arrays: tuple[Tensor, ...]) -> None:
    features, labels, weight = arrays
    a = measure_arrays(features, labels, weight, pairwise=True)
    b = measure_arrays(3 * features, labels, weight, similarity="cosine")
    found = compare_geometry(a, b, names=("plain", "cosine"))
    raw = found.quantities["margins.raw.overall.mean"]
    assert raw.first == a.margins["raw"].overall.mean
    assert raw.second == b.margins["raw"].overall.mean
    assert raw.change == raw.second - raw.first
    assert found.quantities["margins.cosine.overall.mean"].change == pytest.approx(0, abs=1e-7)
    assert found.quantities["feature_norm.mean"].second == pytest.approx(3 * a.feature_norm.mean)
    assert "compactness.separation" not in found.quantities
    assert any("compare cosine margins" in note for note in found.notes)
    fewer = measure_arrays(features[:30, :5], labels[:30], weight[:, :5])
    notes = compare_geometry(a, fewer).notes
    assert "a has 40 samples, b has 30" in notes
    assert "a has 6 dimensions, b has 5" in notes
    assert GeometryComparison.from_json(found.to_json()) == found
    lines = str(found).splitlines()
    assert lines[0].split() == ["plain", "cosine", "change"]
    width = len(lines[0])
    body = [line for line in lines if not line.startswith("note:")]
    assert {len(line) for line in body} == {width}
    assert all(line.split()[-1][0] in "+-0n" for line in body[1:])


def test_scaling_does_not_change_the_relative_margin(arrays: tuple[Tensor, ...]) -> None:
    features, labels, weight = (
        each.double() if each.is_floating_point() else each for each in arrays
    )
    a, b = (measure_arrays(scale * features, labels, weight) for scale in (1, 4))
    found = compare_geometry(a, b).quantities
    assert found["relative_margin"].change == pytest.approx(0, abs=1e-12)
    assert found["margins.distance.overall.mean"].second == pytest.approx(
        4 * found["margins.distance.overall.mean"].first
    )
    assert compare_geometry(a, a).quantities["loss"].change == 0


def test_only_results_are_compared(arrays: tuple[Tensor, ...]) -> None:
    g = measure_arrays(*arrays)
    with pytest.raises(LargeMarginError, match="b must be a Geometry"):
        compare_geometry(g, "geometry.json")  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match="names must be two"):
        compare_geometry(g, g, names=("a", "b", "c"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        *("measure", "distributions", "calibration", "records"),
        *("geometry_result", "layers", "embed", "probe", "logit_model"),
    ],
)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"largemargin.measuring.{name}")
    names = {"torch": torch, "nn": nn, "measure": measure}
    assert doctest.testmod(module, extraglobs=names).failed == 0

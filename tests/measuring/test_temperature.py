"""Temperatures: the optimum, what it does to probabilities, and where there is none."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.app.predict import predict
from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Temperature,
    TemperatureScaled,
    accuracy_of,
    calibrate,
    calibrate_temperature,
)
from largemargin.measuring.calibrate import temperature_of


def drawn(classes: int, scale: float, *, n: int = 500, truth: float = 1.7) -> tuple[Tensor, Tensor]:
    """Labels drawn from the softmax of ``truth`` times numbers, and those times ``scale``."""
    generator = torch.Generator().manual_seed(classes)
    numbers = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(truth * numbers, 1), 1, generator=generator)[:, 0]
    return scale * numbers, labels


@pytest.mark.parametrize("classes", [2, 10, 300])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 2.2, 64.0, 1e4])
def test_it_is_the_minimum_of_the_loss(classes: int, scale: float) -> None:
    logits, labels = drawn(classes, scale)

    def loss(log: float) -> float:
        return float(F.cross_entropy(logits / math.exp(log), labels))

    middle = math.log(scale / 1.7)
    best = minimize_scalar(
        loss, bounds=(middle - 2, middle + 2), method="bounded", options={"xatol": 1e-9}
    )
    found = temperature_of(logits, labels)
    assert found.value == pytest.approx(math.exp(best.x), rel=1e-4)
    assert found.loss == pytest.approx(best.fun, abs=1e-12)
    assert found.loss <= best.fun + 1e-13
    assert found.loss_before == pytest.approx(loss(0.0))
    assert found.samples == 500


@pytest.mark.parametrize("scale", [0.1, 64.0])
def test_steps_are_newtons(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halving alone would take thirty steps for nine digits."""
    steps = []
    real = calibrate._slope
    monkeypatch.setattr(calibrate, "_slope", lambda *a: steps.append(1) or real(*a))
    temperature_of(*drawn(10, scale))
    assert len(steps) <= 20


@pytest.mark.parametrize("factor", [1e3, 1e12])
def test_the_scale_of_the_logits_does_not_matter(factor: float) -> None:
    logits, labels = drawn(10, 1.0)
    one, other = temperature_of(logits, labels), temperature_of(factor * logits, labels)
    assert other.value == pytest.approx(factor * one.value, rel=1e-8)
    assert (other.loss, other.ece) == pytest.approx((one.loss, one.ece))


@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_a_number_added_to_all_logits_changes_nothing(shift: float) -> None:
    logits, labels = drawn(10, 1.0)
    one, other = temperature_of(logits, labels), temperature_of(logits + shift, labels)
    assert (other.value, other.loss) == pytest.approx((one.value, one.loss))


def test_calibration_errors_have_the_bins_that_were_asked_for() -> None:
    """In one bin it is the mean probability less the accuracy."""
    logits, labels = drawn(10, 5.0)
    found = temperature_of(logits, labels, bins=1)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    for error, scaled in ((found.ece_before, logits), (found.ece, logits / found.value)):
        sure = float(torch.softmax(scaled, 1).amax(1).mean())
        assert error == pytest.approx(abs(sure - accuracy), abs=1e-6)
    assert found.ece_before < temperature_of(logits, labels, bins=50).ece_before
    model = nn.Linear(10, 10, bias=False).double()
    nn.init.eye_(model.weight)
    again = calibrate_temperature(model, [(logits, labels)], bins=1)
    assert (again.ece, again.ece_before) == pytest.approx((found.ece, found.ece_before))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = drawn(10, 5.0)
    whole = temperature_of(logits, labels)
    monkeypatch.setattr(calibrate, "AT_ONCE", 70)
    assert temperature_of(logits, labels).value == pytest.approx(whole.value, rel=1e-9)


def test_a_class_that_is_ruled_out() -> None:
    logits, labels = drawn(4, 5.0)
    wide = torch.cat([logits, torch.full((500, 1), -torch.inf)], 1)
    assert temperature_of(wide, labels).value == pytest.approx(temperature_of(logits, labels).value)


def test_probabilities_mean_what_they_say() -> None:
    logits, labels = drawn(10, 0.2, n=20_000)
    found = temperature_of(logits, labels)
    assert found.value == pytest.approx(0.2 / 1.7, rel=0.03)
    assert found.ece_before > 0.3
    assert found.ece < 0.02
    assert "calibration error" in str(found)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[2.0, 0.0], [0.0, 1.0]], [0, 1], "all 2 validation samples are predicted right"),
        ([[2.0, 0.0], [0.0, 1.0]], [1, 0], "not above the mean of all"),
        ([[1.0, 1.0], [3.0, 3.0]], [1, 0], "predicted right|not above the mean"),
        ([[math.nan, 0.0], [0.0, 1.0]], [1, 0], "1 rows hold NaN"),
        ([[math.inf, 0.0], [0.0, 1.0], [1.0, 0.0]], [0, 1, 1], "1 rows hold infinity"),
        ([[2.0, 0.0], [0.0, 1.0]], [0, 2], r"labels must lie in \[0, 2\)"),
    ],
)
def test_where_there_is_none(logits: Any, labels: Any, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        temperature_of(torch.tensor(logits), torch.tensor(labels))


def noisy_net() -> tuple[nn.Module, Samples]:
    """A model that is right three times of four, and always sure."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    nn.init.normal_(model[1].weight, std=20.0, generator=generator)  # type: ignore[arg-type]
    pixels = torch.rand(200, 1, 3, 3, generator=generator)
    labels = model(pixels).argmax(1)
    labels[::4] = (labels[::4] + 1) % 3
    return model, Samples(labels, [str(i) for i in range(200)], pixels)


def test_a_model_on_validation_data() -> None:
    model, samples = noisy_net()
    model.train()
    found = calibrate_temperature(model, samples, batch_size=64)
    assert model.training
    assert samples.pixels is not None
    # The size of a batch may change the last digit of its products.
    logits = torch.cat([model(part) for part in samples.pixels.split(64)])
    assert found == temperature_of(logits.detach(), samples.labels)
    tempered = TemperatureScaled(model, found)
    after = accuracy_of(tempered, samples, num_classes=3)
    before = accuracy_of(model, samples)
    assert (after.accuracy, after.confusion) == (before.accuracy, before.confusion)
    assert after.loss == pytest.approx(found.loss, rel=1e-5)
    assert after.ece == pytest.approx(found.ece, abs=1e-4)
    assert before.ece == pytest.approx(found.ece_before)
    assert after.ece < before.ece
    assert after.loss < 0.1 * before.loss


def test_samples_without_a_label_are_skipped() -> None:
    model, samples = noisy_net()
    assert samples.pixels is not None
    labels = samples.labels.clone()
    labels[150:] = -100
    found = calibrate_temperature(model, [(samples.pixels, labels)])
    assert found.samples == 150
    short = calibrate_temperature(model, [(samples.pixels[:150], labels[:150])])
    assert found.value == pytest.approx(short.value)


def test_logits_without_a_label_are_skipped() -> None:
    logits, labels = drawn(4, 5.0)
    marked = torch.where(torch.arange(len(labels)) < 100, -100, labels)
    assert temperature_of(logits, marked) == temperature_of(logits[100:], labels[100:])


def test_a_tempered_model_trains_saves_and_reads_other_outputs(tmp_path: Path) -> None:
    class Both(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"features": x, "logits": super().forward(x)}

    model = TemperatureScaled(Both(4, 3), 0.25)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), 4 * model.model.model(x)["logits"])
    assert [name for name, _ in model.named_parameters()] == [
        "model.model.weight",
        "model.model.bias",
    ]
    other = TemperatureScaled(Both(4, 3), 1.0)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_predictions_keep_their_margin_and_change_their_probability() -> None:
    model, samples = noisy_net()
    found = calibrate_temperature(model, samples)
    plain, fitted = predict(model, samples), predict(model, samples, temperature=found)
    assert fitted.temperature == found
    assert plain.temperature is None
    assert samples.pixels is not None
    expected = torch.softmax(model(samples.pixels).double() / found.value, 1).amax(1)
    assert [row.probability for row in fitted] == pytest.approx(expected.tolist(), rel=1e-5)
    for one, other in zip(plain, fitted, strict=True):
        assert (one.label, one.margin) == (other.label, other.margin)
    by_number = predict(model, samples, temperature=found.value)
    assert [row.probability for row in by_number] == [row.probability for row in fitted]
    assert type(fitted).from_dict(fitted.to_dict()) == fitted


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, True])
def test_temperatures_are_positive(value: Any) -> None:
    model, samples = noisy_net()
    with pytest.raises(LargeMarginError, match="temperature must be a finite number > 0"):
        predict(model, samples, temperature=value)
    with pytest.raises(LargeMarginError, match="temperature must be a finite number > 0"):
        TemperatureScaled(model, value)


def test_validation_data_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = noisy_net()
    with pytest.raises(LargeMarginError, match=r"there is none\. Hold some out"):
        calibrate_temperature(model, None)
    with pytest.raises(LargeMarginError, match="but it is empty"):
        calibrate_temperature(model, [])
    monkeypatch.setattr(calibrate, "MOST", 600)
    assert calibrate_temperature(model, samples).samples == 200
    monkeypatch.setattr(calibrate, "MOST", 599)
    with pytest.raises(LargeMarginError, match=r"more than 599 logits would be kept \(3 for each"):
        calibrate_temperature(model, samples)


def test_it_goes_to_json_and_back(tmp_path: Path) -> None:
    found = temperature_of(*drawn(3, 2.0))
    found.save(tmp_path / "t.json")
    assert Temperature.load(tmp_path / "t.json") == found


def test_a_head_of_small_scale_is_calibrated() -> None:
    """What the rule in the benchmark says of LM-Softmax with scale 2.2: right, and never sure."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 6
    x = 0.9 * F.one_hot(labels, 6) + 0.25 * torch.randn(600, 6, generator=generator)
    model = nn.Sequential(nn.Linear(6, 6))
    nn.init.eye_(model[0].weight)
    criterion = lm.attach(model, lm.LMSoftmax(scale=2.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        criterion(model(x), labels).backward()
        optimizer.step()
    found = calibrate_temperature(model, [(x, labels)])
    assert found.value < 0.7
    assert found.ece_before > 0.3
    assert found.ece < 0.1

"""Save, load and export a trained model

`lm.export.save` writes safetensors and JSON: loading them runs no code. `to_onnx` and
`to_exported_program` convert the model with its head into a graph that needs no largemargin, and
compare it with the model first. They need `pip install '.[export]'`.
"""

import json
import tempfile
from pathlib import Path

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import largemargin as lm


def build(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def main() -> dict[str, float]:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels, names = torch.as_tensor(digits.target), [str(digit) for digit in range(10)]
    model = build(width=64)
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale="auto"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for batch in torch.randperm(1300).repeat(10).split(64):
        optimizer.zero_grad()
        criterion(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.eval()
    test, expected = images[1300:], model(images[1300:]).detach()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Safetensors and a readable config.json. Save the optimizer's state yourself.
        lm.export.save(folder / "run", model, criterion, config={"width": 64}, class_names=names)
        # Build the model with its plain head and pass it in: load restores the head's form.
        config = lm.export.read_config(folder / "run")["config"]
        loaded = lm.export.load(folder / "run", build(**config))
        assert torch.equal(loaded.model.eval()(test), expected)
        assert loaded.criterion.steps == criterion.steps  # training can continue

        # ONNX, for onnxruntime: any batch size. The file also holds the class names, and the
        # temperature that calibrates the probabilities; fit it to validation data.
        fitted = lm.measuring.calibrate_temperature(model, [(test[:200], labels[1300:1500])])
        path = folder / "model.onnx"
        lm.export.to_onnx(model, test, path, class_names=names, temperature=fitted.value)
        session = onnxruntime.InferenceSession(path)
        from_onnx = torch.as_tensor(session.run(None, {"input": test.numpy()})[0])
        told = session.get_modelmeta().custom_metadata_map
        assert json.loads(told["largemargin.class_names"]) == names
        assert json.loads(told["largemargin.temperature"]) == fitted.value

        # torch.export, for torch without largemargin.
        program = lm.export.to_exported_program(model, test, outputs="probabilities")
        torch.export.save(program, folder / "model.pt2")
        probabilities = torch.export.load(folder / "model.pt2").module()(test)

    return {
        "accuracy": (from_onnx.argmax(1) == labels[1300:]).float().mean().item(),
        "onnx difference": (from_onnx - expected).abs().max().item(),
        "program difference": (probabilities - expected.softmax(1)).abs().max().item(),
    }


if __name__ == "__main__":
    print(main())

"""Taking a trained model away: graphs and files that need no largemargin, and safe checkpoints.

lm.export.to_onnx(model, images[:1], "model.onnx")       # runs in onnxruntime
program = lm.export.to_exported_program(model, images)   # runs in torch
lm.export.save("run", model, criterion)                  # safetensors and JSON, no pickle
loaded = lm.export.load("run", build_model())
"""

from largemargin.export.onnx_file import to_onnx
from largemargin.export.program import to_exported_program
from largemargin.export.saved_model import Loaded, load, read_config, save

__all__ = ["Loaded", "load", "read_config", "save", "to_exported_program", "to_onnx"]

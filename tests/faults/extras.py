"""What needs an optional package, and the extra that brings it: snippets for any interpreter.

Torch and the library alone can run this file's users, so it imports nothing.
"""

OPTIONAL = (
    *("PIL", "torchvision", "sklearn", "scipy", "accelerate", "jsonargparse", "yaml"),
    *("safetensors", "tqdm", "optuna", "jinja2", "matplotlib", "plotly", "datasets"),
    *("torchmetrics", "lightning", "pytorch_lightning", "transformers", "timm", "skorch", "numpy"),
    *("onnx", "onnxscript", "onnxruntime", "pytorch_metric_learning", "threadpoolctl"),
)

MODEL = """
import tempfile, torch, largemargin as lm
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
images, labels = torch.randn(12, 4), torch.arange(12) % 3
place = tempfile.mkdtemp()
"""
DATA = "from largemargin.app.data import DataConfig, load_data\n"
NETWORK = "from largemargin.app.models import ModelConfig, build_model\n"
FOLDER = """
import os, tempfile
folder = tempfile.mkdtemp()
for name in "ab":
    os.mkdir(f"{folder}/{name}")
    open(f"{folder}/{name}/x.png", "w").close()
"""
EXTRAS = {
    "export.save": ("export", MODEL + "lm.export.save(place + '/a', model)"),
    "export.to_onnx": ("export", MODEL + "lm.export.to_onnx(model, images[:2], place + '/a.onnx')"),
    "LargeMarginClassifier": ("sklearn", "import largemargin\nlargemargin.LargeMarginClassifier"),
    "skorch": ("skorch", "import largemargin.integrations.skorch"),
    "lightning": ("lightning", "import largemargin.integrations.lightning"),
    "transformers": ("transformers", "import largemargin.integrations.hugging_face"),
    "timm": ("timm", "import largemargin.integrations.timm"),
    "torchmetrics": ("torchmetrics", "import largemargin.integrations.torchmetrics"),
    "digits": ("train", DATA + "load_data(DataConfig())"),
    "cifar10": ("train", DATA + "load_data(DataConfig('cifar10'))"),
    "images": ("train", FOLDER + DATA + "load_data(DataConfig('folder', folder))"),
    "huggingface": ("huggingface", DATA + "load_data(DataConfig('huggingface', 'x'))"),
    "npz": (
        "train",
        FOLDER + DATA + "open(folder + '/a.npz', 'w').close()\n"
        "load_data(DataConfig('arrays', folder + '/a.npz'))",
    ),
    "augmentation": ("train", "from largemargin.app.data.augment import transforms\ntransforms()"),
    "torchvision/": ("train", NETWORK + "build_model(ModelConfig('torchvision/resnet18'), 3)"),
    "timm/": ("timm", NETWORK + "build_model(ModelConfig('timm/resnet18'), 3)"),
    "settings": (
        "train",
        "from largemargin.app.training import RunConfig, write_config\n"
        "write_config(RunConfig(), 'not written.yaml')",
    ),
    "trackers": (
        "train",
        "from largemargin.app.training import RunConfig\n"
        "from largemargin.app.training.processes import Processes\n"
        "Processes(RunConfig(trackers=('tensorboard',)))",
    ),
    "tune": (
        "tune",
        "from largemargin.app.training import RunConfig\n"
        "from largemargin.app.training.tuning import tune\n"
        "tune(RunConfig(), folder='not made', trials=1)",
    ),
    "significance": (
        "train",
        "from largemargin.app.training.comparison_result import paired_test\n"
        "paired_test([0.1, 0.2, 0.3], [0.1, 0.1, 0.2])",
    ),
    "report": (
        "report",
        MODEL + "lm.report(lm.measure(model, [(images, labels)]), place + '/report.html')",
    ),
    "plots": ("plot", MODEL + "lm.measure(model, [(images, labels)]).plot()"),
    "t-SNE": ("sklearn", MODEL + "lm.embed(model, [(images, labels)])"),
    "command": ("train", "from largemargin.app.cli import main\nassert main(['train']) == 2"),
}
"""Label: (extra, code that raises an error naming it). The command says it on stderr."""

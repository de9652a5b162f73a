"""Everything that defines a training run, as typed settings: data, network, objective, optimizer.

YAML files, the options of the command line and ``--help`` are derived from these classes.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

LATER = {"later": True}
"""Of settings that are written only where they are set: files of older releases stay equal."""


@dataclass(frozen=True)
class DataConfig:
    """The images: where they come from, which of them are used, how they are changed.

    Everything random here (split, fraction, label noise) depends on ``seed`` alone, not on the
    seed of the training, so that runs with other seeds see the same images. Modifiers are applied
    in this order: classes, test, validation, fraction, imbalance, label noise; the last three
    change training images alone.

    Args:
        name: digits (bundled), cifar10, cifar100, svhn, mnist, fashion_mnist, folder, csv, arrays,
            huggingface, rscd, market1501 or dukemtmc.
        path: folder with the files of a known data set (default: data), an image folder, a CSV
            file, a .npz or .safetensors file, or a folder or the name of a Hugging Face data set.
        download: fetch a known data set when its files are not there, or a Hugging Face data set
            by its name; nothing is ever fetched without it.
        size: side of the square images in pixels; default their own size, 224 for image files
            (unless all have one size up to 64). Image files are scaled to cover the square and
            cut in the middle; those of people (market1501, dukemtmc) are half as wide as high,
            256 x 128 by default.
        width: of the images where they are not square, beside ``size`` as their height.
        validation: share of the training images held out for validation where the data has no
            validation part; 0 for none.
        test: share of the training images held out for testing where the data has no test part;
            none by default (``compare`` with trials takes 0.2).
        fraction: share of the training images that is used, the same of every class. Smaller ones
            are parts of larger ones if those add an image or more to every class, or classes are
            of one size.
        imbalance: thin out the training classes: exp (long-tailed) or step.
        imbalance_ratio: largest class over smallest class.
        label_noise: share of the training labels that is replaced by another class.
        classes: names of the classes to keep; default all.
        augment: changes of training images: none, crop_flip (padding 4, mirror), flip,
            resized_crop (mirror too), perspective_flip or road (colour, rotation, perspective,
            mirror); auto takes crop_flip for CIFAR, SVHN and people, flip for Fashion-MNIST,
            perspective_flip for RSCD, resized_crop for image files above 64 pixels, else none.
        mixup: blend every training image and its label with another's; the strength, alpha of a
            Beta distribution, as 0.2; 0 for none.
        cutmix: paste a rectangle of another training image, with its share of the label; alpha, as
            1; 0 for none. With both, each step takes one of them by chance.
        normalize: mean and standard deviation: auto (those of the data set; ImageNet's for image
            files; computed for arrays), imagenet, computed or none.
        corrupt: what to do about unreadable images: error or skip (named and counted).
        image_column: column of a CSV file or Hugging Face data set with the image.
        label_column: column with the label.
        seed: of the split, the fraction, the imbalance and the label noise.
        workers: processes that read image files during training; 0 reads them in the main one.
        resident: decode image files once and keep them in memory, on the training device: auto (up
            to 2 GiB, and not for training by resized_crop, which needs the whole pictures), yes
            or no.
        validation_from: train, or test: the test images choose the best epoch, as in the published
            code of some papers. What "best" then reaches on them is no fair estimate.
    """

    name: str = "digits"
    path: str | None = None
    download: bool = False
    size: int | None = None
    width: int | None = None
    validation: float = 0.1
    fraction: float = 1.0
    imbalance: Literal["none", "exp", "step"] = "none"
    imbalance_ratio: float = 100.0
    label_noise: float = 0.0
    classes: tuple[str, ...] | None = None
    augment: Literal[
        "auto", "none", "crop_flip", "flip", "resized_crop", "perspective_flip", "road"
    ] = "auto"
    normalize: Literal["auto", "imagenet", "computed", "none"] = "auto"
    corrupt: Literal["error", "skip"] = "error"
    image_column: str = "image"
    label_column: str = "label"
    seed: int = 0
    workers: int = 0
    resident: Literal["auto", "yes", "no"] = "auto"
    validation_from: Literal["train", "test"] = "train"
    test: float = field(default=0.0, metadata=LATER)
    mixup: float = field(default=0.0, metadata=LATER)
    cutmix: float = field(default=0.0, metadata=LATER)


@dataclass(frozen=True)
class ModelConfig:
    """The network. It takes images with values in [0, 1]; normalisation is its first layer.

    Args:
        name: a network of this library (``largemargin list --models``), ``torchvision/NAME``,
            ``timm/NAME`` or, with ``--trust_config``, the Python path of your own, whose outputs
            are features: ``package.module.Network``.
        feature_dim: width of an additional linear layer between the backbone and the head, whose
            outputs are the features; default none, the features are those of the backbone.
        feature_activation: what comes before that layer: relu (as in the papers) or none.
        dropout: probability, where the network has dropout; default its own.
        batch_norm: with or without, where the network leaves the choice; default its own.
        head: linear, or simplex: prototypes fixed at equal angles, times one learned number (needs
            features of at least as many dimensions as classes less one).
        weights: pretrained weights: default (the library's download), the name of a torchvision
            weight set, or a local .safetensors file of the backbone.
        options: further arguments of the torchvision or timm constructor; for networks of this
            library width and dim of small_cnn, hidden of mlp, depth and width of wrn28_10.
        freeze: parts that are not trained, nor their batch statistics: backbone, or names of
            modules in it, as backbone.layer1.
        freeze_batch_norm: keep the mean and variance that batch normalisation has, as pretrained,
            in all of the network.
    """

    name: str = "small_cnn"
    feature_dim: int | None = None
    feature_activation: Literal["relu", "none"] = "relu"
    dropout: float | None = None
    batch_norm: bool | None = None
    head: Literal["linear", "simplex"] = "linear"
    weights: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = field(default=(), metadata=LATER)
    freeze_batch_norm: bool = field(default=False, metadata=LATER)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised.

    Args:
        name: names of ``largemargin list`` with optional weights: ``cosface``,
            ``cross_entropy + 0.5*sample_margin``. A penalty alone comes with a cross entropy.
        settings: arguments of the loss: ``{margin: 0.2}``; for sums by name of the term:
            ``{cosface: {margin: 0.2}}``.
        schedule: preset (the usual warm-ups of these losses) or none.
        layers: names of modules whose outputs go to a loss on hidden layers.
        class_weights: weights of the classes: balanced (1 / number of images), effective (1 /
            effective number of images, beta 0.9999) or a YAML file of names and weights; default
            all equal.
        label_smoothing: share of every label that is spread over all classes.
    """

    name: str = "cross_entropy"
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: Literal["none", "preset"] = "none"
    layers: tuple[str, ...] = ()
    class_weights: str | None = field(default=None, metadata=LATER)
    label_smoothing: float = field(default=0.0, metadata=LATER)


@dataclass(frozen=True)
class NoiseConfig:
    """Noise on training images, in units of [0, 1] pixels, before normalisation.

    Args:
        use: none; noisy (only noisy images); clean_and_noisy (the mean loss of both); pair (a clean
            and a noisy pass, both given to the objective: robust_discriminative, stability).
        kind: gaussian (level is the standard deviation) or uniform (level is the amplitude).
        level: strength.
        clip: cut noisy images back to [0, 1].
        joined: clean and noisy images go through the network as one batch, with common statistics
            of batch normalisation, and not one after the other, with statistics of their own.
            Evaluation knows common statistics only.
        crop: the noisy image has the same crop and mirror as the clean one, or draws of its own.
    """

    use: Literal["none", "noisy", "clean_and_noisy", "pair"] = "none"
    kind: Literal["gaussian", "uniform"] = "gaussian"
    level: float = 0.06
    clip: bool = False
    joined: bool = False
    crop: Literal["same", "own"] = "same"

    @property
    def losses_per_step(self) -> int:
        """How often the criterion is called before the model changes."""
        return 2 if self.use == "clean_and_noisy" and not self.joined else 1


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and the learning rate over time.

    Args:
        name: sgd, adamw or adam.
        lr: learning rate at the start (the highest for one_cycle and after a warm-up).
        momentum: of SGD.
        nesterov: Nesterov's form of momentum.
        weight_decay: on all parameters.
        clip_norm: largest norm of the whole gradient; none does not clip.
        schedule: constant; steps (times ``factor`` at every epoch of ``milestones``); cosine and
            log_linear (down to ``final_lr``); one_cycle.
        milestones: epochs at which ``steps`` lowers the rate.
        factor: by which it does.
        final_lr: rate at the end of cosine and log_linear.
        warmup_epochs: epochs over which the rate rises linearly from 0.
        by: change the rate every step or every epoch (the papers do).
        head_lr: rate of what stands above the backbone (head, feature layer) and of parameters of
            the loss; it follows the same schedule; default lr.
    """

    name: Literal["sgd", "adamw", "adam"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    clip_norm: float | None = 5.0
    schedule: Literal["constant", "steps", "cosine", "log_linear", "one_cycle"] = "cosine"
    milestones: tuple[int, ...] = ()
    factor: float = 0.2
    final_lr: float = 0.0
    warmup_epochs: float = 0.0
    by: Literal["step", "epoch"] = "step"
    head_lr: float | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        name: name of the run; its folder is ``out/<time>-<name>``.
        data: the images.
        model: the network.
        objective: what is minimised.
        noise: noise on training images.
        optimizer: the optimizer.
        epochs: passes over the training images.
        batch_size: images per step, over all processes.
        seed: of initial weights, batch order, augmentation and noise.
        precision: fp32, bf16 or fp16 (autocast).
        compile: use torch.compile.
        graph: capture the whole step in a CUDA graph: auto (where possible), on or off.
        device: auto, cpu, cuda or cuda:1.
        ema: decay of an exponential moving average of the weights, which is then evaluated.
        patience: stop after so many epochs without a better validation result; none never stops.
        select: what "best" means on the validation images; without them the last epoch is taken.
        gradients_every: measure gradient norms of the loss terms and their conflicts every so many
            steps (0: never); each time costs one backward pass to the features per term.
        geometry_samples: images on which margins, dispersion and class vectors are measured after
            every epoch, validation images or else training images (0: never).
        checkpoint_every: epochs between checkpoints.
        max_bad_steps: non-finite steps in a row that are skipped before the run stops.
        measure: measure the geometry of the best model on the test images at the end.
        deterministic: bit-equal repetitions on the same machine, torch and number of threads. It
            costs 0 to 4 % on a CPU; on a GPU some operations get slower, and a network with one
            that has no deterministic form is refused.
        timeout: seconds for which processes that train together wait for each other (also while
            the first one reads the data) before the run ends with an error.
        trackers: names known to accelerate (tensorboard, wandb, ...), beside metrics.jsonl.
        out: folder of all runs.
    """

    name: str = "run"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    epochs: int = 20
    batch_size: int = 128
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    graph: Literal["auto", "on", "off"] = "auto"
    device: str = "auto"
    ema: float | None = None
    patience: int | None = None
    select: Literal["accuracy", "balanced_accuracy", "loss"] = "accuracy"
    gradients_every: int = 50
    geometry_samples: int = 500
    checkpoint_every: int = 1
    max_bad_steps: int = 20
    measure: bool = True
    deterministic: bool = False
    timeout: float = 1800.0
    trackers: tuple[str, ...] = ()
    out: str = "runs"

"""What to train on, as typed settings."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """The images: where they come from, which of them are used, how they are changed.

    Everything random here (split, fraction, label noise) depends on ``seed`` alone, not on the
    seed of the training, so that runs with other seeds see the same images. Modifiers are applied
    in this order: classes, validation, fraction, imbalance, label noise; the last three change
    training images alone.

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

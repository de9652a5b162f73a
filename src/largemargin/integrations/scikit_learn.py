"""``LargeMarginClassifier``: large-margin training as a scikit-learn estimator.

First the estimator, then what it trains and how: inputs, network, samples, optimizer, epochs.
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.errors import (
    LargeMarginError,
    MarginWarning,
    MissingPackage,
    check_choice,
    check_count,
    check_number,
)
from largemargin.integrations.linear_solver import (
    Search,
    assign_folds,
    calibrated,
    squared_lengths,
)
from largemargin.integrations.objective_text import objective_for

try:
    import numpy as np
    from numpy.typing import NDArray
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import normalize as row_normalize
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as missing:
    raise MissingPackage(
        "LargeMarginClassifier needs scikit-learn 1.6 or newer. Install it: "
        "pip install 'largemargin[sklearn]'."
    ) from missing

__all__ = ["LargeMarginClassifier"]

Array = NDArray[Any]

PREDICTED = 1024
"""Samples that go through the network at a time when nothing is trained."""


CHEAP = 2000
"""Samples up to which networks are trained again for a temperature."""

TOLD = 100
"""Held-out samples that are enough for one; of fewer it is a guess."""


def _searched(model: "LargeMarginClassifier") -> bool:
    """Whether ``fit`` has searched for a linear head."""
    return hasattr(model, "_spreads")


class LargeMarginClassifier(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]
    ClassifierMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """A neural network trained with a large-margin objective, for features or images.

    X is (N, D), also sparse (made dense batch by batch), or images (N, H, W), (N, C, H, W) or
    (N, H, W, C); y holds labels of any type.
    Inputs are standardised inside (per feature, or per channel of images), so neither scaling nor
    a division by 255 is needed before. It can be cloned, pickled, searched over and put at the end
    of a pipeline; ``transform`` gives the features before the head.

    Args:
        objective: "auto" (cross entropy for a linear head; CosFace otherwise and with
            ``objective_params``), a name of ``lm.LOSSES``, a sum such as
            "cosface + 0.5*sample_margin", a loss or its class, an ``lm.Objective``, an
            ``lm.preset`` (class counts are those of y) or another function ``(num_classes, dim)``.
            Modules are copied for each fit. By name, penalties come with a cross entropy. Losses on
            inputs measure in standard deviations.
        objective_params: settings of the objective, which replace those that a loss was made with.
            Settings can also be reached as ``objective__margin``, for example in a grid search;
            those of one of several terms as ``objective__cosface__margin``.
            ``{"class_counts": "auto"}`` fills in how many samples each class has.
        backbone: what makes features (N, dim) of standardised inputs. None: a perceptron for (N, D)
            and a small convolutional network for images. A module is copied for each fit, its
            weights kept as a start; a function is called with the shape of one input, (D,) or
            (C, H, W), and returns a module. A linear head is put on top.
        hidden_sizes: of the perceptron, the last the feature dimension; () is linear, as suits
            embeddings of pretrained networks and texts. "auto" is () where X looks like these (at
            least 128 features, sparse or with more than 256 different values), else (128, 64).
        input_shape: of one sample, where X holds images as flat rows (N, D): (H, W), (C, H, W) or
            (H, W, C). Scalers, PCA and cross validation pass such rows.
        channels: "first", "last", or "auto": the axis of at most 4 entries.
        standardize: subtract the mean and divide by the standard deviation of the training set.
            The search for a linear head also tries one factor for all features, and rows of unit
            length; False leaves X as it is.
        layers: names of modules of the backbone, for a loss on hidden layers (``LayerMargin``).
        noise: standard deviation of the Gaussian noise for objectives that compare features with
            those of noised inputs, in standard deviations of the inputs.
        schedule: of hyper-parameters, as in ``lm.attach``: None (``lm.preset`` brings its own),
            "preset" or schedules. SphereFace and LSoftmax need "preset" to train. The loss then
            changes over the epochs, so leave ``early_stopping`` off.
        optimizer: "adamw", "adam", "sgd" (Nesterov, 0.9), "lbfgs" (whole training set, 20 steps an
            epoch, until it converges), or a function of parameter groups. "auto" is "adamw", but a
            linear head with cross entropy is solved as LogisticRegression is: see ``folds``.
        lr, weight_decay: of a named optimizer.
        folds: of the cross-validation by which the search for a linear head chooses preparation,
            penalty and temperature: the log-loss decides. ``fit`` then ignores the settings of
            epochs and batches, and ``early_stopping`` replaces the folds by one held-out part.
        decay: of the learning rate over the epochs: "cosine" to 0, or "constant".
        epochs: at most.
        batch_size: at most; batches are of nearly equal size. With a single batch, training with
            integer ``sample_weight`` equals training on repeated samples.
        class_weight: None, "balanced" or a dict of class labels; multiplies sample weights.
        early_stopping: hold out ``validation_fraction`` of the samples, stop when the loss on them
            has not improved for ``patience`` epochs, and restore the best epoch.
        calibrate: divide the logits by a temperature in ``predict_proba``, fitted to samples held
            out. "auto" takes those of ``early_stopping`` if they are 100 or more; without it, for
            losses on cosines and 100 to 2,000 samples, networks trained without a part of them
            (as many of ``folds`` as hold out 100 samples). True does so always, False never. A
            linear head that is searched for has its temperature from its folds, in any case.
        warm_start: ``fit`` continues from the last fit, with the same classes.
        device: "auto" (a CUDA device where there is one) or a torch device.
        dtype: "float32", "float64", or "auto": float64 where scikit-learn would compute in it
            (X is float64 or integer) and it is cheap (a perceptron on the CPU).
        random_state: as in scikit-learn. An integer gives the same bits on every fit on a CPU. The
            global generators of torch are left as they were.
        verbose: show a progress bar.

    Attributes:
        classes_: sorted labels.
        model_: the network, ``model_(inputs)`` gives logits of (N, D) or (N, C, H, W) tensors.
        criterion_: what ``lm.attach`` returned: ``criterion_.head``, ``.objective``, ``.banks``.
        history_: lists over epochs: "loss", "terms.<name>", "valid_loss", "valid_accuracy"; or over
            what a search tried: "preparation", "penalty", "valid_loss", "valid_accuracy".
        n_iter_: epochs run, or iterations of the search.
        temperature_: what ``predict_proba`` divides logits by; 1 where none was fitted.
        held_out_margins_: (N,) after a search: the label's logit less its largest rival's, by heads
            that were trained without the sample. Far below 0, the label may be wrong. NaN for the
            only sample of a class; samples of weight 0 are left out.
        held_out_gaps_: (N,) likewise: the largest logit less the second, whatever the label is.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(60, 5))
        >>> y = np.where(X[:, 0] > 0, "yes", "no")
        >>> model = LargeMarginClassifier(epochs=20, random_state=0).fit(X, y)
        >>> model.predict(X).shape, model.predict_proba(X).shape, model.transform(X).shape
        ((60,), (60, 2), (60, 64))
    """

    classes_: Array
    model_: "EstimatorNetwork"
    criterion_: Criterion
    history_: dict[str, list[float]]
    n_iter_: int
    temperature_: float
    held_out_margins_: Array
    held_out_gaps_: Array
    n_features_in_: int
    _fitting: "Fitting"
    _shape: tuple[int, ...]

    def __init__(
        self,
        objective: Any = "auto",
        *,
        objective_params: dict[str, Any] | None = None,
        backbone: nn.Module | Callable[[tuple[int, ...]], nn.Module] | None = None,
        hidden_sizes: Sequence[int] | str = "auto",
        input_shape: Sequence[int] | None = None,
        channels: str = "auto",
        standardize: bool = True,
        layers: Sequence[str] = (),
        noise: float = 0.0,
        schedule: Any = None,
        optimizer: Any = "auto",
        lr: float = 0.003,
        weight_decay: float = 0.01,
        decay: str = "cosine",
        epochs: int = 50,
        batch_size: int = 64,
        folds: int = 5,
        class_weight: Any = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 10,
        calibrate: bool | str = "auto",
        warm_start: bool = False,
        device: str = "auto",
        dtype: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.objective = objective
        self.objective_params = objective_params
        self.backbone = backbone
        self.hidden_sizes = hidden_sizes
        self.input_shape = input_shape
        self.channels = channels
        self.standardize = standardize
        self.layers = layers
        self.noise = noise
        self.schedule = schedule
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.decay = decay
        self.epochs = epochs
        self.batch_size = batch_size
        self.folds = folds
        self.class_weight = class_weight
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.calibrate = calibrate
        self.warm_start = warm_start
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on samples X and labels y; ``sample_weight`` (N,) where the objective has it."""
        check_count("epochs", self.epochs, at_least=1)
        check_choice("calibrate", self.calibrate, ("auto", True, False))
        resumed = bool(self.warm_start) and hasattr(self, "model_")
        samples, seed = self._read(X, y, sample_weight, resumed)
        if self._searches():
            return self._search(samples, seed)
        valid = None
        if self.early_stopping:
            samples, valid = self._hold_out(samples, seed)
        with own_random_numbers(seed, samples.device):
            self._begin(samples, resumed)
            self.n_iter_ = self._run_epochs(samples, valid, self.epochs, self.decay)
        if self.calibrate and not (resumed and valid is None):
            self._fit_temperature(samples, valid, seed)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch on these samples, at a constant learning rate and without early stopping.

        The first call needs ``classes``, all labels there will be, unless y has them all; it takes
        the mean and standard deviation of the inputs from its samples.
        """
        if self.class_weight == "balanced":
            raise LargeMarginError(
                'class_weight="balanced" needs all samples at once, but partial_fit sees a part. '
                "Pass the weights as a dict."
            )
        resumed = hasattr(self, "model_")
        samples, seed = self._read(X, y, sample_weight, resumed, classes)
        with own_random_numbers(seed, samples.device):
            self._begin(samples, resumed)
            epochs = self._run_epochs(samples, None, 1, "constant")
        self.n_iter_ = (self.n_iter_ if resumed else 0) + epochs
        return self

    def decision_function(self, X: Any) -> Array:
        """The head's logits (N, C), without margin; for two classes their difference (N,)."""
        logits = self._run(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict(self, X: Any) -> Array:
        """The label of the largest logit of each sample."""
        best = self._run(X).argmax(axis=1)  # which first asks whether there is a fit
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Softmax of the logits over ``temperature_``, (N, C) in the order of ``classes_``."""
        return torch.from_numpy(self._run(X) / self.temperature_).softmax(dim=1).numpy()

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithm of :meth:`predict_proba`."""
        return torch.from_numpy(self._run(X) / self.temperature_).log_softmax(dim=1).numpy()

    def transform(self, X: Any) -> Array:
        """Features before the head, (N, dim)."""
        return self._run(X, features=True)

    @available_if(_searched)  # type: ignore[untyped-decorator]
    def score_samples(self, X: Any) -> Array:
        """How much each sample resembles those of the known classes (N,), after a search.

        The largest logit, and the largest cosine with a class mean where X is dense, each in
        standard deviations over the training set. Low scores are of inputs of no class. Networks
        have no such method; ``lm.evaluate`` scores them.
        """
        logits = torch.from_numpy(self._run(X))
        score = logits.amax(1) / self._spreads[0]
        if self._directions is not None:
            features = normalize(torch.from_numpy(self.transform(X)))
            score += (features @ self._directions.T).amax(1) / self._spreads[1]
        return score.numpy()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters; with ``deep`` also those of the objective, as ``objective__margin``."""
        found: dict[str, Any] = super().get_params(deep=deep)
        if deep and isinstance(self.objective_params, dict):
            inner = self.objective_params
            found |= {f"objective__{name}": value for name, value in inner.items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters; ``objective__margin=0.2`` sets one of ``objective_params``."""
        prefix = "objective__"
        inner = {
            name.removeprefix(prefix): params.pop(name)
            for name in list(params)
            if name.startswith(prefix)
        }
        super().set_params(**params)
        if inner:
            self.objective_params = {**(self.objective_params or {}), **inner}
        return self

    def _read(
        self, X: Any, y: Any, sample_weight: Any, resumed: bool, classes: Any = None
    ) -> tuple["TensorSamples", int]:
        """Checked samples of the classes to be trained, and the seed of this fit."""
        check_count("batch_size", self.batch_size, at_least=1)
        rows, shape = as_rows(X)
        rows, y = validate_data(self, rows, y, accept_sparse="csr", reset=not resumed)
        check_classification_targets(y)
        weights: Array | None = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, rows, ensure_non_negative=True)
            kept = weights > 0  # the others are not there, not even as a class
            rows, y, weights = rows[kept], y[kept], weights[kept]
        if not resumed:
            self.classes_ = _at_least_two(np.unique(y if classes is None else classes))
            self._shape = tuple(self.input_shape or shape or rows.shape[1:])
        labels = known_labels(y, self.classes_)
        weights = self._weighted(y, labels, weights)
        inputs = as_tensor(rows, self._shape, self.channels)
        if not resumed:
            self._linear = self._is_linear(inputs)
        device = choose_device(self.device)
        cheap = self.backbone is None and inputs.dim() == 2 and device.type == "cpu"
        samples = TensorSamples(
            inputs,
            torch.from_numpy(labels),
            None if weights is None else torch.from_numpy(weights),
            device,
            choose_dtype(self.dtype, inputs, cheap),
        )
        return samples, int(check_random_state(self.random_state).randint(2**31 - 1))

    def _weighted(self, y: Array, labels: Array, weights: Array | None) -> Array | None:
        """Weights of samples by those of their classes; None where all are equal."""
        if self.class_weight is not None:
            factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            weights = factors[labels] if weights is None else factors[labels] * weights
        # Equal weights are none, also for losses that have no weights.
        return None if weights is None or np.ptp(weights) == 0 else weights

    def _is_linear(self, inputs: "Tensor | SparseRows") -> bool:
        if self.backbone is not None or inputs.dim() != 2:
            return False
        sizes: Any = self.hidden_sizes
        if isinstance(sizes, str) and sizes == "auto":
            return embedding_like(inputs)
        if isinstance(sizes, str) or not hasattr(sizes, "__len__"):
            raise LargeMarginError(
                'hidden_sizes must be "auto" or a tuple of widths, as (128, 64), () for a linear '
                f"head, but {sizes!r} was given."
            )
        return len(sizes) == 0

    def _named_objective(self) -> Any:
        if not (isinstance(self.objective, str) and self.objective == "auto"):
            return self.objective
        return "cross_entropy" if self._linear and not self.objective_params else "cosface"

    def _searches(self) -> bool:
        """Whether the head is one that :class:`Search` finds."""
        plain = self.optimizer == "auto" and self.schedule is None and not self.objective_params
        return self._linear and plain and self._named_objective() == "cross_entropy"

    def _search(self, samples: "TensorSamples", seed: int) -> Self:
        """The best of the linear heads on each preparation of the features."""
        labels = samples.labels.to(samples.device)
        weights = samples.all_weights().to(samples.device)
        tried: list[tuple[Search, Standardize, Any]] = []
        history: dict[str, list[Any]] = {}
        fold = rival = None
        for name, module, features in preparations(samples, self.standardize):
            if fold is None:
                fold = self._folds(features, labels, seed)
            found = Search(features, labels, weights, fold, len(self.classes_), rival)
            rival = found if rival is None or found.best.loss < rival.best.loss else rival
            tried.append((found, module, features))
            for point in found.path:
                for key, value in {"preparation": name, **point}.items():
                    history.setdefault(key, []).append(value)
        best, module, features = min(tried, key=lambda each: each[0].best.loss)
        with own_random_numbers(seed, samples.device):
            self._begin(samples, False, module)
        weight, bias = best.finish()
        with torch.no_grad():
            self.criterion_.head.weight.copy_(weight)
            self._fitting.network.head_bias.copy_(bias)
        self.model_.eval()
        self.history_ = history
        self.n_iter_ = sum(each.iterations for each, _, _ in tried)
        self.held_out_margins_ = best.margins().cpu().numpy()
        self.held_out_gaps_ = best.gaps().cpu().numpy()
        self._spreads, self._directions = best.typical(features)
        return self

    def _folds(self, features: Any, labels: Tensor, seed: int) -> Tensor:
        """Which fold holds out each sample, -1 for none; the same for equal samples."""
        check_count("folds", self.folds, at_least=2)
        rng = np.random.default_rng(seed)
        direction = rng.normal(size=features.shape[1])
        if isinstance(features, Tensor):
            marks = features.double() @ torch.from_numpy(direction).to(features.device)
        else:
            marks = torch.from_numpy(features @ direction)
        folds = self.folds
        if self.early_stopping:
            check_setting("validation_fraction", self.validation_fraction, above=0, below=1)
            folds = max(round(1 / self.validation_fraction), 2)
        fold = assign_folds(marks.cpu().round(decimals=6), labels.cpu(), int(folds), seed)
        if self.early_stopping:
            fold = torch.where(fold == 0, 0, -1)
        return fold.to(labels.device)

    def _begin(
        self, samples: "TensorSamples", resumed: bool, first: nn.Module | None = None
    ) -> None:
        """A new network with its criterion and optimizer, unless training is resumed."""
        if resumed:
            self._fitting.to(samples.device)
            if isinstance(self.optimizer, str):
                self._fitting.set_rate(self.lr)
            return
        network = self._network(samples, first)
        if self._linear and hasattr(self.objective, "warn_frozen"):  # a preset
            self.objective.warn_frozen()
        counts = torch.bincount(samples.labels, minlength=len(self.classes_)).tolist()
        criterion = attach(
            network.classifier,
            objective_for(self._named_objective(), self.objective_params, counts),
            layer="head",
            layers=[f"backbone.{name}" for name in self.layers],
            schedule=self.schedule,
            total_steps=self.epochs * math.ceil(len(samples) / self.batch_size),
        )
        groups = criterion.param_groups(network, loss={"weight_decay": 0.0})
        optimizer = make_optimizer(self.optimizer, groups, self.lr, self.weight_decay)
        self._fitting = Fitting(
            network, criterion, optimizer, noise=self.noise, decay=self.weight_decay
        )
        self.model_, self.criterion_, self.history_ = network, criterion, {}
        self.temperature_ = 1.0

    def _network(self, samples: "TensorSamples", first: nn.Module | None) -> "EstimatorNetwork":
        """A network for the samples; a given module is copied, not used up.

        Args:
            first: the preparation of inputs, where it is known.
        """
        shape = tuple(samples.inputs.shape[1:])
        made = self._backbone(shape)
        like: dict[str, Any] = {"device": samples.device, "dtype": samples.dtype}
        if first is None and self.standardize:
            mean, scale = statistics(samples.inputs, samples.weights, per_channel=len(shape) == 3)
            first = Standardize(mean.to(samples.dtype), scale.to(samples.dtype)).to(samples.device)
        first = nn.Identity() if first is None else first
        made = made.to(**like)
        head = nn.Linear(_width(first, made, samples.inputs[:2].to(**like)), len(self.classes_))
        return EstimatorNetwork(first, made, head.to(**like))

    def _backbone(self, shape: tuple[int, ...]) -> nn.Module:
        made = self.backbone
        if made is None:
            sizes = self.hidden_sizes
            if isinstance(sizes, str):
                sizes = () if self._linear else (128, 64)
            made = convolutions(shape) if len(shape) == 3 else perceptron(shape, sizes)
        elif isinstance(made, nn.Module):
            made = deepcopy(made)
        elif callable(made) and not isinstance(made, type):
            made = made(shape)
        if not isinstance(made, nn.Module):
            raise LargeMarginError(
                "backbone must be None, an nn.Module, or a function of the input shape that "
                f"returns one, but {made!r} was given. It maps {('N', *shape)} to features "
                "(N, dim)."
            )
        return made

    def _run_epochs(
        self, samples: "TensorSamples", valid: "TensorSamples | None", epochs: int, decay: str
    ) -> int:
        """Train for ``epochs``, or until ``valid`` has not improved for ``patience`` of them.

        Then the best epoch's state is restored. Returns the epochs run.
        """
        factors = rate_factors(decay, epochs * math.ceil(len(samples) / self.batch_size))
        best, best_epoch, best_state = math.inf, 0, None
        bar = _bar(range(1, epochs + 1), self.verbose)
        epoch = 0
        for epoch in bar:
            found = self._fitting.train(samples, self.batch_size, factors)
            if valid is not None:
                found["valid_loss"], found["valid_accuracy"] = self._fitting.validate(valid)
            for name, value in found.items():
                self.history_.setdefault(name, []).append(value)
            if self.verbose:
                shown = ("loss", "valid_loss", "valid_accuracy")
                bar.set_postfix({name: f"{found[name]:.4g}" for name in shown if name in found})  # type: ignore[attr-defined]
            if valid is not None:
                if found["valid_loss"] < best:
                    best, best_epoch = found["valid_loss"], epoch
                    best_state = self._fitting.state()
                elif epoch - best_epoch >= self.patience:
                    break
        if best_state is not None:
            self._fitting.restore(best_state)
        self.model_.eval()
        return epoch

    def _fit_temperature(
        self, samples: "TensorSamples", valid: "TensorSamples | None", seed: int
    ) -> None:
        """The temperature with the least log-loss on samples that were not trained on."""
        always = not isinstance(self.calibrate, str)
        if valid is not None:
            enough = always or _count(valid) >= TOLD
            told = [(self._fitting.logits(valid), valid)] if enough else []
        else:
            told = [*self._left_out(samples, seed)] if always or self._is_cheap(samples) else []
        if not told:
            return
        parts, held = zip(*told, strict=True)
        logits = torch.cat(parts)
        labels = torch.cat([each.labels for each in held])
        weights = torch.cat([each.all_weights() for each in held])
        if bool((logits.argmax(1) != labels).any()):  # otherwise the surest would be the best
            self.temperature_ = 1 / calibrated(logits, labels, weights)[0]

    def _is_cheap(self, samples: "TensorSamples") -> bool:
        """Whether probabilities suffer, and training again takes seconds."""
        on_cosines = self.criterion_.head.similarity != "dot"
        few = _count(samples) >= TOLD and max(len(samples), _count(samples)) <= CHEAP
        return on_cosines and self.backbone is None and few

    def _left_out(
        self, samples: "TensorSamples", seed: int
    ) -> Iterator[tuple[Tensor, "TensorSamples"]]:
        """Logits of samples by networks that were trained without them."""
        inputs = samples.inputs
        rows = inputs.matrix if isinstance(inputs, SparseRows) else inputs.flatten(1)
        fold = self._folds(rows, samples.labels, seed)
        kept = self._fitting, self.model_, self.criterion_, self.history_
        count = 0.0
        for number in range(int(fold.max()) + 1):
            if count >= TOLD:
                break
            held = samples.subset((fold == number).nonzero()[:, 0])
            part = samples.subset((fold != number).nonzero()[:, 0])
            with own_random_numbers(seed, samples.device), warnings.catch_warnings():
                warnings.simplefilter("ignore", MarginWarning)  # said of the first network
                self._begin(part, False)
                self._run_epochs(part, None, self.epochs, self.decay)
                logits = self._fitting.logits(held)
            self._fitting, self.model_, self.criterion_, self.history_ = kept
            count += _count(held)
            yield logits, held

    def _hold_out(
        self, samples: "TensorSamples", seed: int
    ) -> tuple["TensorSamples", "TensorSamples"]:
        check_setting("validation_fraction", self.validation_fraction, above=0, below=1)
        check_count("patience", self.patience, at_least=1)
        labels = samples.labels.numpy()
        held = max(math.ceil(self.validation_fraction * len(labels)), 1)
        counts = np.bincount(labels)
        every = np.min(counts[counts > 0]) > 1 and len(counts) <= min(held, len(labels) - held)
        train, valid = train_test_split(
            np.arange(len(labels)),
            test_size=held,
            random_state=seed,
            stratify=labels if every else None,
        )
        return samples.subset(torch.from_numpy(train)), samples.subset(torch.from_numpy(valid))

    def _run(self, X: Any, features: bool = False) -> Array:
        """Logits or features of X, in pieces."""
        check_is_fitted(self, "model_")
        rows, shape = as_rows(X)
        if shape is not None and shape != self._shape:
            raise LargeMarginError(
                f"samples of shape {shape} were given, but the model was fitted on {self._shape}."
            )
        rows = validate_data(self, rows, accept_sparse="csr", reset=False)
        inputs = as_tensor(rows, self._shape, self.channels)
        parameter = next(self.model_.parameters())
        call = self.model_.features if features else self.model_
        with torch.no_grad():
            starts = range(0, max(len(inputs), 1), PREDICTED)
            parts = (inputs[start : start + PREDICTED] for start in starts)
            found = [call(each.to(parameter.device, parameter.dtype)).cpu() for each in parts]
        return torch.cat(found).numpy()

    @property
    def _n_features_out(self) -> int:
        return int(self.criterion_.head.weight.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        """Pickles hold tensors of the CPU, so that they open on a machine without accelerator."""
        state: dict[str, Any] = dict(super().__getstate__())  # it may be __dict__ itself
        if "_fitting" in state and next(self.model_.parameters()).device.type != "cpu":
            moved = deepcopy(self._fitting)
            moved.to(torch.device("cpu"))
            state |= {"_fitting": moved, "model_": moved.network, "criterion_": moved.criterion}
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def as_rows(X: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Images as flat rows (N, D) and the shape of one; anything else as it is, and None."""
    if isinstance(X, list | tuple) and len(X) and np.ndim(X[0]) >= 2:
        X = np.asarray(X)
    if isinstance(X, Tensor) and X.layout == torch.strided:
        X = X.detach().cpu()
        X = (X.float() if X.dtype == torch.bfloat16 else X).numpy()  # NumPy has no bfloat16
    if getattr(X, "ndim", 2) <= 2:
        return X, None
    X = np.asarray(X)
    return X.reshape(len(X), -1), tuple(X.shape[1:])


class SparseRows:
    """A sparse matrix (N, D) whose rows are tensors, made dense as they are taken."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.shape = torch.Size(matrix.shape)
        self.dtype = self[:0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        rows: Tensor = as_tensor(self.subset(index).toarray(), tuple(self.shape[1:]), "auto")
        return rows

    def subset(self, index: Tensor | slice) -> Any:
        return self.matrix[index.numpy() if isinstance(index, Tensor) else index]

    def dim(self) -> int:
        return 2


def as_tensor(rows: Any, shape: tuple[int, ...], channels: str) -> Any:
    """Rows as a tensor (N, D), or (N, C, H, W) where ``shape`` is that of an image.

    Sparse rows (N, D) stay sparse.
    """
    if prod(shape) != rows.shape[1]:
        raise LargeMarginError(
            f"input_shape {shape} has {prod(shape)} entries, but X has {rows.shape[1]} features."
        )
    if hasattr(rows, "toarray"):
        if len(shape) == 1:
            return SparseRows(rows)
        rows = rows.toarray()
    if not rows.flags.writeable:
        rows = rows.copy()  # torch shares memory with arrays and warns about read-only ones
    if rows.dtype.kind == "u" and rows.dtype.itemsize > 1:
        rows = rows.astype(np.int64)  # torch has few operations on these
    tensor = torch.from_numpy(np.ascontiguousarray(rows))
    if len(shape) == 1:
        return tensor
    if channels_last(shape, channels):
        return tensor.reshape(-1, *shape).movedim(-1, 1)
    return tensor.reshape(-1, *([1] if len(shape) == 2 else []), *shape)


def channels_last(shape: tuple[int, ...], channels: str) -> bool:
    """Whether images of a shape have their channels behind, as the setting says or sizes show."""
    check_choice("channels", channels, ("auto", "first", "last"))
    if len(shape) == 2:
        return False
    if len(shape) != 3:
        raise LargeMarginError(
            f"X must hold features (N, D) or images (N, H, W), (N, C, H, W) or (N, H, W, C), but "
            f"one sample has shape {shape}."
        )
    if channels == "auto":
        likely = [place for place, size in (("first", shape[0]), ("last", shape[2])) if size <= 4]
        if len(likely) != 1:
            raise LargeMarginError(
                f"images of shape {shape} may have their channels first or last. Say which: "
                'channels="first" or channels="last".'
            )
        channels = likely[0]
    return channels == "last"


def _at_least_two(classes: Array) -> Array:
    if len(classes) < 2:
        raise LargeMarginError(
            f"y must hold at least 2 classes, but it holds 1 class: {classes.tolist()}. A margin "
            "is a distance to another class."
        )
    return classes


def known_labels(y: Array, classes: Array) -> NDArray[np.int64]:
    """Indices of labels in the sorted ``classes``."""
    index = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    unknown = classes[index] != y
    if np.any(unknown):
        found = np.unique(y[unknown]).tolist()
        raise LargeMarginError(
            f"y holds labels that are not among the classes {classes.tolist()}: {found}. Name all "
            "classes in the first call of partial_fit; fit without warm_start for other classes."
        )
    return index.astype(np.int64)


class Standardize(nn.Module):
    """(x - mean) / scale of each feature, or of each channel of images."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.scale


class UnitRows(Standardize):
    """The same on rows of unit length."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(normalize(inputs))


def embedding_like(inputs: "Tensor | SparseRows") -> bool:
    """Whether rows (N, D) look like embeddings or texts, not like tables, pixels or counts."""
    wide = inputs.shape[1] >= 128
    return wide and (isinstance(inputs, SparseRows) or np.unique(inputs[:64].numpy()).size > 256)


def preparations(samples: "TensorSamples", several: bool) -> Iterator[tuple[str, Standardize, Any]]:
    """Ways to prepare rows for a linear head: name, module, and the rows after it.

    Dense rows are centred. Their mean square, or that of each feature, is 1.

    Args:
        several: whether more than the inputs as they are.
    """
    sparse = samples.is_sparse()
    kinds: list[tuple[str, type[Standardize]]] = [("raw", Standardize)]
    if several:
        lengths = squared_lengths(samples.matrix() if sparse else samples.inputs)
        if lengths.max() > 1.002 * lengths.min():
            kinds.append(("unit", UnitRows))
    for name, kind in kinds:
        if sparse:
            yield name, *_prepared_sparse(samples, kind, several)
        else:
            yield from _prepared(samples, name, kind, several)


def _prepared_sparse(
    samples: "TensorSamples", kind: type[Standardize], several: bool
) -> tuple[Standardize, Any]:
    like: dict[str, Any] = {"device": samples.device, "dtype": samples.dtype}
    matrix = row_normalize(samples.matrix()) if kind is UnitRows else samples.matrix()
    factor = _root_mean_square(matrix, samples.all_weights()) if several else 1.0
    return kind(torch.zeros(1, **like), torch.tensor(factor, **like)), matrix / factor


def _prepared(
    samples: "TensorSamples", name: str, kind: type[Standardize], several: bool
) -> Iterator[tuple[str, Standardize, Any]]:
    like: dict[str, Any] = {"device": samples.device, "dtype": samples.dtype}
    inputs = samples.inputs
    assert isinstance(inputs, Tensor)
    rows = inputs if inputs.dtype == torch.float32 else inputs.double()
    rows = normalize(rows) if kind is UnitRows else rows
    mean, spread = statistics(rows, samples.weights, per_channel=False)
    if not several:
        mean = torch.zeros_like(mean)
    centred = rows - mean.to(rows)
    factor = _root_mean_square(centred, samples.all_weights()) if several else 1.0
    module = kind(mean.to(**like), torch.tensor(factor, **like))
    found = [(name, module, (centred / factor).to(**like))]
    if name == "raw" and several:
        module = Standardize(mean.to(**like), spread.to(**like))
        found.append(("standard", module, (centred / spread.to(rows)).to(**like)))
        if _uneven(found[0][2], samples.all_weights()):
            found.reverse()
    yield from found


def _uneven(rows: Tensor, weights: Tensor) -> bool:
    """Whether the variance of centred rows is that of less than a tenth of as many even columns."""
    parts = weights.to(rows) @ rows.square()
    return bool(parts.sum() ** 2 < 0.1 * len(parts) * parts.square().sum())


def _root_mean_square(rows: Any, weights: Tensor) -> float:
    """Over all entries, or 1 where these are 0."""
    average = float((squared_lengths(rows).to(weights) * weights).sum() / weights.sum())
    scale = average / rows.shape[1]
    return scale**0.5 if scale > 0 else 1.0


class EstimatorNetwork(nn.Module):
    """``head(backbone(standardize(x)))``; the head is a linear layer, or what replaced it.

    A criterion is attached to ``classifier``, so that losses on inputs see standardised ones: their
    distances are in standard deviations, whatever the units of x.
    """

    def __init__(self, standardize: nn.Module, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.standardize = standardize
        self.classifier = nn.Sequential(OrderedDict(backbone=backbone, head=head))

    @property
    def head_bias(self) -> Tensor:
        """Of a head that is still linear."""
        head = self.classifier[1]
        assert isinstance(head, nn.Linear)
        return head.bias

    def features(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.classifier[0](self.standardize(inputs))
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.standardize(inputs))
        return logits


def _width(first: nn.Module, backbone: nn.Module, sample: Tensor) -> int:
    """How many features the backbone gives: one small batch tells, and wakes lazy layers."""
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        features: Any = backbone(first(sample))
    backbone.train(training)
    if not isinstance(features, Tensor) or features.dim() != 2:
        given = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise LargeMarginError(
            f"backbone must turn inputs {tuple(sample.shape)} into features (N, dim), but it "
            f"returned {given}. End it with pooling and nn.Flatten(), and without a "
            "classification layer: the head is put on top."
        )
    return int(features.shape[1])


def check_setting(name: str, value: Any, **limits: Any) -> None:
    """Check a number; NumPy's are numbers, too, as grids of settings are made of them."""
    check_number(name, value.item() if getattr(value, "ndim", None) == 0 else value, **limits)


def perceptron(shape: tuple[int, ...], hidden_sizes: Sequence[int]) -> nn.Module:
    """Linear layers with ReLU between them, none after the last: features point everywhere."""
    sizes = (prod(shape), *hidden_sizes)
    for size in hidden_sizes:
        check_count("each of hidden_sizes", size, at_least=1)
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    for index, (before, after) in enumerate(pairwise(sizes)):
        if index:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)


def convolutions(shape: tuple[int, ...]) -> nn.Module:
    """Three convolutions with batch normalisation, pooled to 2 x 2, and a linear layer."""
    channels, height, side = shape
    pools = [nn.MaxPool2d(2) if min(height, side) >= least else nn.Identity() for least in (16, 8)]
    layers: list[nn.Module] = []
    for (before, after), pool in zip(
        pairwise((channels, 32, 64, 64)), (*pools, nn.AdaptiveAvgPool2d(2)), strict=True
    ):
        # The bias of a convolution is removed again by the batch mean that follows it.
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), pool]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 64))


CHUNK = 4096
"""Rows converted at a time when statistics are taken of the whole training set."""


def statistics(
    inputs: Tensor | SparseRows, weights: Tensor | None, per_channel: bool
) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over samples, in float64; a constant gets 1.

    (N, ...) gives (...), or (C, 1, 1) for images (N, C, H, W) with ``per_channel``.
    """
    share = torch.ones(len(inputs)).double() if weights is None else weights.double()
    share = share / share.sum()
    axes = (0, *range(2, inputs.dim())) if per_channel else (0,)
    places = prod(inputs.shape[2:]) if per_channel else 1

    def average(of: Callable[[Tensor], Tensor]) -> Tensor:
        summed: Tensor | float = 0.0
        for start in range(0, len(inputs), CHUNK):
            rows, part = inputs[start : start + CHUNK], share[start : start + CHUNK]
            weight = part.reshape(-1, *[1] * (inputs.dim() - 1))
            summed = summed + (of(rows.double()) * weight).sum(axes, keepdim=True)[0] / places
        assert isinstance(summed, Tensor)
        return summed

    mean = average(lambda rows: rows)
    spread = average(lambda rows: (rows - mean).square()).sqrt()
    # A spread of rounding noise is a constant feature: dividing by it would blow the noise up.
    constant = spread <= 1e-12 * mean.abs().clamp_min(1e-300)
    return mean, torch.where(constant, 1.0, spread)


@dataclass
class TensorSamples:
    """A data set in host memory; batches are moved and converted as they are taken."""

    inputs: Tensor | SparseRows
    labels: Tensor
    weights: Tensor | None
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.inputs)

    def all_weights(self) -> Tensor:
        """(N,) in float64."""
        weights = torch.ones(len(self)) if self.weights is None else self.weights
        return weights.double()

    def is_sparse(self) -> bool:
        return isinstance(self.inputs, SparseRows)

    def matrix(self) -> Any:
        """The sparse matrix, in the precision of training."""
        assert isinstance(self.inputs, SparseRows)
        return self.inputs.matrix.astype(str(self.dtype).removeprefix("torch."))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        inputs = self.inputs[index].to(self.device, self.dtype)
        weights = None if self.weights is None else self.weights[index].to(self.device, self.dtype)
        return inputs, self.labels[index].to(self.device), weights

    def subset(self, index: Tensor) -> "TensorSamples":
        weights = None if self.weights is None else self.weights[index]
        inputs = self.inputs
        part = SparseRows(inputs.subset(index)) if isinstance(inputs, SparseRows) else inputs[index]
        return replace(self, inputs=part, labels=self.labels[index], weights=weights)

    def batches(self, size: int, shuffle: bool) -> Iterator[Tensor]:
        """Indices of batches of nearly equal length, so that none is too small to normalise."""
        count = max(math.ceil(len(self) / size), 1)
        order = torch.randperm(len(self)) if shuffle and count > 1 else torch.arange(len(self))
        return iter(order.tensor_split(count))


def _count(samples: TensorSamples) -> float:
    """How many samples there are; two of weight 1 are one of weight 2."""
    return float(samples.all_weights().sum())


def choose_device(given: Any) -> torch.device:
    """ "auto" is the current CUDA device where there is one, otherwise the CPU."""
    if isinstance(given, str) and given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as unknown:
        raise LargeMarginError(
            f'device must be "auto" or a torch device such as "cuda:0", but {given!r} was given.'
        ) from unknown


def choose_dtype(given: str, inputs: Tensor | SparseRows, cheap: bool) -> torch.dtype:
    """ "auto" is the precision of ``inputs`` (float64 for integers) where that is ``cheap``."""
    check_choice("dtype", given, ("auto", "float32", "float64"))
    if given == "auto":
        single = inputs.dtype in (torch.float32, torch.float16)
        given = "float64" if cheap and not single else "float32"
    return torch.float64 if given == "float64" else torch.float32


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True, fused=True),
}


def make_optimizer(
    given: Any, groups: list[dict[str, Any]], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """By name with ``lr`` and ``weight_decay``, or by a function of the parameter groups."""
    if callable(given):
        made = given(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise LargeMarginError(
                "optimizer must return a torch optimizer when called with parameter groups, but "
                f"it returned {type(made).__name__}. For example functools.partial("
                "torch.optim.SGD, lr=0.1)."
            )
        return made
    given = "adamw" if given == "auto" else given
    check_choice("optimizer", given, (*OPTIMIZERS, "lbfgs"))
    check_setting("lr", lr, above=0)
    check_setting("weight_decay", weight_decay, at_least=0)
    if given == "lbfgs":
        parameters = [each for group in groups for each in group["params"]]
        return torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")
    return OPTIMIZERS[given](groups, lr=lr, weight_decay=weight_decay)


@dataclass
class Average:
    """Means of named numbers, kept on the device until they are read."""

    sums: dict[str, Tensor | float] = field(default_factory=dict)
    count: float = 0.0

    def add(self, numbers: dict[str, Tensor], count: float) -> None:
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + number.detach() * count
        self.count += count

    def read(self) -> dict[str, float]:
        return {name: float(value) / self.count for name, value in self.sums.items()}


class Fitting:
    """A network, its criterion and its optimizer: what training continues with."""

    def __init__(
        self,
        network: EstimatorNetwork,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        *,
        noise: float = 0.0,
        decay: float = 0.0,
    ) -> None:
        self.network = network
        self.criterion = criterion
        self.optimizer = optimizer
        self.noise = noise
        self.whole = isinstance(optimizer, torch.optim.LBFGS)
        self.decay = decay if self.whole else 0.0
        needs = {name for loss in criterion.objective.terms.values() for name in loss.needs}  # type: ignore[union-attr]
        self.needs_noise = "noisy" in needs
        self.needs_graph = bool(needs & {"inputs", "layers"})
        if self.needs_noise and noise <= 0:
            raise LargeMarginError(
                "a term of the objective compares features with those of noised inputs. Say how "
                "much noise: noise=0.1 (in standard deviations of the inputs)."
            )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def set_rate(self, lr: float) -> None:
        """The learning rate to go on with."""
        for group in self.optimizer.param_groups:
            group["initial_lr"] = lr

    def train(
        self, samples: TensorSamples, batch_size: int, factors: Iterator[float]
    ) -> dict[str, float]:
        """One epoch; means of the loss and its terms. ``factors`` of the learning rate, by step."""
        self.network.train()
        seen = Average()
        usual = None if samples.weights is None else float(samples.weights.mean())
        for index in samples.batches(len(samples) if self.whole else batch_size, shuffle=True):
            inputs, labels, weights = samples.take(index)
            factor = 1.0 if self.whole else next(factors)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

            def evaluate() -> Tensor:
                loss = self._loss(inputs, labels, weights)  # noqa: B023
                if weights is not None and usual is not None:  # noqa: B023
                    # The criterion divides by this batch's weight; heavy batches count for more.
                    loss = loss * (weights.mean() / usual)  # noqa: B023
                self.optimizer.zero_grad()
                loss = loss + self.decay * self._squares()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            loss: Any = self.optimizer.step(evaluate)  # type: ignore[arg-type]
            terms = {f"terms.{name}": value for name, value in self.criterion.terms.items()}
            seen.add({"loss": loss, **terms}, len(index))
        found = seen.read()
        if not math.isfinite(found["loss"]):
            raise LargeMarginError(
                f"the loss became {found['loss']} while training. Lower lr, or use an objective "
                "that is stable at it; standardize=True keeps inputs in range."
            )
        return found

    def _squares(self) -> Tensor | float:
        """Half the squared length of the weights; other optimizers decay them on their own."""
        if not self.whole:
            return 0.0
        matrices = [each for each in self.network.parameters() if each.dim() > 1]
        return 0.5 * torch.stack([each.square().sum() for each in matrices]).sum()

    def validate(self, samples: TensorSamples) -> tuple[float, float]:
        """Loss and accuracy on samples that are not trained on."""
        self.network.eval()
        seen = Average()
        with nullcontext() if self.needs_graph else torch.no_grad():
            for index in samples.batches(PREDICTED, shuffle=False):
                inputs, labels, weights = samples.take(index)
                outputs = self.network(inputs)
                loss = self._loss(inputs, labels, weights, outputs)
                right = (outputs.argmax(1) == labels).to(samples.dtype)
                counts = torch.ones_like(right) if weights is None else weights
                accuracy = (right * counts).sum() / counts.sum()
                seen.add({"loss": loss, "accuracy": accuracy}, float(counts.sum()))
        found = seen.read()
        return found["loss"], found["accuracy"]

    def logits(self, samples: TensorSamples) -> Tensor:
        """Of samples that are not trained on, (N, C) on the CPU."""
        self.network.eval()
        with torch.no_grad():
            parts = samples.batches(PREDICTED, shuffle=False)
            return torch.cat([self.network(samples.take(index)[0]).cpu() for index in parts])

    def state(self) -> dict[str, Any]:
        return deepcopy(
            {"network": self.network.state_dict(), "criterion": self.criterion.state_dict()}
        )

    def restore(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.criterion.load_state_dict(state["criterion"])

    def to(self, device: torch.device) -> None:
        """Move everything, also the optimizer's moments; parameters stay the same objects."""
        self.network.to(device)
        self.criterion.to(device)
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _loss(
        self, inputs: Tensor, labels: Tensor, weights: Tensor | None, outputs: Tensor | None = None
    ) -> Tensor:
        outputs = self.network(inputs) if outputs is None else outputs
        noisy = None
        if self.needs_noise:
            scale = getattr(self.network.standardize, "scale", 1.0)
            noisy = self.network(inputs + self.noise * scale * torch.randn_like(inputs))
        loss: Tensor = self.criterion(outputs, labels, noisy=noisy, sample_weight=weights)
        return loss


def rate_factors(decay: str, steps: int) -> Iterator[float]:
    """Factors of the learning rate: constant, or half a cosine from 1 to 0 over ``steps``."""
    check_choice("decay", decay, ("cosine", "constant"))
    for step in range(steps):
        yield 0.5 * (1 + math.cos(math.pi * step / steps)) if decay == "cosine" else 1.0


def _bar(epochs: Iterable[int], verbose: bool) -> Iterable[int]:
    if not verbose:
        return epochs
    try:
        from tqdm.auto import tqdm
    except ImportError as missing:
        raise MissingPackage(
            "verbose=True shows a progress bar by tqdm, which is not installed. Install it: "
            "pip install 'largemargin[sklearn]'."
        ) from missing
    bar: Iterable[int] = tqdm(epochs, desc="LargeMarginClassifier", unit="epoch")
    return bar


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Everything random inside depends on ``seed``; the global generators are left as they were."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # Not torch.manual_seed, which would seed every accelerator too.
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield

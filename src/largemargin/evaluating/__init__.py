"""What a trained classifier is worth: accuracy, robustness, strangers, retrieval; predictions."""

from largemargin.evaluating.accuracy import accuracy_of
from largemargin.evaluating.attacked import AttackedAccuracy, attack_curve, attacked_accuracy
from largemargin.evaluating.config import EvaluationConfig
from largemargin.evaluating.correct import Correct, crossed
from largemargin.evaluating.counting import Accuracy
from largemargin.evaluating.cross_camera import CrossCamera, cross_camera
from largemargin.evaluating.embeddings import Embeddings, embeddings_of
from largemargin.evaluating.evaluate import Search, evaluate
from largemargin.evaluating.evaluation import Evaluation
from largemargin.evaluating.interval import paired_interval, wilson
from largemargin.evaluating.ood import Strangers, detect_strangers
from largemargin.evaluating.origin import Origin
from largemargin.evaluating.perturbed import (
    PerturbedAccuracy,
    perturbation_suite,
    perturbed_accuracy,
)
from largemargin.evaluating.predict import predict
from largemargin.evaluating.prediction import Prediction, Predictions
from largemargin.evaluating.retrieval import Retrieval, retrieval_of
from largemargin.evaluating.temperature import Temperature, Tempered, calibrate_temperature
from largemargin.evaluating.threshold import Threshold, calibrate_threshold

__all__ = [
    "Accuracy",
    "AttackedAccuracy",
    "Correct",
    "CrossCamera",
    "Embeddings",
    "Evaluation",
    "EvaluationConfig",
    "Origin",
    "PerturbedAccuracy",
    "Prediction",
    "Predictions",
    "Retrieval",
    "Search",
    "Strangers",
    "Temperature",
    "Tempered",
    "Threshold",
    "accuracy_of",
    "attack_curve",
    "attacked_accuracy",
    "calibrate_temperature",
    "calibrate_threshold",
    "cross_camera",
    "crossed",
    "detect_strangers",
    "embeddings_of",
    "evaluate",
    "paired_interval",
    "perturbation_suite",
    "perturbed_accuracy",
    "predict",
    "retrieval_of",
    "wilson",
]

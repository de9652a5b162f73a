"""Measuring whole models: one call, one result."""

from largemargin.measuring.accuracy import (
    Accuracy,
    Correct,
    accuracy_of,
    paired_counts,
    paired_interval,
    wilson,
)
from largemargin.measuring.calibrate import (
    Temperature,
    TemperatureScaled,
    Threshold,
    calibrate_temperature,
    calibrate_threshold,
)
from largemargin.measuring.compare_geometry import GeometryComparison, compare_geometry
from largemargin.measuring.embed import Embeddings, embed, embed_arrays
from largemargin.measuring.evaluate import Evaluation, EvaluationConfig, Origin, Search, evaluate
from largemargin.measuring.generalization import Bound, BoundSettings
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.input_curvature import Curvature, CurvatureSettings, measure_curvature
from largemargin.measuring.input_margins import LinearizedMargins, measure_input_margins
from largemargin.measuring.layer_geometry import LayerGeometry
from largemargin.measuring.loss_surface import LossSurface, measure_surface
from largemargin.measuring.measure import measure, measure_arrays
from largemargin.measuring.ood import OODScores, detect_ood
from largemargin.measuring.predictions import Prediction, Predictions
from largemargin.measuring.rescale_model import rescale_model
from largemargin.measuring.retrieval import (
    CrossCamera,
    HeadInputs,
    Retrieval,
    cross_camera,
    head_inputs_of,
    retrieval_of,
)
from largemargin.measuring.robust_accuracy import (
    AttackedAccuracy,
    PerturbedAccuracy,
    attack_curve,
    attacked_accuracy,
    perturbation_suite,
    perturbed_accuracy,
)
from largemargin.measuring.sphere import Sphere

__all__ = [
    "Accuracy",
    "AttackedAccuracy",
    "Bound",
    "BoundSettings",
    "GeometryComparison",
    "Correct",
    "CrossCamera",
    "Curvature",
    "CurvatureSettings",
    "Embeddings",
    "HeadInputs",
    "Evaluation",
    "EvaluationConfig",
    "Geometry",
    "LayerGeometry",
    "LinearizedMargins",
    "LossSurface",
    "Origin",
    "PerturbedAccuracy",
    "Prediction",
    "Predictions",
    "Retrieval",
    "Search",
    "Sphere",
    "OODScores",
    "Temperature",
    "TemperatureScaled",
    "Threshold",
    "accuracy_of",
    "attack_curve",
    "attacked_accuracy",
    "calibrate_temperature",
    "calibrate_threshold",
    "compare_geometry",
    "cross_camera",
    "paired_counts",
    "detect_ood",
    "embed",
    "embed_arrays",
    "head_inputs_of",
    "evaluate",
    "measure",
    "measure_arrays",
    "measure_curvature",
    "measure_input_margins",
    "measure_surface",
    "paired_interval",
    "perturbation_suite",
    "perturbed_accuracy",
    "rescale_model",
    "retrieval_of",
    "wilson",
]

"""Measuring whole models: one call, one result."""

from largemargin.measuring.bounds import Bound, BoundSettings
from largemargin.measuring.compare import Comparison, compare_geometry
from largemargin.measuring.curvature import Curvature, CurvatureSettings, measure_curvature
from largemargin.measuring.embeddings import Embeddings, embed, embed_arrays
from largemargin.measuring.input_margins import LinearizedMargins, measure_input_margins
from largemargin.measuring.layer_geometry import LayerGeometry
from largemargin.measuring.measure import measure, measure_arrays
from largemargin.measuring.rescale import rescale_model
from largemargin.measuring.results import Geometry
from largemargin.measuring.sphere import Sphere
from largemargin.measuring.surface import LossSurface, measure_surface

__all__ = [
    "Bound",
    "BoundSettings",
    "Comparison",
    "Curvature",
    "CurvatureSettings",
    "Embeddings",
    "Geometry",
    "LayerGeometry",
    "LinearizedMargins",
    "LossSurface",
    "Sphere",
    "compare_geometry",
    "embed",
    "embed_arrays",
    "measure",
    "measure_arrays",
    "measure_curvature",
    "measure_input_margins",
    "measure_surface",
    "rescale_model",
]

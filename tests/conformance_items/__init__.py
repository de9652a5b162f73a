"""Which public functions answer for which item of the specification, and under which names.

No mathematics here: names of the golden vectors are mapped to names of the library.
"""

from . import centroids, losses, measures, networks, rejections
from .case import CannotRun, Case, Item, Outputs, decode, is_array

ITEMS: dict[str, Item] = {
    **losses.ITEMS,
    **centroids.ITEMS,
    **networks.ITEMS,
    **measures.ITEMS,
    **rejections.ITEMS,
}

__all__ = ["ITEMS", "CannotRun", "Case", "Item", "Outputs", "decode", "is_array"]

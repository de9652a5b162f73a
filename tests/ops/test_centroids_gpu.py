"""The kernels of centroids on a GPU."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.centroid_checks import *  # noqa: F403

pytestmark = pytest.mark.gpu

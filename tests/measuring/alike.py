"""Two results, equal up to rounding."""

import pytest

from largemargin.measuring import Geometry


def same(got: Geometry, want: Geometry, rtol: float = 1e-9) -> None:
    """Equal up to rounding, whole and in every part."""
    compare_parts(got.to_dict(), want.to_dict(), rtol)


def compare_parts(got: object, want: object, rtol: float, path: str = "") -> None:
    if isinstance(want, dict):
        assert isinstance(got, dict)
        assert got.keys() == want.keys(), path
        for key, each in want.items():
            compare_parts(got[key], each, rtol, f"{path}.{key}")
    elif isinstance(want, list):
        assert isinstance(got, list)
        assert len(got) == len(want), path
        for position, (one, other) in enumerate(zip(got, want, strict=True)):
            compare_parts(one, other, rtol, f"{path}[{position}]")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=rtol, abs=1e-9), path
    else:
        assert got == want, path

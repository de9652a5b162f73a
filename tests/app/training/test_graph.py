"""Captured steps: what must not happen while one is captured. The rest needs a GPU."""

import gc
import weakref

import pytest

from largemargin.app.training.step import _no_garbage_collection


class Ring:
    """Garbage that only the collector finds, as models, optimizers and graphs are."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_before_and_none_goes_inside() -> None:
    before = weakref.ref(Ring())
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # collect whenever something is made
    try:
        with _no_garbage_collection():
            assert before() is None
            inside = weakref.ref(Ring())
            kept = [Ring() for _ in range(100)]
            assert inside() is not None
        assert gc.isenabled()
        kept.clear()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert inside() is None


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with _no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_inside_turns_it_on_again() -> None:
    with pytest.raises(RuntimeError, match="capture"), _no_garbage_collection():
        raise RuntimeError("capture")
    assert gc.isenabled()

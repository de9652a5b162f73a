"""The settings that are tried of every method: drawn once, from a seed, the same for all time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from largemargin.app.training.tuning import rounded
from largemargin.errors import LargeMarginError
from largemargin.losses.base.setting_ranges import Choice, Dimension, Range
from largemargin_papers.benchmark.protocol import MethodSpec, Protocol, Situation

WIDE = 10
"""Ranges of which the end is so many times the beginning are drawn by their logarithm."""


def trials_of(protocol: Protocol, situation: Situation, method: MethodSpec) -> list[dict[str, Any]]:
    """The values of every trial, by path; trial 0 changes nothing.

    Of n trials every dimension is cut into n - 1 equal parts, of which each is used once (a Latin
    hypercube). The parts of the common dimensions are drawn without looking at the method: trial k
    of every method has the same learning rate, weight decay and clipping.

    Where ``own_trials`` says so, common and own parameters are two such cubes, one after the other.
    """
    common = ("every method", protocol.common_space(situation))
    own = (method.name, protocol.own_space(situation, method))
    apart = own_trials(protocol, situation, method)
    if not apart:
        return [{}, *_cube(protocol, [common, own], protocol.trials - 1)]
    first = _cube(protocol, [common], protocol.trials - apart - 1)
    return [{}, *first, *_cube(protocol, [own], apart)]


def own_trials(protocol: Protocol, situation: Situation, method: MethodSpec) -> int:
    """How many trials, the last ones, draw the method's own parameters alone."""
    if not (protocol.own_trials and protocol.own_space(situation, method)):
        return 0
    # A head that is not trained by steps knows no optimizer.
    return protocol.trials - 1 if method.probe == "only" else protocol.own_trials


def _cube(
    protocol: Protocol, spaces: Sequence[tuple[str, Mapping[str, Any]]], count: int
) -> list[dict[str, Any]]:
    columns = {
        path: _column(protocol, whose, path, given, count)
        for whose, space in spaces
        for path, given in space.items()
    }
    return [{path: column[at] for path, column in columns.items()} for at in range(count)]


def all_trials(protocol: Protocol) -> dict[str, Any]:
    """Every trial of every method, ready for JSON; situations with ranges of their own apart."""
    plain = {
        name: trials_of(protocol, replace(situation, space={}), protocol.methods[name])
        for situation in protocol.situations.values()
        if situation.like is None and situation.common is None
        for name in situation.methods
    }
    own = {
        situation.name: {
            name: trials
            for name in situation.methods
            if (trials := trials_of(protocol, situation, protocol.methods[name])) != plain.get(name)
        }
        for situation in protocol.situations.values()
        if situation.like is None
    }
    return {"every situation": plain, **{name: each for name, each in own.items() if each}}


def _column(protocol: Protocol, whose: str, path: str, given: Any, count: int) -> list[Any]:
    draw = random.Random(f"{protocol.draws_seed} {whose} {path}")
    # Sorting by random() is documented to be the same in every version of Python.
    order = sorted(range(count), key=[draw.random() for _ in range(count)].__getitem__)
    dimension = dimension_from(path, given)
    return [rounded(_at(dimension, (part + draw.random()) / count)) for part in order]


def dimension_from(path: str, given: Any) -> Dimension:
    """``[low, high]`` or a list of values, as a dimension."""
    if not isinstance(given, list) or len(given) < 2:
        raise LargeMarginError(
            f"the range of {path} must be [low, high] or a list of values, but {given!r} was given."
        )
    if len(given) > 2 or not all(type(each) in (int, float) for each in given):
        return Choice(tuple(given))
    low, high = (float(each) for each in given)
    if not low < high:
        raise LargeMarginError(f"the range of {path} must rise, but {given!r} was given.")
    return Range(low, high, log=low > 0 and high / low >= WIDE)


def _at(dimension: Dimension, position: float) -> float | None:
    """The value at a position in [0, 1)."""
    if isinstance(dimension, Choice):
        return dimension.values[int(position * len(dimension.values))]
    low, high = dimension.low, dimension.high
    if dimension.log:
        return float(low * (high / low) ** position)
    return low + (high - low) * position

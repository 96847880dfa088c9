"""Comparisons that do not depend on rounding.

Clusters are full of likes: equal nodes, equal replicas, the same stages in another order. Their values are
equal by structure and differ, if at all, by rounding, which is not the same for every processor, library
and version. So whatever chooses between values compares them here: what differs by less than `TOLERANCE`
is a tie, and of those that tie the first in the order given wins. That order must come from the input (the
order of nodes in the cluster's file, the order in which steps are listed), never from a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

TOLERANCE = 1e-9
"""Relative: far above rounding (1e-16 a step, 1e-12 after a linear program) and far below any gain that
would be worth a step."""

SMALLEST = 1e-12
"""Differences below this, of values near zero, are ties as well."""

MANY = 60
"""More values than these are put in order faster by numpy."""


def exceeds(value: float, other: float) -> bool:
    """Whether the value is greater by more than rounding."""
    if value <= other:
        return False
    gap = value - other
    return gap > TOLERANCE * max(abs(value), abs(other)) + SMALLEST or gap == math.inf


def ranks_above(value: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the first of several figures that differ by more than rounding is the greater one."""
    for mine, theirs in zip(value, other, strict=True):
        if exceeds(mine, theirs):
            return True
        if exceeds(theirs, mine):
            return False
    return False


def first_largest(values: np.ndarray) -> int:
    """Index of the first of the greatest values [n]; of several axes, in C order."""
    flat = np.ravel(values)
    return int(np.argmax(flat >= _just_below(float(flat.max()))))


def spread(count: int) -> np.ndarray:
    """[count] weights in [0, 1), drawn once and for all: by them a linear program tells apart what is alike.
    Regular ones would not do, for their differences cancel."""
    return np.random.default_rng(0).random(count)


def greatest(items: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """The items that tie for the greatest value, in their order."""
    found = list(items)
    values = [value(item) for item in found]
    floor = _just_below(max(values, default=0.0))
    return [item for item, v in zip(found, values, strict=True) if v >= floor]


def first_greatest(items: Sequence[T], values: Sequence[float]) -> T:
    """The first of the items that tie for the greatest value."""
    floor = _just_below(max(values))
    return next(item for item, value in zip(items, values, strict=True) if value >= floor)


def first_smallest(values: Sequence[float]) -> int:
    """Index of the first of the values that tie for the smallest; none is negative, some are finite."""
    smallest = min(values)
    ceiling = smallest + TOLERANCE * smallest + SMALLEST
    return next(k for k, value in enumerate(values) if value <= ceiling)


def least(items: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """The items that tie for the smallest value, in their order."""
    return greatest(items, lambda item: -value(item))


def order(values: Iterable[float], resolution: float = 0.0) -> list[int]:
    """Indices that sort the values, smallest first; likes keep their order.

    Values without a gap between one and the next (of more than the resolution, if one is given) are one
    tie, however many they are, so that what is alike by structure never ends up on two sides of a limit.
    """
    found = list(values)
    if len(found) > MANY:
        return _order_of_many(np.array(found), resolution)
    rank, run = [0] * len(found), 0
    by_value = sorted(range(len(found)), key=found.__getitem__)
    for before, k in itertools.pairwise(by_value):
        run += exceeds(found[k], found[before] + resolution)
        rank[k] = run
    return sorted(by_value, key=lambda k: (rank[k], k))


def _order_of_many(values: np.ndarray, resolution: float) -> list[int]:
    """The same of [n] values by numpy."""
    by_value = np.argsort(values, kind="stable")
    above, below = values[by_value[1:]], values[by_value[:-1]] + resolution
    with np.errstate(invalid="ignore"):  # Infinities are alike.
        gap = above - below
        larger = np.maximum(np.abs(above), np.abs(below))
        exceeds_last = (gap > TOLERANCE * larger + SMALLEST) | (gap == math.inf)
    rank = np.concatenate([[0], np.cumsum(exceeds_last)])
    ordered: list[int] = by_value[np.lexsort((by_value, rank))].tolist()
    return ordered


def smallest_first(items: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """The items sorted by value; likes keep their order."""
    found = list(items)
    return [found[k] for k in order(map(value, found))]


def greatest_first(items: Iterable[T], value: Callable[[T], float]) -> list[T]:
    """The items sorted by value, the greatest first; likes keep their order."""
    return smallest_first(items, lambda item: -value(item))


def _just_below(value: float) -> float:
    """The least that ties with the value."""
    return value if math.isinf(value) else value - TOLERANCE * abs(value) - SMALLEST

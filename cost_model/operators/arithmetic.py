"""What the formulas of all operators are made of. Each function takes floats, or numpy arrays to fit with.

Only operations that IEEE 754 rounds correctly are used, so that a prediction has the same bits everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Amount = Any
"""A float, or a numpy array of them."""

US = 1e-6
"""Seconds in a microsecond."""


def larger(a: Amount, b: Amount) -> Amount:
    """The larger of two amounts."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a > b else b


def smaller(a: Amount, b: Amount) -> Amount:
    """The smaller of two amounts."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return a if a < b else b


def root(a: Amount) -> Amount:
    """The square root."""
    return np.sqrt(a) if isinstance(a, np.ndarray) else math.sqrt(a)


def rounded_up(a: Amount) -> Amount:
    """The smallest whole number that is not below the amount."""
    return np.ceil(a) if isinstance(a, np.ndarray) else math.ceil(a)


def overlapped_s(a_s: Amount, b_s: Amount, overlap: Amount) -> Amount:
    """Seconds of two activities that run side by side, such as computing and reading.

    overlap 1 is a soft maximum, (a^4 + b^4)^(1/4); 0 is one after the other; in between, a mixture of both.
    Homogeneous: where both times double, the result does.
    """
    a2, b2 = a_s * a_s, b_s * b_s
    return overlap * root(root(a2 * a2 + b2 * b2)) + (1.0 - overlap) * (a_s + b_s)


def waves(tiles: Amount, units: Amount, stepped: Amount) -> Amount:
    """How many rounds a GPU of so many units (streaming multiprocessors) takes for tiles of equal work.

    stepped 1: whole rounds, as if each unit took one tile at a time; stepped 0: tiles / units, as if tiles
    could be divided at will (split-K and stream-K; Osama et al., "Stream-K", PPoPP 2023, section 3).
    """
    mean = tiles / units
    return mean + stepped * (rounded_up(mean) - mean)

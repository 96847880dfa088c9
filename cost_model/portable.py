"""Exponentials, logarithms and powers with the same bits on every machine.

The C library's own differ in the last bit from one version or processor to the next (glibc picks its code
by whether the processor fuses multiplication and addition), and so does Python's `sum` between versions. A
planner that compares costs must not: where two plans tie, a last bit would choose between them. Here
everything is built from addition, multiplication and division, which IEEE 754 fixes to the last bit, and
from `math.fsum`, which rounds once.
"""

from __future__ import annotations

import math

import numpy as np

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
"""ln 2 as a sum: products of the first with integers up to 2^20 are exact (Cody and Waite, 1980)."""

_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(14, 1, -1))
_LOG_TERMS = tuple(2.0 / n for n in range(23, 0, -2))
_LARGEST, _SMALLEST = 709.78, -745.2


def exp(x: float) -> float:
    """e^x to within one unit in the last place; infinite or 0 where a float has no room.

    Reduces the argument by e^x = 2^k e^r with |r| <= ln 2 / 2, and sums the Taylor series of e^r.
    """
    if not _SMALLEST < x < _LARGEST:
        return x if x != x else (math.inf if x > 0 else 0.0)
    k = math.floor(x / _LN2_HIGH + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = 0.0
    for term in _EXP_TERMS:
        total = total * r + term
    return math.ldexp(1.0 + (r + r * r * total), k)


def exps(x: np.ndarray) -> np.ndarray:
    """`exp` of each of [n] numbers that are not too large for it, to the last bit."""
    k = np.floor(x / _LN2_HIGH + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = np.zeros_like(x)
    for term in _EXP_TERMS:
        total = total * r + term
    found = np.ldexp(1.0 + (r + r * r * total), k.astype(int))
    return np.where(x > _SMALLEST, found, 0.0)


def log(x: float) -> float:
    """The natural logarithm of x > 0 to within a few units in the last place.

    log x = k ln 2 + log m with m in [sqrt 1/2, sqrt 2), and log m = 2 artanh((m - 1) / (m + 1)) as a series.

    Raises
    ------
    ValueError : x is not positive
    """
    if not 0 < x < math.inf:
        return math.log(x)  # infinite, not a number, or an error: no rounding in any of them
    m, k = math.frexp(x)
    if m < 0.7071067811865476:
        m, k = 2 * m, k - 1
    f = (m - 1) / (m + 1)
    square, total = f * f, 0.0
    for term in _LOG_TERMS:
        total = total * square + term
    return k * _LN2_HIGH + (k * _LN2_LOW + total * f)


def logs(x: np.ndarray) -> np.ndarray:
    """`log` of each of [n] positive, finite numbers, to the last bit."""
    m, k = np.frexp(x)
    low = m < 0.7071067811865476
    m, k = np.where(low, 2 * m, m), np.where(low, k - 1, k)
    f = (m - 1) / (m + 1)
    square, total = f * f, np.zeros_like(f)
    for term in _LOG_TERMS:
        total = total * square + term
    return np.asarray(k * _LN2_HIGH + (k * _LN2_LOW + total * f))


def power(base: float, exponent: float) -> float:
    """base^exponent for base >= 0, to within |exponent * log base| units in the last place."""
    if exponent == 0 or base == 1:
        return 1.0
    if base == 0:
        return 0.0 if exponent > 0 else math.inf
    return exp(exponent * log(base))


def powers(base: np.ndarray | float, exponent: np.ndarray | float) -> np.ndarray:
    """`power` of arrays of one size, or with a number, to the last bit; for results that fit in a float."""
    positive = np.where(np.equal(base, 0), 1.0, base)
    found = np.where(np.equal(base, 1), 1.0, exps(exponent * logs(positive)))
    at_zero = np.where(np.greater(exponent, 0), 0.0, math.inf)
    return np.where(np.equal(exponent, 0), 1.0, np.where(np.equal(base, 0), at_zero, found))


def twelve_digits(value: float) -> float:
    """Rounded to 12 significant digits: for what a library computes with the C library's functions."""
    return float(f"{value:.12g}")

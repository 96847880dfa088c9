"""Exponentials, logarithms and powers, compared with 50 decimal digits, and their exact bits."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cost_model.portable import exp, log, power, twelve_digits


def off(found: float, exact: Decimal) -> float:
    """Error in units in the last place."""
    return float(abs(Decimal(found) - exact) / Decimal(math.ulp(float(exact))))


@given(st.floats(-700, 700))
def test_exp(x):
    with localcontext() as context:
        context.prec = 50
        assert off(exp(x), Decimal(x).exp()) <= 2


@given(st.floats(1e-300, 1e300))
@example(1.0000001)
@example(0.9999999)
@example(2.0**0.5)
def test_log(x):
    with localcontext() as context:
        context.prec = 50
        assert log(x) == 0 if x == 1 else off(log(x), Decimal(x).ln()) <= 4


@given(st.floats(1e-9, 1e9), st.floats(-5, 5))
def test_power(base, exponent):
    with localcontext() as context:
        context.prec = 50
        exact = (Decimal(exponent) * Decimal(base).ln()).exp()
        assert off(power(base, exponent), exact) <= 4 + 2 * abs(exponent * math.log(base))


def test_ends():
    assert exp(0.0) == 1 and exp(1e4) == math.inf and exp(-1e4) == 0 and math.isnan(exp(math.nan))
    assert log(1.0) == 0 and log(math.inf) == math.inf and math.isnan(log(math.nan))
    assert power(0.0, 2.0) == 0 and power(0.0, -1.0) == math.inf and power(3.0, 0.0) == 1 == power(1.0, 9.0)
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError):
            log(wrong)


def test_bits():
    """The bits are the same on every machine; these were recorded on one of them."""
    assert exp(1.0).hex() == "0x1.5bf0a8b14576ap+1"
    assert log(10.0).hex() == "0x1.26bb1bbb55516p+1"
    assert power(0.37, 2.3063).hex() == "0x1.9d86d796b77b0p-4"
    assert twelve_digits(1 / 3) == 0.333333333333

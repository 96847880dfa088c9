"""Regions of mixed replicas, compared with combinations of their points and with linear programs."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx
from scipy.optimize import linprog

from hexgen2.region import Region
from hexgen2.search.knapsack import best_points, most_served, served

rates = st.floats(0.1, 100)
points = st.lists(st.tuples(rates, rates), min_size=1, max_size=5)
regions = points.map(Region.around)


@given(points, st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_all_points_and_what_lies_between_them_are_inside_and_nothing_beyond_the_corners(found, weights):
    region = Region.around(found)
    assert all(region.contains(point) for point in found)
    total = sum(weights[: len(found)])
    if total > 1e-3:
        mean = np.average(found, axis=0, weights=weights[: len(found)])
        assert region.contains((float(mean[0]), float(mean[1])))
    for p, d in region.corners:
        assert region.busy(p, d) == approx(1)
    for (p, d), (q, e) in itertools.pairwise(region.corners):
        assert q >= p and e <= d
    assert region.contains((region.balanced, region.balanced))
    assert not region.contains((region.balanced * 1.01, region.balanced * 1.01))


def test_a_corner_that_stands_out_by_rounding_is_none():
    assert Region.around([(2.0, 2.0), (1.0, 2.5 + 1e-15), (0.0, 3.0)]).corners == (
        (0.0, 3.0),
        (2.0, 2.0),
        (2.0, 0.0),
    )
    assert (1.0, 2.51) in Region.around([(2.0, 2.0), (1.0, 2.51), (0.0, 3.0)]).corners


@given(regions, regions, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_two_replicas_do_together_what_each_can(one, other, shares):
    both = one.plus(other)

    def inside(region, along, out):
        p, d = np.array(region.corners).T
        at = along * (len(p) - 1)
        return np.interp(at, range(len(p)), p) * out, np.interp(at, range(len(d)), d) * out

    a, b = inside(one, *shares[:2]), inside(other, *shares[2:])
    assert both.contains((a[0] + b[0], a[1] + b[1]), 1e-6)
    # Nor can they do more in any direction than both at their best.
    for weight in np.linspace(0.05, 0.95, 7):
        most = [max(weight * p + (1 - weight) * d for p, d in r.corners) for r in (one, other, both)]
        assert most[2] == approx(most[0] + most[1], rel=1e-9)


@given(st.floats(0, 100), st.floats(0, 100), st.lists(regions, max_size=4))
def test_the_knapsack_is_the_linear_program(prefill, decode, able):
    found = best_points(prefill, decode, able)
    assert all(region.contains(point, 1e-6) for region, point in zip(able, found, strict=True))
    corners = [corner for region in able for corner in region.corners]
    owner = [k for k, region in enumerate(able) for _ in region.corners]
    # max F with F <= prefill + sum of p and F <= decode + sum of d, the shares of corners at most 1 together.
    above = [[1.0, *(-p for p, _ in corners)], [1.0, *(-d for _, d in corners)]]
    above += [[0.0, *(float(o == k) for o in owner)] for k in range(len(able))]
    best = linprog([-1.0] + [0.0] * len(corners), A_ub=above, b_ub=[prefill, decode, *[1.0] * len(able)])
    assert served(prefill, decode, found) == approx(-best.fun, rel=1e-6, abs=1e-6)
    # The same figure, faster, with a price of prompts that proves it; any price is a limit.
    most, worth = most_served(prefill, decode, able)
    assert most == approx(-best.fun, rel=1e-6, abs=1e-6)
    for price in (worth, 0.0, 0.3, 1.0):
        limit = price * prefill + (1 - price) * decode + sum(region.worth(price) for region in able)
        assert limit >= most * (1 - 1e-9)
        assert price != worth or limit == approx(most, rel=1e-6, abs=1e-6)

"""Choices between values ignore their last bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexgen2.search.partition.spectral import fiedler_vector, first_eigenvector, laplacian, spectral_partition
from hexgen2.search.ties import (
    MANY,
    exceeds,
    first_largest,
    greatest,
    greatest_first,
    least,
    order,
    ranks_above,
    smallest_first,
)

VALUES = st.lists(st.integers(-5, 5).map(lambda k: k / 3), min_size=1, max_size=12)


def disturbed(values, seed):
    """The values with other last bits."""
    rng = np.random.default_rng(seed)
    return [v * (1 + 1e-15 * rng.normal()) + 1e-16 * rng.normal() for v in values]


@given(VALUES, st.integers(0, 99))
def test_last_bits_choose_nothing(values, seed):
    other, items = disturbed(values, seed), list(range(len(values)))
    assert order(other) == order(values) == sorted(items, key=lambda k: (values[k], k))
    assert greatest_first(items, other.__getitem__) == sorted(items, key=lambda k: (-values[k], k))
    assert smallest_first(items, other.__getitem__) == order(values)
    assert greatest(items, other.__getitem__) == [k for k in items if values[k] == max(values)]
    assert least(items, other.__getitem__) == [k for k in items if values[k] == min(values)]
    assert first_largest(np.array(other)) == values.index(max(values))
    assert ranks_above(other, values) is False


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_of_two_values_at_most_one_exceeds(a, b):
    assert not (exceeds(a, b) and exceeds(b, a))
    assert not exceeds(a, a)
    if math.isfinite(a) and abs(a) > 1:
        assert exceeds(a, a - abs(a) * 1e-6)


@given(
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1e-12, 0.25, 1 / 3, 2.0, math.inf]), max_size=40),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.1]),
)
def test_many_values_have_the_order_of_few(values, seed, resolution):
    given = disturbed_finite(values, seed)
    few = order(given, resolution)
    # As many of a far greater value after them make them many, and change nothing before.
    many = order(given + [1e9] * (MANY + 1), resolution)
    after = len(given)
    expected = [k for k in few if given[k] != math.inf] + list(range(after, after + MANY + 1))
    assert many == expected + [k for k in few if given[k] == math.inf]


def disturbed_finite(values, seed):
    """The finite values with other last bits."""
    finite = iter(disturbed([v for v in values if math.isfinite(v)], seed))
    return [next(finite) if math.isfinite(v) else v for v in values]


def test_infinite_values():
    assert exceeds(math.inf, 1.0) and exceeds(1.0, -math.inf) and not exceeds(math.inf, math.inf)
    assert order([math.inf, 1.0, -math.inf, math.inf]) == [2, 1, 0, 3]
    assert first_largest(np.array([-math.inf, 1.0, 1.0])) == 1
    assert greatest([], abs) == [] == least([], abs)


def test_what_is_apart_by_less_than_the_resolution_is_a_tie_along_a_chain():
    assert order([0.3, 0.2, 0.1, 0.0], resolution=0.11) == [0, 1, 2, 3]
    assert order([0.3, 0.2, 0.1, 0.0], resolution=0.05) == [3, 2, 1, 0]


def alike_nodes(nodes, gpus, inside=300.0, between=1.0):
    node = np.repeat(np.arange(nodes), gpus)
    return np.where(node[:, None] == node[None, :], inside, between)


@pytest.mark.parametrize("weights", [alike_nodes(6, 2), alike_nodes(4, 4, 900.0, 0.001), np.ones((7, 7))])
def test_an_eigenvector_does_not_depend_on_the_solvers_basis(weights, monkeypatch):
    """Equal nodes span an eigenspace; the solver may return any basis of it, with any signs."""
    matrix = laplacian(weights)
    expected, labels = fiedler_vector(weights), spectral_partition(weights, np.ones(len(weights)), 3)
    solve = np.linalg.eigh
    rng = np.random.default_rng(5)

    def other_basis(matrix):
        values, vectors = solve(matrix)
        begins = 0
        while begins < len(values):
            ends = begins + 1
            while ends < len(values) and values[ends] - values[begins] < 1e-9 * abs(values).max():
                ends += 1
            turned, _ = np.linalg.qr(rng.normal(size=(ends - begins, ends - begins)))
            vectors[:, begins:ends] = vectors[:, begins:ends] @ turned
            begins = ends
        return values, vectors + 1e-15 * rng.normal(size=vectors.shape)

    monkeypatch.setattr(np.linalg, "eigh", other_basis)
    for _ in range(5):
        found = fiedler_vector(weights)
        assert np.allclose(found, expected, atol=1e-9)
        assert spectral_partition(weights, np.ones(len(weights)), 3).tolist() == labels.tolist()
        # It is an eigenvector of the second smallest eigenvalue.
        second = solve(matrix)[0][1]
        assert np.allclose(matrix @ found, second * found, atol=1e-9 * abs(matrix).max())


def test_equal_nodes_are_cut_in_the_order_of_the_file():
    assert spectral_partition(alike_nodes(4, 2), np.ones(8), 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert spectral_partition(np.ones((6, 6)), np.ones(6), 3).tolist() == [0, 0, 1, 1, 2, 2]


def test_an_eigenvector_across_the_order_of_the_file_is_found_too():
    """The pods are nodes 0, 3 and nodes 1, 2: their eigenvector is orthogonal to the ramp 0, 1, 2, 3."""
    weights = np.array([[0, 1, 1, 9], [1, 0, 9, 1], [1, 9, 0, 1], [9, 1, 1, 0]], dtype=float)
    found = fiedler_vector(weights)
    assert np.allclose(np.abs(found), 0.5) and found[0] == pytest.approx(found[3]) == pytest.approx(-found[1])
    assert np.allclose(first_eigenvector(np.diag([3.0, 1.0, 2.0])), [0, 1, 0])

"""Sparse rows hold what scipy.sparse and dense arrays hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array

from hexgen2.search import sparse_rows
from hexgen2.search.sparse_rows import SparseRows


def dense(matrix: SparseRows) -> np.ndarray:
    found = np.zeros((matrix.count, matrix.width))
    np.add.at(found, (matrix.rows, matrix.columns), matrix.values)
    return found


@st.composite
def entries(draw):
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    places = st.tuples(st.integers(0, shape[0] - 1), st.integers(0, shape[1] - 1), st.integers(1, 9))
    found = draw(st.lists(places, max_size=20))
    row, column, value = (np.array([each[k] for each in found], dtype=int) for k in range(3))
    return row, column, value.astype(float), shape


@given(entries())
@settings(max_examples=200, deadline=None)
def test_entries_of_one_place_are_added_up_and_columns_rise(given):
    row, column, value, shape = given
    expected = coo_array((value, (row, column)), shape).toarray()
    for many in (sparse_rows.MANY_ENTRIES, -1):  # By itself, and by scipy.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_rows, "MANY_ENTRIES", many)
            found = SparseRows.of(row, column, value, shape)
        assert (dense(found) == expected).all()
        for k in range(found.count):
            assert (np.diff(found.columns[found.starts[k] : found.starts[k + 1]]) > 0).all()


@given(entries(), st.data())
@settings(max_examples=200, deadline=None)
def test_some_columns_and_one_more_row(given, data):
    row, column, value, shape = given
    found = SparseRows.of(row, column, value, shape)
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, shape[1] - 1)))), dtype=int)
    assert (dense(found.only(kept)) == dense(found)[:, kept]).all()
    more = np.array(data.draw(st.lists(st.integers(0, 3), min_size=shape[1], max_size=shape[1])), dtype=float)
    assert (dense(found.then(more)) == np.vstack([dense(found), more])).all()
    assert (dense(SparseRows.dense(dense(found))) == dense(found)).all()

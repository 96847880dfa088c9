"""Sparse matrices for the solvers, row by row. scipy.sparse has all of this, but takes a fifth of a second to
import: a tenth of the time that a short search has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MANY_ENTRIES = 20_000
"""With more entries, scipy.sparse saves more time than its import takes."""


@dataclass(frozen=True, eq=False)
class SparseRows:
    """A matrix [r, width] in compressed rows: row i has values[starts[i] : starts[i + 1]], in the columns of
    the same places, which rise."""

    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    width: int

    @classmethod
    def of(cls, row: np.ndarray, column: np.ndarray, value: np.ndarray, shape: tuple[int, int]) -> SparseRows:
        """The matrix of this shape with these entries [k] in any order; those of one place are added up."""
        count, width = shape
        if len(value) > MANY_ENTRIES:
            from scipy.sparse import coo_array

            found = coo_array((value, (row, column)), shape=shape).tocsr()
            found.sum_duplicates()
            return cls(found.indptr, found.indices, found.data, width)
        place = np.asarray(row, dtype=np.int64) * width + column
        places, which = np.unique(place, return_inverse=True)
        values = np.bincount(which, value, len(places))
        starts = np.searchsorted(places, np.arange(count + 1) * width)
        return cls(starts, places % max(width, 1), values, width)

    @classmethod
    def dense(cls, matrix: np.ndarray) -> SparseRows:
        """A matrix [r, n], of which most may be 0."""
        row, column = np.nonzero(matrix)
        return cls.of(row, column, matrix[row, column], (len(matrix), matrix.shape[1]))

    @property
    def count(self) -> int:
        """r, the number of rows."""
        return len(self.starts) - 1

    @property
    def rows(self) -> np.ndarray:
        """[k] the row of each value."""
        return np.repeat(np.arange(self.count), np.diff(self.starts))

    def only(self, columns: np.ndarray) -> SparseRows:
        """The matrix of these columns alone [m], which rise."""
        number = np.full(self.width, -1)
        number[columns] = np.arange(len(columns))
        at = number[self.columns]
        kept = at >= 0
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts]
        return SparseRows(starts, at[kept], self.values[kept], len(columns))

    def then(self, row: np.ndarray) -> SparseRows:
        """The matrix with one more row [width] at the end."""
        columns = np.flatnonzero(row)
        starts = np.append(self.starts, len(self.columns) + len(columns))
        joined = np.concatenate([self.columns, columns]), np.concatenate([self.values, row[columns]])
        return SparseRows(starts, *joined, self.width)

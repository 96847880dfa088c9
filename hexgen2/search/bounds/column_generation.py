"""The configuration LP over thousands of columns, by programs over some hundreds of them (column generation;
Gilmore & Gomory, 1961): at the duals of such a program, each column that was left out brings at most what it
costs, or it is taken in and the program solved again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hexgen2.search.bounds.columns import Column
from hexgen2.search.bounds.matrix_columns import Corners, Entries, MatrixColumns
from hexgen2.search.ties import order

FEW, TAKEN_IN = 600, 200
"""So many columns are in the first program, at most, and so many are taken in at a time."""
STILL_NEAR = 0.8
"""The next program, where columns may be worth a little less, begins with those that brought this share of
what they cost."""
PROFIT = 1e-9
"""A column that brings more than it costs by no more than this share of the value is rounding."""


class Bills:
    """What a group of each of some columns [n] brings, and what its GPUs cost.

    Parameters
    ----------
    bought : [r] the rows of GPUs and prices
    """

    def __init__(self, matrix: MatrixColumns, columns: Sequence[Column], bought: np.ndarray) -> None:
        self._size, self._bought = len(columns), bought
        self._entries: Entries = matrix.entries(columns)
        self._corners: Corners = matrix.corners(columns)
        self._of_bought = np.append(bought, False)[self._entries.row]
        mixed = [k for k, column in enumerate(columns) if column.region is not None]
        self._column_of = np.repeat(np.array(mixed, dtype=int), self._corners.counts)

    def at(self, duals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n] what each brings at these duals [r or more], and what it costs, in requests/s."""
        # What counts a column's own groups is worth nothing.
        duals = np.append(duals[: len(self._bought)], 0.0)
        row, value, owner = self._entries
        amounts = duals[row] * value
        cost = np.bincount(owner, np.where(self._of_bought, amounts, 0.0), self._size)
        brought = -np.bincount(owner, np.where(self._of_bought, 0.0, amounts), self._size)
        (row, value, owner), best = self._corners.entries, np.zeros(self._size)
        if len(row):
            np.maximum.at(best, self._column_of, -np.bincount(owner, duals[row] * value))
        return brought + best, cost

    def worth(self, duals: np.ndarray) -> np.ndarray:
        """[n] what each brings in parts of what it costs: at most 1 of all columns of a program with these
        duals, and 1 of those that its solution has."""
        brought, cost = self.at(duals)
        return np.divide(brought, cost, out=np.full(self._size, np.inf), where=cost > 0)


@dataclass(frozen=True)
class Relaxation:
    """A solution: its value and a proven upper bound, both in requests/s (and equal, unless an integer
    program was cut short), how many groups of each column it has, and the duals of the rows (none of an
    integer program)."""

    value: float
    upper_bound: float
    amounts: np.ndarray
    duals: np.ndarray


class ColumnGeneration:
    """Solves programs, one after the other, over columns that change little.

    Parameters
    ----------
    bought : [r] the rows of GPUs and prices
    """

    def __init__(self, matrix: MatrixColumns, bought: np.ndarray) -> None:
        self._matrix, self._bought = matrix, bought
        self._near: set[int] = set()
        self._last: tuple[list[Column], Bills | None] = [], None

    def bills(self, columns: Sequence[Column]) -> Bills:
        """What a group of each of these columns brings and costs; of the last ones, remembered."""
        last, found = self._last
        if found is None or len(last) != len(columns) or not all(map(operator.is_, last, columns)):
            found = Bills(self._matrix, columns, self._bought)
            self._last = list(columns), found
        return found

    def solve(
        self,
        columns: Sequence[Column],
        first: Callable[[], np.ndarray],
        solve: Callable[[Sequence[Column]], Relaxation],
    ) -> Relaxation:
        """The optimum over these columns.

        Parameters
        ----------
        first : [columns] how promising each is, where nothing is known yet
        solve : the optimum over all of the columns that it is given; no duals if there is none
        """
        if len(columns) <= FEW:
            return solve(columns)
        numbers, bills = self._matrix.numbers(columns), self.bills(columns)
        taken = np.isin(numbers, list(self._near))
        if not taken.any():
            taken[order((-first()).tolist())[:FEW]] = True
        while True:
            which = np.flatnonzero(taken)
            found = solve([columns[k] for k in which.tolist()])
            if not len(found.duals):
                return solve(columns)
            brought, cost = bills.at(found.duals)
            left_out = np.flatnonzero(~taken & (brought - cost > PROFIT * found.value))
            if not len(left_out):
                break
            best = order((cost - brought)[left_out].tolist())[:TAKEN_IN]
            taken[left_out[best]] = True
        near = numbers[taken & (brought >= STILL_NEAR * cost)]
        self._near = set(near.tolist())
        amounts = np.zeros(len(columns))
        amounts[which] = found.amounts
        return Relaxation(found.value, found.upper_bound, amounts, found.duals)

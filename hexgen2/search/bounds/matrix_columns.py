"""Columns of the configuration LP's matrix, for thousands of groups at once.

Rows and most coefficients depend on a group's role and pattern alone: they are laid out once, and what its
capacity decides is filled in for all groups together.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hexgen2.search.bounds.columns import Column
from hexgen2.search.planning.classes import Pattern

OWN = -1
"""Stands for the row that counts the groups of one column, which the program numbers."""


class Times(IntEnum):
    """What the coefficient of an entry is, beside its amount."""

    ALONE = 0
    """The amount."""
    CAPACITY = 1
    """The amount times the capacity."""
    AT_MOST_CAPACITY = 2
    """The negated amount, or the negated capacity if that is less."""


class Entry(NamedTuple):
    """A row, and a coefficient that may depend on the capacity."""

    row: int
    amount: float
    times: Times = Times.ALONE


class Entries(NamedTuple):
    """Entries of many columns: rows [n], coefficients [n], and the number of the column of each [n]."""

    row: np.ndarray
    value: np.ndarray
    owner: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Sequence[tuple[int, float]]]) -> Entries:
        """Those of columns that are given as pairs of row and coefficient."""
        pairs = list(itertools.chain.from_iterable(parts))
        row, value = np.array([row for row, _ in pairs], dtype=int), np.array([value for _, value in pairs])
        sizes = np.array([len(part) for part in parts], dtype=int)
        return cls(row, value, np.repeat(np.arange(len(parts)), sizes))

    def then(self, others: Entries, columns: int) -> Entries:
        """These, and others whose columns come after so many."""
        return Entries(
            np.concatenate([self.row, others.row]),
            np.concatenate([self.value, others.value]),
            np.concatenate([self.owner, columns + others.owner]),
        )


class Corners(NamedTuple):
    """The corners of mixed columns, each a column of the matrix: their entries, and how many corners each
    of the columns has."""

    entries: Entries
    counts: list[int]


class MatrixColumns:
    """The entries of groups, remembered by role and pattern.

    Parameters
    ----------
    entries_of : of groups of this role and pattern, which may work for others or not
    handled_at : of such groups with corners, the rows in which prompts and answers (or nothing) are handled
    """

    def __init__(
        self,
        entries_of: Callable[[Column], Sequence[Entry]],
        handled_at: Callable[[Column], tuple[int, ...]],
    ) -> None:
        self._entries_of, self._handled_at = entries_of, handled_at
        self._number: dict[tuple[str, Pattern, bool], int] = {}
        self._last: tuple[list[Column], np.ndarray] = [], np.zeros(0, dtype=int)
        self._corners: dict[int, tuple[Column, np.ndarray, tuple[int, ...]]] = {}
        self._known: list[Entry] = []
        self._ends = [0]
        self._arrays: tuple[np.ndarray, ...] = ()

    def entries(self, columns: Sequence[Column], times: Sequence[int] | None = None) -> Entries:
        """The entries of these columns; so many times those of each, one after the other."""
        number = self.numbers(columns)
        capacity = np.array([column.capacity_req_s for column in columns], dtype=float)
        if times is not None:
            number, capacity = np.repeat(number, times), np.repeat(capacity, times)
        if not self._arrays:
            row, amount, kind = zip(*self._known, strict=True) if self._known else ((), (), ())
            self._arrays = np.array(row, dtype=int), np.array(amount), np.array(kind), np.array(self._ends)
        known_row, known_amount, known_kind, ends = self._arrays
        begins, sizes = ends[number], ends[number + 1] - ends[number]
        owner = np.repeat(np.arange(len(number)), sizes)
        at = np.arange(len(owner)) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
        amount, kind, most = known_amount[at], known_kind[at], capacity[owner]
        value = np.where(kind == Times.CAPACITY, amount * most, amount)
        value = np.where(kind == Times.AT_MOST_CAPACITY, -np.minimum(amount, most), value)
        return Entries(known_row[at], value, owner)

    def corners(self, columns: Sequence[Column]) -> Corners:
        """The corners of those of the columns that are mixed: of each, prompts/s and answers/s, and what is
        handled of them."""
        known = [self._corners_of(column) for column in columns if column.region is not None]
        counts = [len(points) for _, points, _ in known]
        if not sum(counts):
            return Corners(Entries.of([]), counts)
        points = np.concatenate([points for _, points, _ in known])
        row = np.repeat(np.array([rows for _, _, rows in known]), counts, axis=0)
        value = np.concatenate([np.ones((len(points), 1)), points, -points], axis=1)[:, : row.shape[1]]
        owner = np.repeat(np.arange(len(points)), row.shape[1])
        return Corners(Entries(row.ravel(), value.ravel(), owner), counts)

    def _corners_of(self, column: Column) -> tuple[Column, np.ndarray, tuple[int, ...]]:
        """The corners [c, 2] of a mixed column, and the rows of each, remembered."""
        found = self._corners.get(id(column))
        if found is None or found[0] is not column:
            points = np.array(column.corners).reshape(-1, 2)
            found = self._corners[id(column)] = column, points, (OWN, 0, 1, *self._handled_at(column))
        return found

    def numbers(self, columns: Sequence[Column]) -> np.ndarray:
        """[columns] a number for each role and pattern, and whether the column is mixed."""
        before, numbers = self._last
        if len(columns) < len(before):
            return np.array([self._number_of(column) for column in columns], dtype=int)
        # Most columns are those of the last time.
        changed = np.ones(len(columns), dtype=bool)
        changed[: len(before)] = [*map(operator.is_not, columns, before)]
        numbers = np.append(numbers, np.zeros(len(columns) - len(before), dtype=int))
        for k in np.flatnonzero(changed).tolist():
            numbers[k] = self._number_of(columns[k])
        self._last = list(columns), numbers
        return numbers

    def _number_of(self, column: Column) -> int:
        key = column.role, column.pattern, column.region is not None
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self._ends) - 1
            self._known += self._entries_of(column)
            self._ends.append(len(self._known))
            self._arrays = ()
        return found

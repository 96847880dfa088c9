"""Rounding of a part program (part_program.py) to whole groups by dives, in a fraction of the time that the
integer program takes.

A dive fixes some groups, solves the linear program again, and so on (Berthold, Primal Heuristics for Mixed
Integer Programs, 2006). No way to choose what is fixed next is best everywhere, so there are three, of which
the best counts: all whole groups at once, and then the group that is most nearly whole; or whole groups are
left free to change, and the group is rounded up that is most nearly whole, or (weighted by the root of its
GPUs) is large and will hardly find room later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hexgen2.search.linear_program import LinearProgram
from hexgen2.search.problem import NodeCounts
from hexgen2.search.sparse_rows import SparseRows
from hexgen2.search.ties import first_largest, greatest

ROUNDING = 1e-6
"""Groups that are the solver's rounding."""
Arrays = tuple[np.ndarray, SparseRows, np.ndarray, np.ndarray]
Found = tuple[float, np.ndarray]
"""The value of a program, and how many groups [n] of each kind are formed."""


def dive(arrays: Arrays, groups: Sequence[NodeCounts], gpus: Mapping[int, float]) -> tuple[float, np.ndarray]:
    """What the program is worth then, and [n] how many of each group to form.

    Parameters
    ----------
    arrays : of the program, whose first n variables are the groups (see LinearProgram)
    groups : the GPUs that each takes of nodes
    gpus : of each node
    """
    sizes = np.array([sum(count for _, count in counts) for counts in groups], dtype=float)
    found = [
        _by_whole(_Dive(arrays, groups, gpus)),
        _upwards(_Dive(arrays, groups, gpus), np.ones(len(groups))),
        _upwards(_Dive(arrays, groups, gpus), np.sqrt(sizes)),
    ]
    return greatest(found, lambda each: each[0])[0]


class _Dive:
    """A program and what is fixed of it.

    Attributes
    ----------
    formed, most : [n] groups that are fixed, and how many there may be
    """

    def __init__(self, arrays: Arrays, groups: Sequence[NodeCounts], gpus: Mapping[int, float]) -> None:
        self.program = LinearProgram(*arrays)
        self.formed, self.most = np.zeros(len(groups)), np.full(len(groups), np.inf)
        self._groups, self._free = groups, dict(gpus)

    def solve(self) -> Found:
        """The optimum; of no value, and nothing but what is formed, if there is none."""
        found = self.program.solve()
        return (0.0, self.formed) if found is None else (found.value, found.x[: len(self.formed)])

    def fix(self, more: np.ndarray) -> bool:
        """Form so many more of each group [n], and leave out those for which no room is left; returns False
        if there is no room for them all."""
        taken = dict(self._free)
        for k in np.flatnonzero(more).tolist():
            for node, count in self._groups[k]:
                taken[node] -= count * more[k]
        if min(taken.values()) < 0:
            return False
        self._free = taken
        for k in np.flatnonzero(more).tolist():
            self.formed[k] += more[k]
            self.program.at_least(k, self.formed[k])
        for k, counts in enumerate(self._groups):
            if self.most[k] > self.formed[k] and any(count > taken[node] for node, count in counts):
                self.leave(k, self.formed[k])
        return True

    def leave(self, k: int, most: float) -> None:
        """Form no more than so many of a group."""
        self.most[k] = most
        self.program.at_most(k, most)


def _by_whole(dive: _Dive) -> Found:
    """All whole groups are fixed at once, then one at a time."""
    while True:
        value, amounts = dive.solve()
        ahead = amounts - dive.formed
        if ahead.max() <= ROUNDING:
            return value, dive.formed
        more = np.floor(ahead + ROUNDING)
        if not more.any():
            more[first_largest(ahead)] = 1.0
        if not dive.fix(more):  # By the solver's rounding alone.
            return value, dive.formed


def _upwards(dive: _Dive, weights: np.ndarray) -> Found:
    """One group at a time is rounded up: that of the largest fraction times its weight [n]."""
    while True:
        value, amounts = dive.solve()
        fraction = amounts - np.floor(amounts + ROUNDING)
        some = fraction > ROUNDING
        if not some.any():
            return value, np.floor(amounts + ROUNDING)
        k = first_largest(np.where(some, fraction * weights, -1.0))
        more = np.zeros(len(amounts))
        more[k] = np.floor(amounts[k]) + 1 - dive.formed[k]
        if not dive.fix(more):
            dive.leave(k, float(np.floor(amounts[k])))

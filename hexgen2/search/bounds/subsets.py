"""The best way to divide the GPUs of a few nodes into groups, for every part of these nodes at once.

A part is how many GPUs of each node it has. For groups that are worth v(T) each, whatever the others are,

    best(S) = max over T within S of v(T) + best(S less T),

where T may be held to groups on the last node that S has GPUs of, since one group, or an idle GPU, has that
node's next one (dynamic programming over subsets; Rothkopf, Pekec & Harstad, 1998). Nodes with several GPUs
may be shared by groups. The number of pairs (S, T) decides what it takes: a node of n GPUs multiplies it by
(n + 1)(n + 2) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from hexgen2.search.ties import first_largest


class Subsets:
    """All parts of nodes with so many GPUs each. A part's number is the sum of count times stride over nodes:
    so S less T is the difference of their numbers.

    Attributes
    ----------
    counts : [parts, nodes] GPUs of each node in each part
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._strides = [math.prod(size + 1 for size in sizes[:k]) for k in range(len(sizes))]
        parts = math.prod(size + 1 for size in sizes)
        numbers = np.arange(parts)
        columns = zip(self._strides, self._sizes, strict=True)
        self.counts = np.stack([numbers // stride % (size + 1) for stride, size in columns], axis=1)
        nodes = np.arange(len(self._sizes))
        self._last = np.where(self.counts > 0, nodes, 0).max(axis=1)
        # A part is a number of the first nodes and one of the others.
        first = next(k for k in range(len(sizes) + 1) if self._low(k) ** 2 >= parts)
        self._first, low = first, self._low(first)
        self._shape = parts // low, low
        self._low_pairs, self._high_pairs = _pairs(self._sizes[:first]), _pairs(self._sizes[first:])

    def _low(self, nodes: int) -> int:
        return math.prod(size + 1 for size in self._sizes[:nodes])

    def __len__(self) -> int:
        return len(self.counts)

    @staticmethod
    def pairs(sizes: Sequence[int]) -> int:
        """The number of pairs (S, T), which `best` looks at."""
        return math.prod((size + 1) * (size + 2) // 2 for size in sizes)

    def best(self, worth: np.ndarray, stop: Callable[[], bool]) -> np.ndarray | None:
        """[parts, k] what the groups in each part are worth together at most, in k cases at once; None once
        it is time to stop.

        Parameters
        ----------
        worth : [parts, k] of a group on these GPUs, at least 0
        """
        (high, low), cases = self._shape, worth.shape[1]
        group = worth.reshape(high, low, cases)
        able = np.asarray(group.any(axis=(1, 2)))
        found = np.zeros_like(group)
        inside, taken = self._low_pairs
        begins = np.searchsorted(inside, np.arange(low))
        for part in range(1, low):
            some = taken[begins[part] : begins[part + 1] if part + 1 < low else None][1:]
            found[0, part] = (group[0, some] + found[0, part - some]).max(axis=0)
        left = inside - taken
        of_high, taken_high = self._high_pairs
        ends = np.searchsorted(of_high, np.arange(high + 1))
        last_stride = np.array(self._strides)[self._last[:: self._low(self._first)]] // low
        for part in range(1, high):
            if stop():
                return None
            # One GPU fewer of the last node, or a group on it.
            best = found[part - last_stride[part]].copy()
            for some in taken_high[ends[part] : ends[part + 1]].tolist():
                if some >= last_stride[part] and able[some]:
                    sums = group[some][taken] + found[part - some][left]
                    np.maximum(best, np.maximum.reduceat(sums, begins, axis=0), out=best)
            found[part] = best
        return found.reshape(len(self), cases)

    def partition(self, worth: np.ndarray, best: np.ndarray, part: int) -> list[int]:
        """Groups within a part that are worth its `best` [parts], of which each is worth so much [parts]."""
        groups = []
        while part and best[part] > 0:
            fewer = self.fewer(part)
            if best[fewer] >= best[part]:
                part = fewer
                continue
            some = self.groups_on_last(part)
            groups.append(int(some[first_largest(worth[some] + best[part - some])]))
            part -= groups[-1]
        return groups

    def fewer(self, part: int) -> int:
        """The part with one GPU fewer of the last of its nodes."""
        return part - self._strides[self._last[part]]

    def groups_on_last(self, part: int) -> np.ndarray:
        """[n] what may be a group within a part, with at least one GPU of the last of its nodes."""
        last, found = int(self._last[part]), np.zeros(1, dtype=int)
        for node, count in enumerate(self.counts[part, : last + 1].tolist()):
            if count:
                ways = self._strides[node] * np.arange(int(node == last), count + 1)
                found = (found[:, None] + ways).ravel()
        return found


def _pairs(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of a part and one within it, sorted by both."""
    inside, taken, stride = np.zeros(1, dtype=int), np.zeros(1, dtype=int), 1
    for size in sizes:
        here, of_it = np.array([(s, t) for s in range(size + 1) for t in range(s + 1)]).T * stride
        inside = (inside[:, None] + here).ravel()
        taken = (taken[:, None] + of_it).ravel()
        stride *= size + 1
    order = np.lexsort((taken, inside))
    return inside[order], taken[order]

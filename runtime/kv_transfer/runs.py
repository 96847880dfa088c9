"""Where the tokens of a request are in a pool."""

from __future__ import annotations

from functools import cached_property

import numpy as np


class Runs:
    """Where the tokens of a request are: runs of slots [first, end), in the order of the tokens.

    Parameters
    ----------
    array : [runs, 2] int64, each end after its first; not changed any more
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def one(cls, first: int, end: int) -> Runs:
        """A single run."""
        return cls(np.array([(first, end)], np.int64))

    @classmethod
    def from_bytes(cls, data: bytes) -> Runs:
        """What `to_bytes` made.

        Raises
        ------
        ValueError : it did not make this
        """
        return cls(np.frombuffer(data, "<i8").reshape(-1, 2))

    def to_bytes(self) -> bytes:
        """For the wire: little-endian."""
        return self.array.astype("<i8", copy=False).tobytes()

    @cached_property
    def tokens(self) -> int:
        """How many tokens."""
        return int(self._ends[-1]) if len(self.array) else 0

    def are_within(self, slots: int) -> bool:
        """Whether these are runs of slots below a number."""
        firsts, ends = self.array[:, 0], self.array[:, 1]
        return bool((firsts >= 0).all() and (firsts < ends).all() and (ends <= slots).all())

    def between(self, first: int, end: int) -> Runs:
        """Runs of the tokens [first, end), at least one, counted from the first token here."""
        if first == 0 and end == self.tokens:
            return self
        low = int(self._ends.searchsorted(first, "right"))
        high = int(self._ends.searchsorted(end, "left"))
        part = self.array[low : high + 1].copy()
        part[0, 0] = self.array[low, 1] - (self._ends[low] - first)
        part[-1, 1] -= self._ends[high] - end
        return Runs(part)

    def slots(self) -> np.ndarray:
        """One slot per token, int64."""
        return np.concatenate([np.arange(*run) for run in self.array] or [np.empty(0, np.int64)])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.array[:, 1] - self.array[:, 0])

"""Slices of a KV cache: where their tokens are in a pool, and how each end cuts them into pieces.

The bytes of a slice are in the order [layers, sides, tokens, heads, width]; a side is keys or values, or
the only one where both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from runtime.protocol.between_workers import KvSlice

PIECE_BYTES = 1024 * 1024  # fits in a core's own cache, so that a staged copy costs little
GPU_PIECE_BYTES = 8 * 1024 * 1024  # a copy to or from a GPU takes some time however small it is
LIMIT_BYTES = 64 * 1024 * 1024  # a receiver refuses slices that are larger


class Runs:
    """Where the tokens of a request are in a pool: runs of slots [first, end), in the order of the tokens.

    Parameters
    ----------
    array : [runs, 2] int64, no run empty; must not change afterwards
    tokens : their number; None: it is counted

    Attributes
    ----------
    tokens : the number of tokens
    """

    def __init__(self, array: np.ndarray, tokens: int | None = None) -> None:
        self.array = array
        self.tokens = int((array[:, 1] - array[:, 0]).sum()) if tokens is None else tokens

    @classmethod
    def one(cls, first: int, end: int) -> Runs:
        """A single run."""
        return cls(np.array([(first, end)], np.int64), end - first)

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int | None = None) -> Runs:
        """The inverse of `to_bytes`.

        Raises
        ------
        ValueError : the length is not that of whole runs
        """
        return cls(np.frombuffer(data, "<i8").reshape(-1, 2), tokens)

    def to_bytes(self) -> bytes:
        """The runs as they go over the wire: little-endian int64."""
        return self.array.astype("<i8", copy=False).tobytes()

    def between(self, first: int, end: int) -> Runs:
        """The runs of tokens [first, end), at least one token, counted from the first token here."""
        if first == 0 and end == self.tokens:
            return self
        low = int(self._ends.searchsorted(first, "right"))
        high = int(self._ends.searchsorted(end, "left"))
        part = self.array[low : high + 1].copy()
        part[0, 0] = self.array[low, 1] - (self._ends[low] - first)
        part[-1, 1] -= self._ends[high] - end
        return Runs(part, end - first)

    def slots(self) -> np.ndarray:
        """The slot of each token: [tokens] int64."""
        return np.concatenate([np.arange(*run) for run in self.array] or [np.empty(0, np.int64)])

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.array[:, 1] - self.array[:, 0])


def count_tokens(runs: np.ndarray, slots: int) -> int:
    """The tokens of runs [runs, 2] int64; -1 if one is empty or not within slots [0, slots)."""
    firsts, ends = runs[:, 0], runs[:, 1]
    valid = (firsts >= 0).all() and (firsts < ends).all() and (ends <= slots).all()
    return int((ends - firsts).sum()) if valid else -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers [first, end) x sides [first, end) x tokens [first, end) of a slice, all its heads."""

    first_layer: int
    end_layer: int
    first_side: int
    end_side: int
    first_token: int
    end_token: int
    bytes: int


def pieces(header: KvSlice, sides: int, limit_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a slice in the order of its bytes: into several layers each if they are small, otherwise into some
    tokens of one layer's keys or values."""
    layers, tokens = header.end_layer - header.first_layer, header.end_token - header.first_token
    row_bytes = header.payload_bytes // (sides * layers * tokens)
    layer_bytes = sides * tokens * row_bytes
    if layer_bytes <= limit_bytes:
        step = limit_bytes // layer_bytes
        for layer in range(header.first_layer, header.end_layer, step):
            end = min(layer + step, header.end_layer)
            size = (end - layer) * layer_bytes
            yield Piece(layer, end, 0, sides, header.first_token, header.end_token, size)
        return
    step = max(1, limit_bytes // row_bytes)
    for layer in range(header.first_layer, header.end_layer):
        for side in range(sides):
            for token in range(header.first_token, header.end_token, step):
                end = min(token + step, header.end_token)
                yield Piece(layer, layer + 1, side, side + 1, token, end, (end - token) * row_bytes)


def token_pieces(header: KvSlice, sides: int, limit_bytes: int) -> Iterator[Piece]:
    """Cut a slice at tokens, with all its layers in each piece: for transports that copy in any order."""
    token_bytes = header.payload_bytes // (header.end_token - header.first_token)
    step = max(1, limit_bytes // token_bytes)
    for token in range(header.first_token, header.end_token, step):
        end = min(token + step, header.end_token)
        yield Piece(header.first_layer, header.end_layer, 0, sides, token, end, (end - token) * token_bytes)


def slice_bytes(header: KvSlice, cell_bytes: int) -> int:
    """The payload size that a header's ranges imply, 0 if one of them is empty.

    Parameters
    ----------
    cell_bytes : key and value of one token in one layer and head
    """
    layers, heads = header.end_layer - header.first_layer, header.end_head - header.first_head
    tokens = header.end_token - header.first_token
    return layers * heads * tokens * cell_bytes if min(layers, heads, tokens) > 0 else 0

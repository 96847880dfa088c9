"""The geometry of a worker's KV cache, for all engines: where a request's tokens are and how large they are.

All workers of a replica use the same block numbers: on every worker a block holds the same tokens, for the
layers and heads of that worker. The driver hands out blocks (`blocks.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.kv_cache.layout import Part


@dataclass(frozen=True, slots=True)
class PageShape(ABC):
    """What a worker's cache holds for each token: layers, heads, sizes.

    Attributes
    ----------
    sides : 2, keys and values; 1 where both are the same latent vector (multi-head latent attention)
    """

    part: Part
    head_dim: int
    sides: int = field(default=2, kw_only=True)

    @property
    def layers(self) -> int:
        return self.part.end_layer - self.part.first_layer

    @property
    def heads(self) -> int:
        return self.part.end_head - self.part.first_head

    @property
    @abstractmethod
    def dtype_name(self) -> str:
        """The type of what is stored, which must be the same at both ends of a transfer."""

    @property
    @abstractmethod
    def bytes_per_token_cell(self) -> int:
        """Bytes of one token in one (layer, head) cell, all sides."""


class Pages:
    """Blocks of `block_tokens` slots, one token each. Layers and heads are numbered as in the model.

    Attributes
    ----------
    on_gpu : whether they are in the memory of a GPU
    """

    shape: PageShape
    on_gpu = False

    def __init__(self, shape: PageShape, blocks: int, block_tokens: int) -> None:
        self.shape, self.blocks, self.block_tokens = shape, blocks, block_tokens

    def slots(self, table: Sequence[int], first_token: int, end_token: int) -> np.ndarray:
        """The slots of a request's tokens [first_token, end_token), as int64 array [tokens]."""
        size = self.block_tokens
        first_block = first_token // size
        blocks = np.asarray(table[first_block : -(-end_token // size)], dtype=np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return slots[first_token - first_block * size : end_token - first_block * size]

    def runs(self, table: Sequence[int], first_token: int, end_token: int) -> np.ndarray:
        """The same slots as int64 array [runs, 2] of ranges [first, end); adjacent blocks share a range."""
        size = self.block_tokens
        if first_token >= end_token:
            return np.empty((0, 2), np.int64)
        edges, last = array("q"), -2
        for block in table[first_token // size : -(-end_token // size)]:
            if block != last + 1:
                if edges:
                    edges.append((last + 1) * size)
                edges.append(block * size)
            last = block
        edges.append((last + 1) * size)
        edges[0] += first_token % size
        edges[-1] -= -end_token % size
        return np.frombuffer(edges, np.int64).reshape(-1, 2)

"""The KV cache of one worker: a pool of blocks, of which every request has a table.

All workers of a replica use the same block numbers: each block holds the same tokens everywhere, in the
layers and heads of that worker. The lead hands blocks out (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.kv_layout import Part


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a worker's cache holds of each token."""

    part: Part
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def layers(self) -> int:
        return self.part.end_layer - self.part.first_layer

    @property
    def heads(self) -> int:
        return self.part.end_head - self.part.first_head

    @property
    def bytes_per_token_cell(self) -> int:
        """Key and value of one token in one (layer, head) cell."""
        return 2 * self.head_dim * self.dtype.itemsize


class PagedCache:
    """Keys and values in blocks of `block_tokens` tokens; a slot is the place of one token.

    Layers and heads are global numbers everywhere. On a CPU the pool costs memory only as far as it is used.

    Attributes
    ----------
    pool : [layers, 2, blocks x block_tokens, heads, head_dim]; keys first, then values

    Parameters
    ----------
    pool : use this memory instead of allocating; of that shape
    """

    def __init__(
        self, shape: CacheShape, blocks: int, block_tokens: int, pool: torch.Tensor | None = None
    ) -> None:
        self.shape, self.blocks, self.block_tokens = shape, blocks, block_tokens
        size = (shape.layers, 2, blocks * block_tokens, shape.heads, shape.head_dim)
        self.pool = torch.empty(size, dtype=shape.dtype, device=shape.device) if pool is None else pool

    def layer(self, layer: int) -> torch.Tensor:
        """Keys and values of a layer: [2, slots, heads, head_dim], a view."""
        return self.pool[layer - self.shape.part.first_layer]

    def heads(self, layer: int, first_head: int, end_head: int) -> torch.Tensor:
        """Keys and values of some heads of a layer: [2, slots, end - first, head_dim], a view."""
        offset = self.shape.part.first_head
        return self.layer(layer)[:, :, first_head - offset : end_head - offset]

    def slots(self, table: Sequence[int], first_token: int, end_token: int) -> np.ndarray:
        """Slots of a request's tokens [first, end), int64."""
        size = self.block_tokens
        first_block = first_token // size
        blocks = np.asarray(table[first_block : -(-end_token // size)], dtype=np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return slots[first_token - first_block * size : end_token - first_block * size]

    def runs(self, table: Sequence[int], first_token: int, end_token: int) -> list[tuple[int, int]]:
        """The same slots as few runs [first, end): neighbouring blocks are one."""
        size, runs = self.block_tokens, list[tuple[int, int]]()
        token = first_token
        while token < end_token:
            end = min((token // size + 1) * size, end_token)
            slot = table[token // size] * size + token % size
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], slot + end - token)
            else:
                runs.append((slot, slot + end - token))
            token = end
        return runs

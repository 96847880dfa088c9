"""One worker's KV cache as a torch tensor: keys and values in a pool of blocks (`pages.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kv_cache.pages import Pages, PageShape


@dataclass(frozen=True, slots=True)
class CacheShape(PageShape):
    """What a worker's cache holds for each token, with torch type and device."""

    dtype: torch.dtype
    device: torch.device

    @property
    def dtype_name(self) -> str:
        return str(self.dtype)

    @property
    def bytes_per_token_cell(self) -> int:
        return 2 * self.head_dim * self.dtype.itemsize


class PagedCache(Pages):
    """A pool of keys and values. On a CPU, memory is taken only when a block is first used.

    Attributes
    ----------
    pool : [layers, 2, blocks x block_tokens, heads, head_dim]; keys first, then values

    Parameters
    ----------
    pool : tensor of that shape to use; None: allocate one
    """

    shape: CacheShape

    def __init__(
        self, shape: CacheShape, blocks: int, block_tokens: int, pool: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, blocks, block_tokens)
        size = (shape.layers, 2, blocks * block_tokens, shape.heads, shape.head_dim)
        self.pool = torch.empty(size, dtype=shape.dtype, device=shape.device) if pool is None else pool

    def layer(self, layer: int) -> torch.Tensor:
        """A view of the keys and values of a layer: [2, slots, heads, head_dim]."""
        return self.pool[layer - self.shape.part.first_layer]

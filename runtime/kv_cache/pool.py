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
        return self.sides * self.head_dim * self.dtype.itemsize

    def pool_size(self, slots: int) -> tuple[int, int, int, int, int]:
        """The shape of a pool of so many tokens: [layers, sides, slots, heads, head_dim]."""
        return self.layers, self.sides, slots, self.heads, self.head_dim


class PagedCache(Pages):
    """A pool of keys and values. On a CPU, memory is taken only when a block is first used.

    Attributes
    ----------
    pool : [layers, sides, blocks x block_tokens, heads, head_dim]; keys first, then values

    Parameters
    ----------
    pool : tensor of that shape to use; None: allocate one
    """

    shape: CacheShape

    def __init__(
        self, shape: CacheShape, blocks: int, block_tokens: int, pool: torch.Tensor | None = None
    ) -> None:
        super().__init__(shape, blocks, block_tokens)
        size = shape.pool_size(blocks * block_tokens)
        self.pool = torch.empty(size, dtype=shape.dtype, device=shape.device) if pool is None else pool

    def layer(self, layer: int) -> torch.Tensor:
        """A view of the keys and values of a layer: [sides, slots, heads, head_dim]."""
        return self.pool[layer - self.shape.part.first_layer]

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, [slots, heads, head_dim]; the same if there is one side."""
        sides = self.layer(layer)
        return sides[0], sides[-1]

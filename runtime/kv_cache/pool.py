"""One worker's KV cache as a torch tensor: keys and values in a pool of blocks (`pages.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from runtime.kv_cache.formats import PLAIN, KvFormat
from runtime.kv_cache.pages import Pages, PageShape


@dataclass(frozen=True, slots=True)
class CacheShape(PageShape):
    """What a worker's cache holds for each token, with torch type and device.

    Attributes
    ----------
    dtype : of keys and values as attention computes with them
    format : how the pool stores them
    """

    dtype: torch.dtype
    device: torch.device
    format: KvFormat = field(default=PLAIN, kw_only=True)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of the pool's items."""
        return self.format.stored_dtype(self.dtype)

    @property
    def width(self) -> int:
        """Number of the pool's items that hold one head of a token."""
        return self.format.width(self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a token, one side."""
        return self.width * self.stored_dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return self.format.name if self.format.is_packed else str(self.dtype)

    @property
    def bytes_per_token_cell(self) -> int:
        return self.sides * self.head_bytes

    def pool_size(self, slots: int) -> tuple[int, int, int, int, int]:
        """The shape of a pool of so many tokens: [layers, sides, slots, heads, width]."""
        return self.layers, self.sides, slots, self.heads, self.width


class PagedCache(Pages):
    """A pool of keys and values. On a CPU, memory is taken only when a block is first used.

    Attributes
    ----------
    pool : [layers, sides, blocks x block_tokens, heads, width] in the shape's format; keys first, then values

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
        self.pool = torch.empty(size, dtype=shape.stored_dtype, device=shape.device) if pool is None else pool
        self.on_gpu = self.pool.is_cuda

    def layer(self, layer: int) -> torch.Tensor:
        """A view of the keys and values of a layer: [sides, slots, heads, width]."""
        return self.pool[layer - self.shape.part.first_layer]

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, [slots, heads, width]; the same if there is one side."""
        sides = self.layer(layer)
        return sides[0], sides[-1]

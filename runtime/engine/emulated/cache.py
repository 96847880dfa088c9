"""The emulated KV cache: one number per token, and the size that the real cache would have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.kv_cache.pages import Pages, PageShape


@dataclass(frozen=True, slots=True)
class EmulatedShape(PageShape):
    """Sizes of the cache that is emulated; cell_values are kept of a token in one layer and head."""

    value_bytes: float
    cell_values: int

    @property
    def dtype_name(self) -> str:
        return f"emulated, {self.value_bytes:g} bytes"

    @property
    def bytes_per_token_cell(self) -> int:
        return round(self.cell_values * self.value_bytes)


class EmulatedCache(Pages):
    """A state in each slot, which stands for keys and values: it depends on all tokens so far. So a state
    that was overwritten, mixed up or not sent changes the next token.

    Attributes
    ----------
    states : [slots], uint64
    kv_scale : a KV transfer moves one byte in so many
    """

    def __init__(self, shape: EmulatedShape, blocks: int, block_tokens: int, kv_scale: float) -> None:
        super().__init__(shape, blocks, block_tokens)
        self.kv_scale = kv_scale
        self.states = np.zeros(blocks * block_tokens, np.uint64)

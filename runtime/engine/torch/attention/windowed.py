"""Attention in a stage whose layers with a window keep a KV cache of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from runtime.engine.torch.attention.base import PLAIN, Attention, Batch, LayerAttention, Scoring
from runtime.engine.torch.models.rope import Rotary


class WindowedAttention(LayerAttention):
    """Attends in each layer over the cache that has it; made for one step.

    Parameters
    ----------
    whole, windowed : attention over the cache of the layers that keep all tokens, and over that of the others
    place : whether a layer of the model is windowed, and its number in its cache
    tables : each sequence's blocks in the windowed layers
    batch : the step's batch over their cache; None: it is made when a layer needs it
    """

    def __init__(
        self,
        whole: Attention,
        windowed: Attention,
        place: Callable[[int], tuple[bool, int]],
        tables: Sequence[Sequence[int]],
        batch: Batch | None = None,
    ) -> None:
        super().__init__(whole.cache)
        self._whole, self._windowed, self._place, self._tables = whole, windowed, place, tables
        self._batch = batch

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch) -> None:
        attention, number, own = self._of(layer, batch)
        attention.store(key, value, number, own)

    def rotate_and_store(self, heads: torch.Tensor, rotary: Rotary, layer: int, batch: Batch) -> None:
        attention, number, own = self._of(layer, batch)
        attention.rotate_and_store(heads, rotary, number, own)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> torch.Tensor:
        attention, number, own = self._of(layer, batch)
        return attention.attend(query, key, value, number, own, scoring)

    def _of(self, layer: int, batch: Batch) -> tuple[Attention, int, Batch]:
        """The attention of a layer, its number there, and the step's batch over that cache."""
        is_windowed, number = self._place(layer)
        if not is_windowed:
            return self._whole, number, batch
        if self._batch is None:
            self._batch = batch.over(self._windowed, self._tables)
        return self._windowed, number, self._batch

"""Attention on GPUs: single tokens by our own kernel, which reads the cache in place; chunks of prompts by torch's
operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from runtime.engine.torch.attention import sdpa
from runtime.engine.torch.attention.base import PLAIN, Batch, Part, Scoring, Single
from runtime.engine.torch.compiled import has_triton
from runtime.kv_cache.pool import CacheShape

if TYPE_CHECKING:
    from runtime.engine.torch.models.rope import Rotary

WIDEST_HEAD = 256
"""Beyond it, a program's part of keys and values does not fit into a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one token each, on the device.

    Attributes
    ----------
    rows : their rows of the batch, [n]
    tables : their blocks, [n, most]
    contexts : tokens up to and including their last one, [n]
    splits : into how many parts each context is divided
    """

    rows: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    splits: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows attend to what, for all layers that have the same window: single tokens, and chunks of prompts,
    each with its plan."""

    decodes: Decodes | None
    chunks: tuple[tuple[Part, sdpa.Chunk], ...]


class GpuAttention(sdpa.SdpaAttention):
    """By Triton and torch's operators."""

    @classmethod
    def serves(cls, shape: CacheShape) -> bool:
        """The kernel reads keys and values in the type that a step computes in."""
        is_plain = not shape.format.is_packed and shape.sides == 2 and shape.head_dim <= WIDEST_HEAD
        return shape.device.type == "cuda" and is_plain and has_triton()

    def plan(self, singles: Sequence[Single], parts: Sequence[Part], window: int | None) -> Plan:  # type: ignore[override]
        decodes = self.decodes(singles) if singles else None
        return Plan(decodes, tuple((part, self._chunk(part, window)) for part in parts))

    def decodes(self, singles: Sequence[Single]) -> Decodes:
        """The plan of single tokens, whatever the window."""
        device = self.cache.shape.device
        rows, contexts, tables = zip(*singles, strict=True)
        numbers = torch.from_numpy(np.array([rows, contexts])).to(device)
        blocks = torch.from_numpy(padded(tables, max(map(len, tables)))).to(device)
        return Decodes(numbers[0], blocks, numbers[1], self.splits(len(singles)))

    def splits(self, sequences: int) -> int:
        """Into how many parts the context of each of so many sequences is divided."""
        from runtime.engine.torch.gpu import kernels

        return kernels.splits_for(sequences, self.cache.shape.heads, self.cache.shape.device)

    def rotate_and_store(self, heads: torch.Tensor, rotary: Rotary, layer: int, batch: Batch) -> None:
        from runtime.engine.torch.gpu import kernels

        cached = self.cache.keys_values(layer)
        kernels.turn_and_store(heads, rotary.cosines, rotary.sines, batch.slots, *cached)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> torch.Tensor:
        from runtime.engine.torch.gpu import kernels

        plan: Plan = batch.plan(self, scoring.window)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.decodes is not None:
            one = plan.decodes
            kernels.attend_paged(
                query,
                *self.cache.keys_values(layer),
                one.rows,
                one.tables,
                one.contexts,
                self.cache.block_tokens,
                output,
                splits=one.splits,
                window=scoring.window,
                scale=scoring.scale,
                cap=scoring.cap,
                sinks=scoring.sinks,
            )
        for part, chunk in plan.chunks:
            rows = slice(part.first, part.first + part.length)
            output[rows] = self._attend_part(query[rows], key[rows], value[rows], layer, part, chunk, scoring)
        return output.flatten(1)

    def _chunk(self, part: Part, window: int | None) -> sdpa.Chunk:
        """The plan of a chunk, without a mask if it sees all that came before it."""
        reaches = part.offset + part.length
        if part.offset == 0 or (window is not None and window < reaches):
            return sdpa.chunk_of(self.cache, part, window)
        slots = torch.from_numpy(self.cache.slots(part.table, 0, reaches)).to(self.cache.shape.device)
        return sdpa.Chunk(part.first, part.first + part.length, slots, None)

    def _attend_part(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        part: Part,
        chunk: sdpa.Chunk,
        scoring: Scoring,
    ) -> torch.Tensor:
        if chunk.slots is not None:
            key, value = self._held(layer, chunk.slots)
        plain = scoring.cap is None and scoring.sinks is None
        if chunk.mask is None and part.offset and not plain:
            chunk = sdpa.chunk_of(self.cache, part, None)
        if chunk.mask is not None or part.offset == 0:
            return sdpa.attend_chunk(query, key, value, chunk.mask, scoring)
        # Later chunks see all that came before: torch's fastest operators know this shape of mask.
        length, heads, _ = query.shape
        group, bias = heads // key.shape[1], causal_lower_right(length, len(key))
        answer = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None].repeat_interleave(group, 1),
            value.transpose(0, 1)[None].repeat_interleave(group, 1),
            attn_mask=bias,
            scale=scoring.scale,
        )
        return answer[0].transpose(0, 1)


def padded(tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Block tables, [n, width] int32, with zeros after each one's end."""
    lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
    blocks = np.zeros((len(tables), width), dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lengths.sum()))
    blocks[np.arange(width) < lengths[:, None]] = flat
    return blocks

"""Attention in float32 and bfloat16 on CPUs, by the compiled kernels of `runtime/native`, which read the
cache in place, packed or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime import native
from runtime.engine.torch.attention.base import PLAIN, Attention, Batch, Part, Scoring, Single, reach
from runtime.kv_cache.pool import CacheShape


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prompt: rows [first, end) of the batch, from position `offset` on; blocks are int32."""

    first: int
    end: int
    offset: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernels need for all layers that have the same window; spans is None without decodes."""

    spans: native.Spans | None
    chunks: tuple[Chunk, ...]


class CpuAttention(Attention):
    """By the compiled kernels."""

    @classmethod
    def serves(cls, shape: CacheShape) -> bool:
        """The kernels serve some types on CPUs, for the head sizes that they are compiled for."""
        return native.serves(shape.dtype, shape.device) and native.attends_to(shape.head_dim)

    def plan(self, singles: Sequence[Single], parts: Sequence[Part], window: int | None) -> Plan:
        spans = [(row, end - reach(end, window), end, table) for row, end, table in singles]
        chunks = (
            Chunk(first, first + length, offset, np.array(table, dtype=np.int32))
            for first, length, offset, table in parts
        )
        return Plan(native.Spans.make(spans) if spans else None, tuple(chunks))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> torch.Tensor:
        keys, values = self.cache.keys_values(layer)
        plan: Plan = batch.plan(self, scoring.window)
        how = scoring.scale, scoring.cap, scoring.sinks, self.cache.shape.format.kind
        block_tokens = self.cache.block_tokens
        output = native.empty(query.shape, query.dtype)
        if plan.spans is not None:
            native.attend_paged(query, keys, values, plan.spans, block_tokens, output, *how)
        for chunk in plan.chunks:
            rows = slice(chunk.first, chunk.end)
            cut = chunk.table, chunk.offset, scoring.window, block_tokens
            native.attend_chunk(query[rows], keys, values, *cut, output[rows], *how)
        return output.flatten(1)

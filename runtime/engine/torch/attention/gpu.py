"""Attention on GPUs: our own kernels, which read the cache in place, and torch's operator for long chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from runtime.engine.torch.attention.base import PLAIN, Attention, Batch, Part, Scoring, Single
from runtime.engine.torch.compiled import triton_runs
from runtime.kv_cache.pool import CacheShape, PagedCache

if TYPE_CHECKING:
    from runtime.engine.torch.models.rope import Rotary

WIDEST_HEAD = 256
"""Beyond it, a program's part of keys and values does not fit into a multiprocessor."""
TILE_TOKENS = 64
"""Of a chunk that a program attends for."""
SHORT = 256
"""Chunks of fewer tokens than this leave torch's operator little to do."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one token each, on the device.

    Attributes
    ----------
    rows : their rows of the batch, [n]
    tables : their blocks, [n, most]
    contexts : tokens up to and including their last one, [n]; 0: none
    splits : into how many parts each context is divided
    """

    rows: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    splits: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of prompts.

    Attributes
    ----------
    tiles, tables : see `kernels.attend_tiles`
    parts : the chunks, and where each one's context is in the cache, None where it begins the prompt; empty:
        only the device knows
    """

    tiles: torch.Tensor
    tables: torch.Tensor
    parts: tuple[tuple[Part, torch.Tensor | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share."""

    decodes: Decodes | None
    chunks: Chunks | None


class GpuAttention(Attention):
    """By Triton and torch's operator."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        import torch.nn.attention.bias  # noqa: F401 - seconds, with torch's compiler: not where there is no GPU

    @classmethod
    def serves(cls, shape: CacheShape) -> bool:
        """The kernels read keys and values in the type that a step computes in."""
        is_plain = not shape.format.is_packed and shape.sides == 2 and shape.head_dim <= WIDEST_HEAD
        return is_plain and triton_runs(shape.dtype, shape.device, shape.head_dim)

    def plan(self, singles: Sequence[Single], parts: Sequence[Part], window: int | None) -> Plan:
        return Plan(self._decodes(singles) if singles else None, self._chunks(parts) if parts else None)

    def _decodes(self, singles: Sequence[Single]) -> Decodes:
        device = self.cache.shape.device
        rows, contexts, tables = zip(*singles, strict=True)
        numbers = torch.from_numpy(np.array([rows, contexts])).to(device)
        blocks = torch.from_numpy(padded(tables, max(map(len, tables)))).to(device)
        return Decodes(numbers[0], blocks, numbers[1], self.splits(len(singles)))

    def _chunks(self, parts: Sequence[Part]) -> Chunks:
        device, tables = self.cache.shape.device, [part.table for part in parts]
        blocks = torch.from_numpy(padded(tables, max(map(len, tables)))).to(device)
        tiles = torch.from_numpy(tiles_of(parts, TILE_TOKENS)).to(device)
        return Chunks(tiles, blocks, tuple((part, self._slots(part)) for part in parts))

    def _slots(self, part: Part) -> torch.Tensor | None:
        if not part.offset:
            return None
        slots = self.cache.slots(part.table, 0, part.offset + part.length)
        return torch.from_numpy(slots).to(self.cache.shape.device)

    def splits(self, sequences: int) -> int:
        """Into how many parts the context of each of so many sequences is divided."""
        from runtime.engine.torch.gpu import kernels

        return kernels.splits_for(sequences, self.cache.shape.heads, self.cache.shape.device)

    def rotate_and_store(self, heads: torch.Tensor, rotary: Rotary, layer: int, batch: Batch) -> None:
        from runtime.engine.torch.gpu import kernels

        cached = self.cache.keys_values(layer)
        kernels.turn_and_store(heads, rotary.cosines, rotary.sines, batch.slots, *cached)

    def _store(self, heads: torch.Tensor, cached: torch.Tensor, batch: Batch) -> None:
        from runtime.engine.torch.gpu import kernels

        kernels.store(heads, batch.slots, cached)

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
        keys, values = self.cache.keys_values(layer)
        block_tokens = self.cache.block_tokens
        how: dict[str, Any] = {
            "window": scoring.window,
            "scale": scoring.scale,
            "cap": scoring.cap,
            "sinks": scoring.sinks,
        }
        if (one := plan.decodes) is not None:
            kernels.attend_paged(
                *(query, keys, values, one.rows, one.tables, one.contexts, block_tokens, output),
                splits=one.splits,
                **how,
            )
        if (some := plan.chunks) is None:
            return output.flatten(1)
        if some.parts and all(suits_torch(part, scoring) for part, _ in some.parts):
            for part, slots in some.parts:
                rows = slice(part.first, part.first + part.length)
                if slots is None:
                    held = key[rows], value[rows]
                else:
                    held = keys.index_select(0, slots), values.index_select(0, slots)
                output[rows] = attend_chunk(query[rows], *held, scoring.scale)
        else:
            kernels.attend_tiles(
                *(query, keys, values, some.tiles, some.tables, block_tokens, output),
                tile_tokens=TILE_TOKENS,
                **how,
            )
        return output.flatten(1)


def suits_torch(part: Part, scoring: Scoring) -> bool:
    """Whether torch's operator computes a chunk's attention, and fast: it knows no caps, sinks or windows."""
    reach = part.offset + part.length
    plain = scoring.cap is None and scoring.sinks is None
    return plain and part.length >= SHORT and (scoring.window is None or scoring.window >= reach)


def attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """The last tokens of a context attend to what came before each, by torch's operator: query
    [n, heads, head_dim], keys and values [context, kv_heads, head_dim] -> [n, heads, head_dim]."""
    from torch.nn.attention.bias import causal_lower_right

    length, context, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    whole = length == context
    answer = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None].repeat_interleave(group, 1),
        values.transpose(0, 1)[None].repeat_interleave(group, 1),
        attn_mask=None if whole else causal_lower_right(length, context),
        is_causal=whole,
        scale=scale,
    )
    return answer[0].transpose(0, 1)


def padded(tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Block tables, [n, width] int32, with zeros after each one's end."""
    lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
    blocks = np.zeros((len(tables), width), dtype=np.int32)
    flat = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(lengths.sum()))
    blocks[np.arange(width) < lengths[:, None]] = flat
    return blocks


def tiles_of(parts: Sequence[Part], tokens: int) -> np.ndarray:
    """Chunks as tiles of at most so many tokens, [n, 4] int32 (see `kernels.attend_tiles`), those with the
    longest contexts first."""
    tiles = [
        (part.first + at, min(tokens, part.length - at), part.offset + at, number)
        for number, part in enumerate(parts)
        for at in range(0, part.length, tokens)
    ]
    return np.array(sorted(tiles, key=lambda tile: -tile[2]), dtype=np.int32)

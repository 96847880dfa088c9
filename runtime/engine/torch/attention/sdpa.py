"""Attention by torch's scaled_dot_product_attention, on any device: keys and values are gathered first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.engine.torch.attention.base import PLAIN, Attention, Batch, Part, Scoring, Single, reach
from runtime.engine.torch.attention.weighted import weighted
from runtime.kv_cache.pool import CacheShape, PagedCache

_PADDING = 1.25  # decodes that attend together are padded to at most this multiple of their context


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one token each and contexts of similar length.

    Attributes
    ----------
    rows : their rows of the batch, [n]
    slots : of all that they attend to, flat [n x context]; a slice if that is a single run of slots
    context : tokens attended to, padded to the longest
    mask : [n, 1, 1, context], added to the scores; None if nothing is padded
    """

    rows: torch.Tensor
    slots: torch.Tensor | slice
    context: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a prompt: rows [first, end) of the batch.

    Attributes
    ----------
    slots : of the whole context; None if the chunk begins the prompt and the cache holds it as it came
    mask : [length, context], added to the scores; None: each token attends to those before it
    """

    first: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows attend to which slots, for all layers that have the same window."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


class SdpaAttention(Attention):
    """By torch's operators."""

    @classmethod
    def serves(cls, shape: CacheShape) -> bool:
        """Torch computes any shape."""
        return True

    def plan(self, singles: Sequence[Single], parts: Sequence[Part], window: int | None) -> Plan:
        chunks = tuple(chunk_of(self.cache, part, window) for part in parts)
        return Plan(_decodes(self.cache, singles, window), chunks)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> torch.Tensor:
        plan: Plan = batch.plan(self, scoring.window)
        if len(plan.decodes) == 1 and not plan.chunks:
            group = plan.decodes[0]
            return _attend_decodes(query, *self._held(layer, group.slots), group, scoring).flatten(1)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in plan.decodes:
            held = self._held(layer, group.slots)
            output[group.rows] = _attend_decodes(query[group.rows], *held, group, scoring)
        for chunk in plan.chunks:
            first, end = chunk.first, chunk.end
            if chunk.slots is None:
                held = key[first:end], value[first:end]
            else:
                held = self._held(layer, chunk.slots)
            output[first:end] = attend_chunk(query[first:end], *held, chunk.mask, scoring)
        return output.flatten(1)

    def _held(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values in these slots, [slots, kv_heads, head_dim] each."""
        shape = self.cache.shape
        sides = [
            side[slots] if isinstance(slots, slice) else side.index_select(0, slots)
            for side in self.cache.layer(layer)
        ]
        held = [shape.format.unpack(side, shape.dtype) for side in sides]
        return held[0], held[-1]


def _attend_decodes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Decodes, scoring: Scoring
) -> torch.Tensor:
    """query [n, heads, head_dim], keys and values [n x context, kv_heads, head_dim] -> [n, heads, head_dim].

    The heads that share a KV head stand in the dimension of the query's tokens.
    """
    count, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    shape = (count, group.context, kv_heads, head_dim)
    grouped = query.reshape(count, kv_heads, heads // kv_heads, head_dim)
    keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
    answer = weighted(grouped, keys, values, group.mask, scoring, (kv_heads, -1, 1))
    return answer.reshape(count, heads, head_dim)


def attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Attention of a chunk: query [n, heads, head_dim], keys and values [context, kv_heads, head_dim] ->
    [n, heads, head_dim]."""
    length, heads, head_dim = query.shape
    context, kv_heads, _ = keys.shape
    group = heads // kv_heads
    spread = (kv_heads, group, context, head_dim)
    answer = weighted(
        query.reshape(length, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(spread),
        values.transpose(0, 1).unsqueeze(1).expand(spread),
        mask,
        scoring,
        (kv_heads, group, 1, 1),
        is_causal=mask is None,
    )
    return answer.permute(2, 0, 1, 3).reshape(length, heads, head_dim)


def _decodes(cache: PagedCache, singles: Sequence[Single], window: int | None) -> tuple[Decodes, ...]:
    """Groups of contexts of similar length."""
    groups: list[list[Single]] = []
    for single in sorted(singles, key=lambda each: each.context):
        tokens = reach(single.context, window)
        if groups and tokens <= _PADDING * reach(groups[-1][0].context, window) + cache.block_tokens:
            groups[-1].append(single)
        else:
            groups.append([single])
    return tuple(_group(cache, sorted(group), window) for group in groups)


def _group(cache: PagedCache, group: list[Single], window: int | None) -> Decodes:
    device, dtype = cache.shape.device, cache.shape.dtype
    reaches = np.array([reach(context, window) for _, context, _ in group])
    longest = int(reaches.max())
    rows = torch.tensor([row for row, _, _ in group], device=device)
    if len(group) == 1:
        _, context, table = group[0]
        runs = cache.runs(table, context - longest, context)
        if len(runs) == 1:
            return Decodes(rows, slice(*runs[0].tolist()), longest, None)
    slots = np.zeros((len(group), longest), dtype=np.int64)
    for line, (_, context, table), tokens in zip(slots, group, reaches, strict=True):
        line[:tokens] = cache.slots(table, context - int(tokens), context)
        line[tokens:] = line[0]  # unwritten slots may hold NaN, which a weight of zero does not hide
    mask = None
    if reaches.min() < longest:
        seen = torch.from_numpy(np.arange(longest) < reaches[:, None])
        mask = _added(seen, dtype).view(len(group), 1, 1, longest).to(device)
    return Decodes(rows, torch.from_numpy(slots.reshape(-1)).to(device), longest, mask)


def chunk_of(cache: PagedCache, part: Part, window: int | None) -> Chunk:
    """The plan of a chunk."""
    first, length, offset, table = part
    device, end = cache.shape.device, offset + length
    start = max(0, offset + 1 - (window or end))
    in_cache = offset > 0 or cache.shape.format.is_packed
    mask = None
    if offset or (window is not None and window < length):
        queries = torch.arange(offset, end)[:, None]
        keys = torch.arange(start, end)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        mask = _added(seen, cache.shape.dtype).to(device)
    slots = torch.from_numpy(cache.slots(table, start, end)).to(device) if in_cache else None
    return Chunk(first, first + length, slots, mask)


def _added(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores: zero for tokens that are seen, minus infinity for others."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)

"""Attention of a ragged batch, decodes and chunks of prompts together, over the paged KV cache.

Where `native` serves, its kernels read the cache block by block. Elsewhere it is torch's
scaled_dot_product_attention, over slots gathered first. What all layers of a step share, slots and masks, is
worked out once, in a `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from runtime import native
from runtime.kv_cache.pool import PagedCache

_PADDING = 1.25  # decodes that attend together are padded to at most so many times their context


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one token each, of about the same context.

    Attributes
    ----------
    rows : their rows of the batch, [n]
    slots : of all that they attend to, flat [n x context]; a single run of neighbouring slots is a slice
    context : tokens attended to, padded to the longest
    mask : [n, 1, 1, context], added to the scores; None if nothing is padded
    """

    rows: torch.Tensor
    slots: torch.Tensor | slice
    context: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt: rows [first, end) of the batch.

    slots has the places of the whole context, or None if the chunk begins the prompt. mask [length, context]
    is added to the scores; None: each token sees those before it.
    """

    first: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Paged:
    """A part of a prompt for the compiled kernel: rows [first, end) of the batch, from a position on."""

    first: int
    end: int
    offset: int
    table: np.ndarray
    window: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Who attends to what, for layers that reach back equally far."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The same for the compiled kernels."""

    spans: native.Spans | None
    chunks: tuple[Paged, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, requests one after the other.

    Attributes
    ----------
    tokens, positions : [total], int64
    slots : where each token's keys and values go, [total]
    sampled : rows after which a token is chosen, [samples]
    lengths, offsets : tokens of each sequence, and the position of its first one
    tables : each sequence's blocks
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampled: torch.Tensor
    cache: PagedCache
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    tables: tuple[Sequence[int], ...]
    _plans: dict[int | None, Plan | NativePlan] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        cache: PagedCache,
        tokens: Sequence[Sequence[int]],
        offsets: Sequence[int],
        tables: Sequence[Sequence[int]],
        samples: Sequence[bool],
    ) -> Batch:
        """Lay out a step.

        Parameters
        ----------
        tokens : of each sequence
        offsets : position of each sequence's first token, so its cache holds that many already
        tables : each sequence's blocks, those of the new tokens too
        samples : whether a token is chosen after a sequence's last one
        """
        device = cache.shape.device
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        ends = lengths.cumsum()
        flat = np.fromiter((token for part in tokens for token in part), dtype=np.int64, count=int(ends[-1]))
        starts = np.asarray(offsets, dtype=np.int64)
        positions = np.arange(len(flat)) + np.repeat(starts - (ends - lengths), lengths)
        places = [cache.slots(t, o, o + len(n)) for t, o, n in zip(tables, offsets, tokens, strict=True)]
        return cls(
            tokens=torch.from_numpy(flat).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(np.concatenate(places)).to(device),
            sampled=torch.from_numpy(ends[np.asarray(samples, dtype=bool)] - 1).to(device),
            cache=cache,
            lengths=tuple(lengths.tolist()),
            offsets=tuple(offsets),
            tables=tuple(tables),
        )

    def plan(self, window: int | None) -> Plan | NativePlan:
        """For layers in which a token sees the last `window` tokens, itself included; None: all."""
        if window not in self._plans:
            self._plans[window] = self._make_plan(window)
        return self._plans[window]

    def _make_plan(self, window: int | None) -> Plan | NativePlan:
        singles: list[tuple[int, int, Sequence[int]]] = []
        parts: list[tuple[int, int, int, Sequence[int]]] = []
        first = 0
        for length, offset, table in zip(self.lengths, self.offsets, self.tables, strict=True):
            if length == 1:
                singles.append((first, offset + 1, table))
            else:
                parts.append((first, length, offset, table))
            first += length
        shape = self.cache.shape
        if native.serves(shape.dtype, shape.device) and native.attends_to(shape.head_dim):
            return _native_plan(singles, parts, window)
        chunks = tuple(_chunk(self.cache, *part, window) for part in parts)
        return Plan(_decodes(self.cache, singles, window), chunks)


def store(key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch) -> None:
    """Write a step's keys and values, [total, kv_heads, head_dim], to a layer of the cache."""
    keys, values = batch.cache.layer(layer)
    keys.index_copy_(0, batch.slots, key)
    values.index_copy_(0, batch.slots, value)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: Batch,
    window: int | None = None,
) -> torch.Tensor:
    """Attend to everything up to each token, once its keys and values are stored.

    Parameters
    ----------
    query : [total, heads, head_dim]
    key, value : [total, kv_heads, head_dim]; heads is a multiple of kv_heads
    layer : global layer number
    window : a token sees the last `window` tokens, itself included; None: all

    Returns
    -------
    [total, heads x head_dim]
    """
    keys, values = batch.cache.layer(layer)
    plan = batch.plan(window)
    if isinstance(plan, NativePlan):
        return _attend_natively(query, keys, values, plan, batch.cache.block_tokens).flatten(1)
    if len(plan.decodes) == 1 and not plan.chunks:
        return _attend_decodes(query, keys, values, plan.decodes[0]).flatten(1)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decodes:
        output[group.rows] = _attend_decodes(query[group.rows], keys, values, group)
    for chunk in plan.chunks:
        first, end = chunk.first, chunk.end
        if chunk.slots is None:
            seen = key[first:end], value[first:end]
        else:
            seen = keys.index_select(0, chunk.slots), values.index_select(0, chunk.slots)
        output[first:end] = _attend_chunk(query[first:end], *seen, chunk.mask)
    return output.flatten(1)


def _attend_natively(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: NativePlan, block_tokens: int
) -> torch.Tensor:
    """query [total, heads, head_dim], keys and values [slots, kv_heads, head_dim] -> like query."""
    output = torch.empty(query.shape, dtype=query.dtype)
    if plan.spans is not None:
        native.attend_paged(query, keys, values, plan.spans, block_tokens, output)
    for part in plan.chunks:
        rows = slice(part.first, part.end)
        cut = part.table, part.offset, part.window, block_tokens
        native.attend_chunk(query[rows], keys, values, *cut, output[rows])
    return output


def _attend_decodes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Decodes
) -> torch.Tensor:
    """query [n, heads, head_dim], keys and values [slots, kv_heads, head_dim] -> [n, heads, head_dim].

    The heads that share a KV head take the place of the query's tokens.
    """
    count, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    shape = (count, group.context, kv_heads, head_dim)
    grouped = query.reshape(count, kv_heads, heads // kv_heads, head_dim)
    if isinstance(group.slots, slice):
        keys, values = keys[group.slots], values[group.slots]
    else:
        keys, values = keys.index_select(0, group.slots), values.index_select(0, group.slots)
    keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
    answer = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return answer.reshape(count, heads, head_dim)


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """query [n, heads, head_dim], keys and values [context, kv_heads, head_dim] -> [n, heads, head_dim]."""
    length, heads, head_dim = query.shape
    context, kv_heads, _ = keys.shape
    group = heads // kv_heads
    spread = (kv_heads, group, context, head_dim)
    answer = F.scaled_dot_product_attention(
        query.reshape(length, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(spread),
        values.transpose(0, 1).unsqueeze(1).expand(spread),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return answer.permute(2, 0, 1, 3).reshape(length, heads, head_dim)


def _native_plan(
    singles: list[tuple[int, int, Sequence[int]]],
    parts: list[tuple[int, int, int, Sequence[int]]],
    window: int | None,
) -> NativePlan:
    """From (row, context, table) of single tokens and (first row, length, position, table) of longer ones."""
    spans = native.Spans.make([(row, end - _reach(end, window), end, table) for row, end, table in singles])
    chunks = (
        Paged(first, first + length, offset, np.array(table, dtype=np.int32), window)
        for first, length, offset, table in parts
    )
    return NativePlan(spans if singles else None, tuple(chunks))


def _decodes(
    cache: PagedCache, singles: list[tuple[int, int, Sequence[int]]], window: int | None
) -> tuple[Decodes, ...]:
    """Groups of (row, context, table), each of about the same context."""
    groups: list[list[tuple[int, int, Sequence[int]]]] = []
    for single in sorted(singles, key=lambda each: each[1]):
        reach = _reach(single[1], window)
        if groups and reach <= _PADDING * _reach(groups[-1][0][1], window) + cache.block_tokens:
            groups[-1].append(single)
        else:
            groups.append([single])
    return tuple(_group(cache, sorted(group), window) for group in groups)


def _group(cache: PagedCache, group: list[tuple[int, int, Sequence[int]]], window: int | None) -> Decodes:
    device, dtype = cache.shape.device, cache.shape.dtype
    reaches = np.array([_reach(context, window) for _, context, _ in group])
    longest = int(reaches.max())
    rows = torch.tensor([row for row, _, _ in group], device=device)
    if len(group) == 1:
        _, context, table = group[0]
        runs = cache.runs(table, context - longest, context)
        if len(runs) == 1:
            return Decodes(rows, slice(*runs[0].tolist()), longest, None)
    slots = np.zeros((len(group), longest), dtype=np.int64)
    for line, (_, context, table), reach in zip(slots, group, reaches, strict=True):
        line[:reach] = cache.slots(table, context - int(reach), context)
        line[reach:] = line[0]  # what nobody has written may be NaN, which a weight of zero does not hide
    mask = None
    if reaches.min() < longest:
        seen = torch.from_numpy(np.arange(longest) < reaches[:, None])
        mask = _added(seen, dtype).view(len(group), 1, 1, longest).to(device)
    return Decodes(rows, torch.from_numpy(slots.reshape(-1)).to(device), longest, mask)


def _chunk(
    cache: PagedCache, first: int, length: int, offset: int, table: Sequence[int], window: int | None
) -> Chunk:
    device, end = cache.shape.device, offset + length
    start = max(0, offset + 1 - (window or end))
    mask = None
    if offset or (window is not None and window < length):
        queries = torch.arange(offset, end)[:, None]
        keys = torch.arange(start, end)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        mask = _added(seen, cache.shape.dtype).to(device)
    slots = torch.from_numpy(cache.slots(table, start, end)).to(device) if offset else None
    return Chunk(first, first + length, slots, mask)


def _reach(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _added(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where something is seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)

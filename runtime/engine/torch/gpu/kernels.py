"""Kernels for GPUs, in Triton: attention over a paged KV cache, and what surrounds the products of a layer,
each in one launch.

Values are computed with in float32, and rounded when they are written. On CPUs they run in Triton's
interpreter only, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WAVES = 4
"""Programs for each multiprocessor that attention is divided into, so that all have something to do."""
_MOST_SPLITS = 64
_TOKENS = 64
"""Tokens of the cache that a program reads at once."""
_TOGETHER = 2
"""Query heads of a KV head that a program takes for each token of a chunk."""
_LEAST_ROWS = 16
"""And columns of a matrix that the hardware multiplies."""


@triton.jit
def _attend_paged(
    query,
    keys,
    values,
    tables,
    contexts,
    which,
    sinks,
    output,
    parts,
    sums,
    query_stride,
    slot_stride,
    head_stride,
    table_stride,
    window,
    scale,
    cap,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
    SUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(which + sequence)
    context = tl.load(contexts + sequence)
    if context == 0:
        return
    begin = tl.maximum(context - window, 0)
    share = tl.cdiv(tl.cdiv(context - begin, SPLITS), TOKENS) * TOKENS
    first = begin + split * share
    end = tl.minimum(first + share, context)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    at = query + row * query_stride + (head * GROUP + rows)[:, None] * DIM + dims[None, :]
    asked = tl.load(at, mask=inside, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        seen = tokens < end
        blocks = tl.load(tables + sequence * table_stride + tokens // BLOCK, mask=seen, other=0)
        slots = blocks.to(tl.int64) * BLOCK + tokens % BLOCK
        places = slots[:, None] * slot_stride + head * head_stride + dims[None, :]
        there = seen[:, None] & (dims < DIM)[None, :]
        key = tl.load(keys + places, mask=there, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - better[:, None])
        kept = tl.exp(best - better)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(values + places, mask=there, other=0.0)
        found = found * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        best = better
    heads = head * GROUP + rows
    count = tl.num_programs(1) * GROUP
    if SPLITS == 1:
        if SUNK:
            sink = tl.load(sinks + heads, mask=rows < GROUP, other=0.0)
            better = tl.maximum(best, sink)
            found = found * tl.exp(best - better)[:, None]
            total = total * tl.exp(best - better) + tl.exp(sink - better)
        to = output + row * count * DIM + heads[:, None] * DIM + dims[None, :]
        tl.store(to, (found / total[:, None]).to(output.dtype.element_ty), mask=inside)
    else:
        line = (sequence * count + heads) * SPLITS + split
        divided = found / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + line[:, None] * DIM + dims[None, :], divided, mask=inside)
        tl.store(sums + line, best + tl.log(total), mask=rows < GROUP)


@triton.jit
def _join_splits(
    parts,
    sums,
    contexts,
    which,
    sinks,
    output,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SUNK: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    if tl.load(contexts + sequence) == 0:
        return
    count = tl.num_programs(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    line = (sequence * count + head) * SPLITS + splits
    logs = tl.load(sums + line)
    best = tl.max(logs, 0)
    if SUNK:
        sink = tl.load(sinks + head)
        best = tl.maximum(best, sink)
    weights = tl.exp(logs - best)
    total = tl.sum(weights, 0)
    if SUNK:
        total += tl.exp(sink - best)
    each = tl.load(parts + line[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    joined = tl.sum(each * weights[:, None], 0) / total
    row = tl.load(which + sequence)
    to = output + (row * count + head) * DIM + dims
    tl.store(to, joined.to(output.dtype.element_ty), mask=dims < DIM)


@triton.jit
def _attend_tiles(
    query,
    keys,
    values,
    tiles,
    tables,
    sinks,
    output,
    query_stride,
    slot_stride,
    head_stride,
    table_stride,
    window,
    scale,
    cap,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    CAPPED: tl.constexpr,
    SUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    first_member = tl.program_id(2) * TOGETHER
    row, length = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    position, table = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    if length > 0:
        # A row is one query head of one token.
        rows, dims = tl.arange(0, TILE * TOGETHER), tl.arange(0, WIDTH)
        token, member = rows // TOGETHER, first_member + rows % TOGETHER
        heads = head * GROUP + member
        inside = ((token < length) & (member < GROUP))[:, None] & (dims < DIM)[None, :]
        at = query + (row + token)[:, None] * query_stride + heads[:, None] * DIM + dims[None, :]
        asked = tl.load(at, mask=inside, other=0.0)
        place = position + token
        best = tl.full([TILE * TOGETHER], float("-inf"), tl.float32)
        total = tl.zeros([TILE * TOGETHER], tl.float32)
        found = tl.zeros([TILE * TOGETHER, WIDTH], tl.float32)
        end = position + length
        for start in range(tl.maximum(position + 1 - window, 0), end, TOKENS):
            tokens = start + tl.arange(0, TOKENS)
            blocks = tl.load(tables + table * table_stride + tokens // BLOCK, mask=tokens < end, other=0)
            slots = blocks.to(tl.int64) * BLOCK + tokens % BLOCK
            places = slots[:, None] * slot_stride + head * head_stride + dims[None, :]
            there = (tokens < end)[:, None] & (dims < DIM)[None, :]
            key = tl.load(keys + places, mask=there, other=0.0)
            scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scale
            if CAPPED:
                scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
            seen = (tokens[None, :] <= place[:, None]) & (tokens[None, :] > (place - window)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            shift = tl.where(better == float("-inf"), 0.0, better)  # nothing was seen yet
            weights = tl.exp(scores - shift[:, None])
            kept = tl.exp(best - shift)
            total = total * kept + tl.sum(weights, 1)
            value = tl.load(values + places, mask=there, other=0.0)
            found = found * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            best = better
        if SUNK:
            sink = tl.load(sinks + heads, mask=member < GROUP, other=0.0)
            better = tl.maximum(best, sink)
            found = found * tl.exp(best - better)[:, None]
            total = total * tl.exp(best - better) + tl.exp(sink - better)
        count = tl.num_programs(1) * GROUP
        to = output + ((row + token) * count + heads)[:, None] * DIM + dims[None, :]
        tl.store(to, (found / total[:, None]).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    heads,
    slots,
    cached,
    token_stride,
    slot_stride,
    head_stride,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0)
    which, dims = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    slot = tl.load(slots + token)
    inside = (which < tl.where(slot < 0, 0, COUNT))[:, None] & (dims < DIM)[None, :]
    value = tl.load(
        heads + token * token_stride + which[:, None] * DIM + dims[None, :], mask=inside, other=0.0
    )
    tl.store(cached + slot * slot_stride + which[:, None] * head_stride + dims[None, :], value, mask=inside)


@triton.jit
def _turn_and_store(
    heads,
    cosines,
    sines,
    slots,
    keys,
    values,
    token_stride,
    slot_stride,
    head_stride,
    QUERIES: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0)
    which = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + token)
    pairs, dims = tl.arange(0, HALF_WIDTH), tl.arange(0, WIDTH)
    turning = (which < QUERIES + KV)[:, None] & (pairs < HALF)[None, :]
    base = heads + token * token_stride + which[:, None] * DIM
    low = tl.load(base + pairs[None, :], mask=turning, other=0.0).to(tl.float32)
    high = tl.load(base + HALF + pairs[None, :], mask=turning, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + token * HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
    kind = heads.dtype.element_ty
    turned_low, turned_high = (low * cosine - high * sine).to(kind), (high * cosine + low * sine).to(kind)
    tl.store(base + pairs[None, :], turned_low, mask=turning)
    tl.store(base + HALF + pairs[None, :], turned_high, mask=turning)
    # Keys go to the cache as they were turned, the rest of them and values as they came.
    number, stored = which - QUERIES, tl.where(slot < 0, 0, KV)
    is_key = (number >= 0) & (number < stored)
    to = keys + slot * slot_stride + number[:, None] * head_stride
    turned = is_key[:, None] & (pairs < HALF)[None, :]
    tl.store(to + pairs[None, :], turned_low, mask=turned)
    tl.store(to + HALF + pairs[None, :], turned_high, mask=turned)
    if 2 * HALF < DIM:
        rest = is_key[:, None] & (dims >= 2 * HALF)[None, :] & (dims < DIM)[None, :]
        tl.store(to + dims[None, :], tl.load(base + dims[None, :], mask=rest, other=0.0), mask=rest)
    number = which - QUERIES - KV
    is_value = ((number >= 0) & (number < stored))[:, None] & (dims < DIM)[None, :]
    value = tl.load(base + dims[None, :], mask=is_value, other=0.0)
    to = values + slot * slot_stride + number[:, None] * head_stride + dims[None, :]
    tl.store(to, value, mask=is_value)


@triton.jit
def _rms_norm(x, weight, output, width, weights, epsilon, WIDTH: tl.constexpr, ROUNDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / width + epsilon)
    if ROUNDED:
        scaled = scaled.to(kind).to(tl.float32)
    factor = tl.load(weight + row % weights * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, (scaled * factor).to(kind), mask=inside)


@triton.jit
def _gate(gate_up, output, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    gated = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    tl.store(output + row * width + columns, (gated * up).to(kind), mask=inside)


def splits_for(sequences: int, kv_heads: int, device: torch.device) -> int:
    """Into how many parts the context of each sequence is divided; a power of four."""
    multiprocessors = 8
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * sequences * kv_heads <= _WAVES * multiprocessors:
        splits *= 4  # Each number is compiled by itself.
    return splits


def attend_paged(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    block_tokens: int,
    output: torch.Tensor,
    *,
    splits: int,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of single tokens over the paged KV cache; writes their rows of the output. No argument is
    read on the host, so that a CUDA graph may contain it.

    Parameters
    ----------
    query : [total, heads, head_dim]; rows need not be adjacent
    keys, values : [slots, kv_heads, head_dim]
    rows : of the batch, [n]
    tables : blocks of each token's request, [n, most]
    contexts : tokens that each one attends to, itself included, [n]; 0: that one is left out
    output : [total, heads, head_dim], contiguous
    splits : from `splits_for`
    window, scale, cap, sinks : as in `attention/base.py`
    """
    heads, dim, kv_heads, count = query.shape[1], query.shape[2], keys.shape[1], len(rows)
    group = heads // kv_heads
    shared = {
        "DIM": dim,
        "WIDTH": max(_LEAST_ROWS, triton.next_power_of_2(dim)),
        "SPLITS": splits,
        "SUNK": sinks is not None,
    }
    parts = sums = output
    if splits > 1:
        parts = torch.empty((count, heads, splits, dim), dtype=torch.float32, device=query.device)
        sums = torch.empty((count, heads, splits), dtype=torch.float32, device=query.device)
    given = output if sinks is None else sinks
    _attend_paged[(count, kv_heads, splits)](
        query,
        keys,
        values,
        tables,
        contexts,
        rows,
        given,
        output,
        parts,
        sums,
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        tables.stride(0),
        window or 1 << 30,
        dim**-0.5 if scale is None else scale,
        cap or 1.0,
        BLOCK=block_tokens,
        GROUP=group,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        TOKENS=_TOKENS if dim <= 128 else _TOKENS // 2,
        CAPPED=cap is not None,
        PRECISION="ieee",
        num_warps=4,
        num_stages=3,
        **shared,
    )
    if splits > 1:
        _join_splits[(count, heads)](parts, sums, contexts, rows, given, output, num_warps=4, **shared)


def attend_tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    tables: torch.Tensor,
    block_tokens: int,
    output: torch.Tensor,
    *,
    tile_tokens: int,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of chunks of prompts over the paged KV cache, which holds them already; writes their rows of
    the output. No argument is read on the host.

    Parameters
    ----------
    query, keys, values, output : see `attend_paged`
    tiles : [n, 4] int32: of some tokens that follow each other, the first row, how many they are (0: none),
        the position of the first, and the line of `tables`
    tile_tokens : most tokens of a tile
    tables : blocks of each request, [requests, most] int32
    window, scale, cap, sinks : as in `attention/base.py`
    """
    heads, dim, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    group = heads // kv_heads
    together = min(_TOGETHER, triton.next_power_of_2(group))
    _attend_tiles[(len(tiles), kv_heads, triton.cdiv(group, together))](
        query,
        keys,
        values,
        tiles,
        tables,
        output if sinks is None else sinks,
        output,
        query.stride(0),
        keys.stride(0),
        keys.stride(1),
        tables.stride(0),
        window or 1 << 30,
        dim**-0.5 if scale is None else scale,
        cap or 1.0,
        BLOCK=block_tokens,
        GROUP=group,
        TOGETHER=together,
        DIM=dim,
        WIDTH=max(_LEAST_ROWS, triton.next_power_of_2(dim)),
        TILE=tile_tokens,
        TOKENS=_TOKENS if dim <= 128 and query.dtype != torch.float32 else _TOKENS // 2,
        CAPPED=cap is not None,
        SUNK=sinks is not None,
        PRECISION="ieee",
        num_warps=4 if dim <= 64 else 8,
        num_stages=2,
    )


def store(heads: torch.Tensor, slots: torch.Tensor, cached: torch.Tensor) -> None:
    """Write [total, kv_heads, head_dim] to slots, [total] int64, of one side of a cache; -1: nowhere."""
    total, count, dim = heads.shape
    _store[(total, triton.cdiv(count, 8))](
        heads,
        slots,
        cached,
        heads.stride(0),
        cached.stride(0),
        cached.stride(1),
        COUNT=count,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        TILE=8,
    )


def turn_and_store(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotate query and key heads in place, and write keys and values to their slots of the cache.

    Parameters
    ----------
    heads : [total, heads + 2 x kv_heads, head_dim], contiguous: queries, keys, values
    cosines, sines : [total, rotated / 2], contiguous
    slots : [total] int64; -1: nowhere
    keys, values : [slots, kv_heads, head_dim], of the cache
    """
    total, every, dim = heads.shape
    kv_heads, half = keys.shape[1], cosines.shape[1]
    tile = 8
    _turn_and_store[(total, triton.cdiv(every, tile))](
        heads,
        cosines,
        sines,
        slots,
        keys,
        values,
        heads.stride(0),
        keys.stride(0),
        keys.stride(1),
        QUERIES=every - 2 * kv_heads,
        KV=kv_heads,
        DIM=dim,
        HALF=half,
        HALF_WIDTH=triton.next_power_of_2(half),
        WIDTH=triton.next_power_of_2(dim),
        TILE=tile,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Scale the last dimension of x to a root mean square of one, round unless the weight has another type,
    then multiply by the weight, [width] or [n, width] for x [..., n, width]."""
    x = x.contiguous()
    width = x.shape[-1]
    output = torch.empty_like(x)
    _rms_norm[(x.numel() // width,)](
        x,
        weight,
        output,
        width,
        weight.numel() // width,
        epsilon,
        WIDTH=triton.next_power_of_2(width),
        ROUNDED=weight.dtype == x.dtype,
    )
    return output


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times the second: [n, 2 x width] -> [n, width]."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    tile = min(1024, triton.next_power_of_2(width))
    _gate[(rows, triton.cdiv(width, tile))](gate_up.contiguous(), output, width, TILE=tile)
    return output


def try_out(dtype: torch.dtype, device: torch.device, head_dim: int) -> None:
    """Run each kernel once; raises whatever Triton raises where one does not run."""
    heads = torch.ones((4, 6, head_dim), dtype=dtype, device=device)
    pool = torch.zeros((2, 16, 2, head_dim), dtype=dtype, device=device)
    query, slots = heads[:, :2], torch.arange(4, device=device)
    angles = torch.zeros((4, head_dim // 2), dtype=dtype, device=device)
    turn_and_store(heads, angles, angles, slots, pool[0], pool[1])
    store(heads[:, 2:4], slots, pool[0])
    output, tables = query.clone(), torch.zeros((4, 1), dtype=torch.int32, device=device)
    for splits in (1, 4):
        attend_paged(query, pool[0], pool[1], slots, tables, slots + 1, 16, output, splits=splits)
    tiles = torch.tensor([[0, 4, 0, 0]], dtype=torch.int32, device=device)
    attend_tiles(query, pool[0], pool[1], tiles, tables, 16, output, tile_tokens=64)
    gate(rms_norm(heads.flatten(1), heads.flatten(1)[0], 1e-5))
    if device.type == "cuda":
        torch.cuda.synchronize(device)

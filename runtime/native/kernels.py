"""What a step computes besides products with weights (kernels.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.native import library

PLAIN_KV = 0
"""The number of the format of KV caches in the type that a step computes in."""
_SPAN = 4
_LANES = 16  # in kernels.cpp, at most


@dataclass(frozen=True, slots=True)
class Spans:
    """Which part of which KV cache each of some tokens attends to.

    Attributes
    ----------
    tables : blocks of all requests, one after the other, int32
    spans : [n, 4] int32: a token's row of the batch, first and end of the tokens that it attends to, and
        where its request's blocks begin in `tables`
    """

    tables: np.ndarray
    spans: np.ndarray

    @classmethod
    def make(cls, singles: Sequence[tuple[int, int, int, Sequence[int]]]) -> Spans:
        """From (row, first token, end, block table)."""
        spans, tables = np.empty((len(singles), _SPAN), dtype=np.int32), list[int]()
        for line, (row, first, end, table) in zip(spans, singles, strict=True):
            line[:] = row, first, end, len(tables)
            tables += table
        return cls(np.array(tables, dtype=np.int32), spans)


def attends_to(head_dim: int) -> bool:
    """Whether attention is compiled for this head size."""
    build = library.loaded()
    return build is not None and bool(build.attends_to(head_dim))


def attend_paged(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: Spans,
    block_tokens: int,
    output: torch.Tensor,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kind: int = PLAIN_KV,
) -> None:
    """Attention of single tokens over the paged KV cache; writes their rows of the output.

    Parameters
    ----------
    query : [total, heads, head_dim]; rows need not be adjacent
    keys, values : [slots, kv_heads, width], contiguous; may be the same
    output : [total, heads, head_dim], contiguous
    scale, cap, sinks : as in `attention/base.py`
    kind : the format of keys and values (`KvFormat`)
    """
    kv_heads, dim = keys.shape[1], query.shape[2]
    library.call(
        "attend_paged",
        query.data_ptr(),
        library.FLOATS[query.dtype],
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        kind,
        spans.tables.ctypes.data,
        spans.spans.ctypes.data,
        len(spans.spans),
        kv_heads,
        query.shape[1] // kv_heads,
        dim,
        block_tokens,
        *_scoring(dim, scale, cap, sinks),
        output.data_ptr(),
    )


def attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: np.ndarray,
    offset: int,
    window: int | None,
    block_tokens: int,
    output: torch.Tensor,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kind: int = PLAIN_KV,
) -> None:
    """Attention of a chunk of a prompt over the paged KV cache, which holds the chunk already.

    Parameters
    ----------
    query : [length, heads, head_dim]; rows need not be adjacent
    keys, values : [slots, kv_heads, width], contiguous; may be the same
    table : the request's blocks, int32
    offset : position of the chunk's first token
    window, scale, cap, sinks : as in `attention/base.py`
    output : [length, heads, head_dim], contiguous
    kind : the format of keys and values (`KvFormat`)
    """
    kv_heads, dim = keys.shape[1], query.shape[2]
    length, end = len(query), offset + len(query)
    window = window or end
    sides = 1 if keys.dtype == torch.float32 else 2  # such values are read in place
    size = sides * kv_heads * dim * (end - max(0, offset + 1 - window) + _LANES - 1)
    packed = query.new_empty(size, dtype=torch.float32)
    library.call(
        "attend_chunk",
        query.data_ptr(),
        library.FLOATS[query.dtype],
        query.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        kind,
        table.ctypes.data,
        offset,
        length,
        window,
        kv_heads,
        query.shape[1] // kv_heads,
        dim,
        block_tokens,
        *_scoring(dim, scale, cap, sinks),
        packed.data_ptr(),
        output.data_ptr(),
    )


def turn_and_store(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kind: int = PLAIN_KV,
) -> None:
    """Rotate query and key heads by their positions, in place, and store keys and values in the cache.

    Parameters
    ----------
    heads : [tokens, query heads + 2 x kv_heads, head_dim], contiguous: queries, keys, values
    cosines, sines : [tokens, rotated / 2], contiguous, of the first `rotated` values of each head
    slots : [tokens], int64
    keys, values : [slots, kv_heads, width], contiguous
    kind : the format of keys and values (`KvFormat`)
    """
    kv_heads, dim = keys.shape[1], heads.shape[2]
    library.call(
        "turn_and_store",
        heads.data_ptr(),
        library.FLOATS[heads.dtype],
        cosines.data_ptr(),
        sines.data_ptr(),
        slots.data_ptr(),
        len(heads),
        heads.shape[1] - 2 * kv_heads,
        kv_heads,
        dim,
        cosines.shape[1],
        keys.data_ptr(),
        values.data_ptr(),
        kind,
    )


def store_heads(heads: torch.Tensor, slots: torch.Tensor, cached: torch.Tensor, kind: int) -> None:
    """Store heads in the cache.

    Parameters
    ----------
    heads : [tokens, kv_heads, head_dim]; rows need not be adjacent
    slots : [tokens], int64
    cached : [slots, kv_heads, width], contiguous
    kind : its format (`KvFormat`)
    """
    library.call(
        "store_heads",
        heads.data_ptr(),
        library.FLOATS[heads.dtype],
        heads.stride(0),
        slots.data_ptr(),
        *heads.shape,
        cached.data_ptr(),
        kind,
    )


def turn_latents(
    queries: torch.Tensor,
    kept: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    neighbours: bool,
    turned: torch.Tensor,
) -> torch.Tensor:
    """What latent attention keeps of each token: the norm of its latent, and the part of its key that is
    rotated; also rotates that part of all queries.

    Parameters
    ----------
    queries : [tokens, heads, head_dim], whose heads are adjacent; the last `rope` values are rotated
    kept : [tokens, rank + rope]; rows need not be adjacent
    weight : of the norm, [rank]
    cosines, sines : [tokens, rope / 2], contiguous
    neighbours : whether pairs that rotate together are neighbours, rather than half of `rope` apart, as they
        are afterwards
    turned : [tokens, heads, rope], where rotated parts of queries are written; neither tokens nor heads need
        be adjacent

    Returns
    -------
    [tokens, rank + rope]
    """
    tokens, heads, dim = queries.shape
    rank = len(weight)
    key = library.empty((tokens, kept.shape[1]), kept.dtype)
    library.call(
        "turn_latents",
        queries.data_ptr(),
        library.FLOATS[queries.dtype],
        queries.stride(0),
        kept.data_ptr(),
        kept.stride(0),
        weight.data_ptr(),
        library.FLOATS[weight.dtype],
        eps,
        cosines.data_ptr(),
        sines.data_ptr(),
        int(neighbours),
        tokens,
        heads,
        dim,
        rank,
        cosines.shape[1],
        turned.data_ptr(),
        turned.stride(0),
        turned.stride(1),
        key.data_ptr(),
    )
    return key


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width], contiguous but for [n, width], whose rows need not be adjacent -> scaled to a root mean
    square of one, rounded to the weight's type, times the weight [width]."""
    output, width = library.empty(x.shape, x.dtype), x.shape[-1]
    library.call(
        "rms_norm",
        x.data_ptr(),
        library.FLOATS[x.dtype],
        x.stride(0) if x.dim() == 2 else width,
        weight.data_ptr(),
        library.FLOATS[weight.dtype],
        eps,
        x.numel() // width,
        width,
        output.data_ptr(),
    )
    return output


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width], contiguous -> with a mean of zero and a variance of one, times the weight [width], plus
    the bias [width], which has the weight's type."""
    output, width = library.empty(x.shape, x.dtype), x.shape[-1]
    library.call(
        "layer_norm",
        x.data_ptr(),
        library.FLOATS[x.dtype],
        weight.data_ptr(),
        bias.data_ptr(),
        library.FLOATS[weight.dtype],
        eps,
        x.numel() // width,
        width,
        output.data_ptr(),
    )
    return output


def relu(values: torch.Tensor) -> torch.Tensor:
    """Contiguous values, in place those below zero set to it."""
    library.call("relu", values.data_ptr(), library.FLOATS[values.dtype], values.numel())
    return values


def gate(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """[tokens, 2 x width], contiguous -> SiLU of the first half (or GELU, as approximated with tanh) times
    the second, [tokens, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = library.empty((rows, width), gate_up.dtype)
    library.call(
        "gate",
        gate_up.data_ptr(),
        library.FLOATS[gate_up.dtype],
        rows,
        width,
        int(is_gelu),
        output.data_ptr(),
    )
    return output


def clamped_gate(gate_up: torch.Tensor, sharpness: float, limit: float) -> torch.Tensor:
    """[tokens, 2 x width], contiguous -> gate x sigmoid(sharpness x gate) x (up + 1), [tokens, width], of
    gates of at most the limit and ups within it."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = library.empty((rows, width), gate_up.dtype)
    library.call(
        "clamped_gate",
        gate_up.data_ptr(),
        library.FLOATS[gate_up.dtype],
        rows,
        width,
        sharpness,
        limit,
        output.data_ptr(),
    )
    return output


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """The norm of the first heads of each token, in place, each with its row of the weight.

    Parameters
    ----------
    heads : [tokens, heads, head_dim]; rows need not be adjacent
    weight : [normed heads, head_dim], contiguous
    """
    library.call(
        "norm_heads",
        heads.data_ptr(),
        library.FLOATS[heads.dtype],
        heads.stride(0),
        len(heads),
        *weight.shape,
        weight.data_ptr(),
        library.FLOATS[weight.dtype],
        eps,
    )


def add(to: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add another tensor in place; both are contiguous, and of one type and size."""
    library.call("add", to.data_ptr(), library.FLOATS[to.dtype], other.data_ptr(), to.numel())
    return to


def converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous values in another type; the same tensor if they have it."""
    if values.dtype == dtype:
        return values
    if not library.computes(values.device, values.dtype, dtype):
        return values.to(dtype)
    output, types = library.empty(values.shape, dtype), library.FLOATS
    library.call(
        "convert_values",
        values.data_ptr(),
        types[values.dtype],
        values.numel(),
        output.data_ptr(),
        types[dtype],
    )
    return output


def take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Columns of x [n, width], contiguous, in an order [count] int32 -> [n, count] float32."""
    if not library.computes(x.device, x.dtype):
        return x.index_select(1, order).float()
    output = library.empty((len(x), len(order)), torch.float32)
    library.call(
        "take_columns",
        x.data_ptr(),
        library.FLOATS[x.dtype],
        *x.shape,
        order.data_ptr(),
        len(order),
        output.data_ptr(),
    )
    return output


def _scoring(
    head_dim: int, scale: float | None, cap: float | None, sinks: torch.Tensor | None
) -> tuple[float, float, int | None]:
    """How scores become weights, as the kernels have it: no cap is 0."""
    return (
        head_dim**-0.5 if scale is None else scale,
        cap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )

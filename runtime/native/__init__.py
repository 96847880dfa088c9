"""Compiled kernels: for what a step computes in float32 and bfloat16 on CPUs (kernels.cpp), its products with
weights (products.cpp), also with quantised ones (quantised.cpp), to copy KV caches (copies.cpp), and to read
weights (loading.cpp).

Values in bfloat16 are computed with in float32, and rounded when they are written.

setup.py builds them for each instruction set if it finds a compiler. If `serves` is False, callers use
torch's operators, which give the same values up to rounding; if `copies` is False, numpy.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

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


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can compute with this type on this device."""
    return dtype in _COMPUTED and device.type == "cpu" and _library() is not None


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels multiply by weights of this type on this device, as fast as oneDNN or faster: not
    in bfloat16 where the processor has instructions for whole tiles (AMX), which they do not use."""
    if not serves(dtype, device):
        return False
    library = _library()
    return dtype != torch.bfloat16 or library is None or not library.has_tiles()


def copies() -> bool:
    """Whether `copy_tokens` and `count_tokens` can be used."""
    return _library() is not None


def attends_to(head_dim: int) -> bool:
    """Whether attention is compiled for this head size."""
    library = _library()
    return library is not None and bool(library.attends_to(head_dim))


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
    _call(
        "attend_paged",
        query.data_ptr(),
        _FLOATS[query.dtype],
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
    _call(
        "attend_chunk",
        query.data_ptr(),
        _FLOATS[query.dtype],
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
    _call(
        "turn_and_store",
        heads.data_ptr(),
        _FLOATS[heads.dtype],
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
    _call(
        "store_heads",
        heads.data_ptr(),
        _FLOATS[heads.dtype],
        heads.stride(0),
        slots.data_ptr(),
        *heads.shape,
        cached.data_ptr(),
        kind,
    )


def panel_width() -> int:
    """Outputs of a panel, where `serves`."""
    library = _library()
    assert library is not None
    return library.panel_width()


def multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of numbers in bfloat16 by instructions of its own."""
    library = _library()
    return library is not None and bool(library.multiplies_pairs())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] float32 or bfloat16 -> panels, as `empty_panels` makes them."""
    outputs, inputs = weight.shape
    packed = empty_panels(outputs, inputs, weight.dtype)
    pack_rows(packed, 0, weight)
    return packed


def empty_panels(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Panels for `pack_rows`; the padding of the last one is zero.

    Returns
    -------
    [out / width, in, width] float32, or [out / width, in / 2, width, 2] bfloat16, where an odd number of
    inputs is padded, too
    """
    width = panel_width()
    inner = (inputs, width) if dtype == torch.float32 else (-(-inputs // 2), width, 2)
    panels = mapped((-(-outputs // width), *inner), dtype)
    panels[-1:].zero_()  # all others are written whole
    return panels


def pack_rows(packed: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Write rows [n, in] of a matrix of any floating-point type, from output `first` on, into its panels."""
    if packed.dtype == torch.bfloat16:
        rows, kind = _in_pairs(rows.to(torch.bfloat16)), torch.float32  # a pair moves like a float
        inputs = rows.shape[1] // 2
    else:
        rows = rows if rows.dtype in _FLOATS and rows.stride(1) == 1 else rows.float().contiguous()
        inputs, kind = rows.shape[1], rows.dtype
    _call(
        "pack_rows",
        packed.data_ptr(),
        inputs,
        first,
        rows.data_ptr(),
        rows.stride(0) * rows.itemsize,
        len(rows),
        _FLOATS[kind],
    )


def mapped(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in CPU memory. A large one has its own memory mapping: it leaves no
    hole in the heap when it is freed."""
    count = math.prod(size)
    if count < _MAPPED:
        return torch.empty(tuple(size), dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*size)


def read_pieces(file: int, at: int, step: int, piece: int, count: int, into: torch.Tensor) -> None:
    """Fill a contiguous tensor with `count` pieces of a file, `piece` bytes each, the first one at byte `at`
    and each `step` bytes behind the one before.

    Raises
    ------
    OSError : the file can't be read, or ends
    """
    library = _library()
    if library is None:
        view = into.view(-1).view(torch.uint8).numpy().data
        for number in range(count):
            part = view[number * piece : (number + 1) * piece]
            while part:
                read = os.preadv(file, [part], at + number * step + piece - len(part))
                if read == 0:
                    raise OSError(_TOO_SHORT)
                part = part[read:]
        return
    if error := library.read_pieces(file, at, step, piece, count, into.data_ptr()):
        raise OSError(_TOO_SHORT) if error < 0 else OSError(error, os.strerror(error))


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """[out] -> float32, padded with zeros to whole panels."""
    return _in_panels(bias.float()).flatten()


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """x [n, in], contiguous, times packed weights of its type, plus packed bias -> [n, out].

    A row's result does not depend on the others.
    """
    output, (x, kind) = x.new_empty(len(x), outputs), _multiplied(x)
    address = None if bias is None else bias.data_ptr()
    _call(
        "multiply_packed",
        x.data_ptr(),
        *x.shape,
        kind,
        packed.data_ptr(),
        address,
        outputs,
        output.data_ptr(),
    )
    return output


def pack_codes(codes: torch.Tensor, is_packed: bool, flipped: int) -> torch.Tensor:
    """Codes [out, in] uint8 -> panels [out / width, in, bytes]; the last row is repeated to fill them.

    Parameters
    ----------
    is_packed : codes have four bits: two to a byte, the lower ones for the first half of the panel
    flipped : bits to invert where they are not packed
    """
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    rows, inputs = codes.shape
    width = panel_width()
    packed = mapped((-(-rows // width), inputs, width // 2 if is_packed else width), torch.uint8)
    _call(
        "pack_codes",
        packed.data_ptr(),
        codes.data_ptr(),
        codes.stride(0),
        rows,
        inputs,
        is_packed,
        flipped,
    )
    return packed


class Quantised(Protocol):
    """A quantised matrix in panels; `PackedWeight` of the torch engine describes the tensors."""

    @property
    def kind(self) -> int: ...

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    runs: torch.Tensor
    outputs: int


def linear_quantised(x: torch.Tensor, weight: Quantised, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] float32, contiguous, times a quantised matrix, plus packed bias -> [n, out].

    A row's result does not depend on the others.
    """
    output = x.new_empty(len(x), weight.outputs)
    _call(
        "multiply_quantised",
        x.data_ptr(),
        *x.shape,
        weight.kind,
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        _FLOATS[weight.scales.dtype],
        weight.scales.shape[2],
        None if weight.zeros is None else weight.zeros.data_ptr(),
        weight.scales.shape[1],
        weight.runs.data_ptr(),
        len(weight.runs),
        None if bias is None else bias.data_ptr(),
        weight.outputs,
        output.data_ptr(),
    )
    return output


class Grouped:
    """Products with packed weights of equal size, each with its own rows of x.

    Parameters
    ----------
    packed, biases : of each group; no biases, or one for each
    outputs : columns of the result
    exponents : of each group, if the weights are in mxfp4 (`pack_mxfp4`)
    """

    def __init__(
        self,
        packed: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        outputs: int,
        exponents: Sequence[torch.Tensor] = (),
    ) -> None:
        self._kept, self._outputs = (packed, biases, exponents), outputs
        self._in_mxfp4 = bool(exponents)
        self._weights = [_addresses(each) for each in ((packed, exponents) if exponents else (packed,))]
        self._biases = _addresses(biases) if biases else None

    def __call__(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """x [n, in], contiguous and sorted by group, of which each has so many rows -> [n, out].

        In mxfp4, x of any type is computed in float32.
        """
        dtype = x.dtype
        x = x.float() if self._in_mxfp4 else x
        output, rows = x.new_empty(len(x), self._outputs), np.array(counts, dtype=np.int64)
        x, kind = _multiplied(x)
        _call(
            "multiply_mxfp4" if self._in_mxfp4 else "multiply_grouped",
            x.data_ptr(),
            rows.ctypes.data,
            len(rows),
            x.shape[1],
            *(() if self._in_mxfp4 else (kind,)),
            *(weights.ctypes.data for weights in self._weights),
            None if self._biases is None else self._biases.ctypes.data,
            self._outputs,
            output.data_ptr(),
        )
        return output.to(dtype)


def pack_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] and exponents [out, in / 32], uint8, in panels: codes of 8 inputs in each int32,
    [out / width, in / 8, width], and exponents [out / width, in / 32, width]."""
    bytes_of_two = codes[:, 0::2] | codes[:, 1::2] << 4
    words = bytes_of_two.contiguous().view(torch.int32)  # the lowest bits come first
    packed = _in_panels(words).transpose(1, 2).contiguous()
    return packed, _in_panels(exponents).transpose(1, 2).contiguous()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width], contiguous -> scaled to a root mean square of one, rounded to the weight's type, times
    the weight [width]."""
    output, width = torch.empty_like(x), x.shape[-1]
    _call(
        "rms_norm",
        x.data_ptr(),
        _FLOATS[x.dtype],
        weight.data_ptr(),
        _FLOATS[weight.dtype],
        eps,
        x.numel() // width,
        width,
        output.data_ptr(),
    )
    return output


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 x width], contiguous -> SiLU of the first half times the second, [tokens, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(rows, width)
    _call("gate", gate_up.data_ptr(), _FLOATS[gate_up.dtype], rows, width, output.data_ptr())
    return output


def copy_tokens(
    into: np.ndarray, into_runs: np.ndarray, source: np.ndarray, source_runs: np.ndarray, past_caches: bool
) -> None:
    """Copy tokens from slots of one array to slots of another, run after run, in every plane.

    Parameters
    ----------
    into, source : [planes, slots] items of equal size, one per token; slots need not be adjacent
    into_runs, source_runs : [runs, 2] int64: slots [first, end), the same number in all on both sides
    past_caches : bypass the CPU caches, because the copy is not read soon
    """
    _call(
        "copy_tokens",
        into.ctypes.data,
        *into.strides,
        source.ctypes.data,
        *source.strides,
        len(into),
        into.itemsize,
        into_runs.ctypes.data,
        len(into_runs),
        source_runs.ctypes.data,
        len(source_runs),
        past_caches,
    )


def count_tokens(runs: np.ndarray, slots: int) -> int:
    """The tokens of runs [runs, 2] int64; -1 if one is empty or not within slots [0, slots)."""
    library = _library()
    assert library is not None
    count: int = library.count_tokens(runs.ctypes.data, len(runs), slots)
    return count


_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Types of weights and scales that kernels read."""
_COMPUTED = (torch.float32, torch.bfloat16)
"""Types of the values that a step computes with."""
_BY_FLOATS, _BF16_BY_FLOATS, _BF16_BY_PAIRS = range(3)
"""How kernels multiply by panels."""
_MAPPED = 1 << 18  # values
_TOO_SHORT = "the file is too short"
_ARGUMENTS = {
    # p: address, l: count, f: float
    "attend_paged": "pllpplpplllllffpp",
    "attend_chunk": "pllpplplllllllffppp",
    "turn_and_store": "plppplllllppl",
    "store_heads": "pllplllpl",
    "multiply_packed": "plllpplp",
    "multiply_quantised": "plllppllplplplp",
    "multiply_grouped": "pplllpplp",
    "multiply_mxfp4": "ppllppplp",
    "rms_norm": "plplfllp",
    "gate": "plllp",
    "copy_tokens": "pllpllllplpll",
    "count_tokens": "pll",
    "pack_rows": "pllplll",
    "pack_codes": "pplllll",
    "read_pieces": "lllllp",
    "attends_to": "l",
    "multiplies_pairs": "",
    "has_tiles": "",
    "panel_width": "",
}
_RESULTS = {
    "attends_to": ctypes.c_int,
    "multiplies_pairs": ctypes.c_int,
    "has_tiles": ctypes.c_int,
    "panel_width": ctypes.c_long,
    "count_tokens": ctypes.c_long,
    "read_pieces": ctypes.c_long,
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}


def _in_panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, ...] -> [out / width, width, ...], padded with zeros."""
    width = panel_width()
    missing = -len(weight) % width
    if missing:
        weight = torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:])))
    return weight.view(len(weight) // width, width, *weight.shape[1:])


def _in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """[n, in] -> contiguous, padded with zeros to an even number of columns."""
    return (F.pad(rows, (0, 1)) if rows.shape[1] % 2 else rows).contiguous()


def _multiplied(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [n, in] as kernels read it for products, and how they multiply."""
    if x.dtype == torch.float32:
        return x, _BY_FLOATS
    return _in_pairs(x), _BF16_BY_PAIRS if multiplies_pairs() else _BF16_BY_FLOATS


def _scoring(
    head_dim: int, scale: float | None, cap: float | None, sinks: torch.Tensor | None
) -> tuple[float, float, int | None]:
    """How scores become weights, as the kernels have it: no cap is 0."""
    return (
        head_dim**-0.5 if scale is None else scale,
        cap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )


def _addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([each.data_ptr() for each in tensors], dtype=np.uint64)


def _call(name: str, *arguments: float | None) -> None:
    """Call a kernel; ctypes releases the GIL meanwhile."""
    getattr(_library(), name)(*arguments)


@cache
def _library() -> ctypes.CDLL | None:
    """The build for this processor's instruction set; None if none loads."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    wanted = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",)}.get(capability, ("default",))
    for name in wanted:
        for path in Path(__file__).parent.glob(f"_{name}.*.so"):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            for function, arguments in _ARGUMENTS.items():
                entry = getattr(library, function)
                entry.argtypes = [_TYPES[letter] for letter in arguments]
                entry.restype = _RESULTS.get(function)
            return library
    return None

"""Products with weights in panels (products.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.native import library
from runtime.native.kernels import converted
from runtime.native.loading import in_pairs, pack_rows
from runtime.native.memory import mapped

_BY_FLOATS, _BF16_BY_FLOATS, _BF16_BY_PAIRS, _BF16_WIDENED, _FP16_WIDENED = range(5)
"""How kernels multiply by panels; the last two, x in float32 by weights that become float32 in registers."""


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] float32, bfloat16 or float16 -> panels, as `empty_panels` makes them."""
    outputs, inputs = weight.shape
    packed = empty_panels(outputs, inputs, weight.dtype)
    pack_rows(packed, 0, weight)
    return packed


def empty_panels(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Panels for `pack_rows`; the padding of the last one is zero.

    Returns
    -------
    [out / width, in, width] float32, or [out / width, in / 2, width, 2] of 16 bits, where an odd number of
    inputs is padded, too
    """
    panels = mapped(_panels_shape(outputs, inputs, dtype), dtype)
    panels[-1:].zero_()  # all others are written whole
    return panels


def _panels_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    width = library.panel_width()
    inner = (inputs, width) if dtype == torch.float32 else (-(-inputs // 2), width, 2)
    return (-(-outputs // width), *inner)


def pack_bias(bias: torch.Tensor) -> torch.Tensor:
    """[out] -> float32, padded with zeros to whole panels."""
    return _in_panels(bias.float()).flatten()


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """x [n, in], contiguous, times packed weights, plus packed bias -> [n, out].

    Weights have the type of x; or 16 bits, and x is in float32, with the same results as with the weights in
    float32. A row's result does not depend on the others.
    """
    output, (x, kind) = library.empty((len(x), outputs), x.dtype), _multiplied(x, packed.dtype)
    address = None if bias is None else bias.data_ptr()
    library.call(
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


def pack_heads(weights: torch.Tensor) -> torch.Tensor:
    """[heads, out, in] float32 or bfloat16, with an even number of inputs -> panels of each head, for
    `multiply_heads`."""
    heads, outputs, inputs = weights.shape
    packed = mapped((heads, *_panels_shape(outputs, inputs, weights.dtype)), weights.dtype)
    packed[:, -1:].zero_()  # all others are written whole
    for own, weight in zip(packed, weights, strict=True):
        pack_rows(own, 0, weight)
    return packed


def transposed_head(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """Of one head's panels of weights [out, in], by `pack_heads`, those of the same weights transposed, as
    weights of a single head, [1, ...]."""
    rows = packed.transpose(0, 1) if packed.dim() == 3 else packed.permute(1, 3, 0, 2).flatten(0, 1)
    return pack_heads(rows.flatten(1)[:, :outputs].unsqueeze(0))


def multiply_heads(x: torch.Tensor, packed: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Multiply each head of x by its own weights.

    Parameters
    ----------
    x : [n, heads, in]; neither rows nor heads need be adjacent, and all heads may be the same; in bfloat16,
        both are an even number of values apart
    packed : weights of the same type, by `pack_heads`
    output : [n, heads, out], where the products are written; neither rows nor heads need be adjacent

    Returns
    -------
    output
    """
    rows, heads, inputs = x.shape
    if x.dtype == torch.bfloat16 and (x.stride(0) % 2 or x.stride(1) % 2):
        raise ValueError(
            f"rows and heads of x are {x.stride()[:2]} values apart; in bfloat16, make both even"
        )
    library.call(
        "multiply_heads",
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        rows,
        heads,
        inputs,
        _kind(x.dtype),
        packed.data_ptr(),
        output.shape[2],
        output.data_ptr(),
        output.stride(0),
        output.stride(1),
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

    repeatable = True

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

    def __call__(self, x: torch.Tensor, counts: Sequence[int] | np.ndarray) -> torch.Tensor:
        """x [n, in], contiguous and sorted by group -> [n, out].

        In mxfp4, x of any type is computed in float32.

        Parameters
        ----------
        counts : of each group's rows, n in all, or fewer: results of rows after them are not written
        """
        dtype = x.dtype
        x = converted(x, torch.float32) if self._in_mxfp4 else x
        output = library.empty((len(x), self._outputs), x.dtype)
        rows = library.kept(np.asarray(counts, dtype=np.int64))
        x, kind = _multiplied(x, x.dtype if self._in_mxfp4 else self._kept[0][0].dtype)
        library.call(
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
        return converted(output, dtype)


def pack_mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] and exponents [out, in / 32], uint8, in panels: codes of 8 inputs in each int32,
    [out / width, in / 8, width], and exponents [out / width, in / 32, width]."""
    bytes_of_two = codes[:, 0::2] | codes[:, 1::2] << 4
    words = bytes_of_two.contiguous().view(torch.int32)  # the lowest bits come first
    packed = _in_panels(words).transpose(1, 2).contiguous()
    return packed, _in_panels(exponents).transpose(1, 2).contiguous()


def _in_panels(weight: torch.Tensor) -> torch.Tensor:
    """[out, ...] -> [out / width, width, ...], padded with zeros."""
    width = library.panel_width()
    missing = -len(weight) % width
    if missing:
        weight = torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:])))
    return weight.view(len(weight) // width, width, *weight.shape[1:])


def _multiplied(x: torch.Tensor, weights: torch.dtype) -> tuple[torch.Tensor, int]:
    """x [n, in] as kernels read it for products with weights of a type, and how they multiply."""
    if weights == torch.float32:
        return x, _BY_FLOATS
    if x.dtype == torch.float32:
        return in_pairs(x), _BF16_WIDENED if weights == torch.bfloat16 else _FP16_WIDENED
    return in_pairs(x), _kind(x.dtype)


def _kind(dtype: torch.dtype) -> int:
    """How kernels multiply x by weights of the same type."""
    if dtype == torch.float32:
        return _BY_FLOATS
    return _BF16_BY_PAIRS if library.multiplies_pairs() else _BF16_BY_FLOATS


def _addresses(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return np.array([each.data_ptr() for each in tensors], dtype=np.uint64)

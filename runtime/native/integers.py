"""Products of activations and weights that are both integers of 8 bits (integers.cpp)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from runtime.native import library
from runtime.native.products import pack

LARGEST_INPUTS = 1 << 16
"""Inputs of a matrix whose sums fit into 32 bits whatever its codes are."""
_WORD = 4


class Integers(Protocol):
    """A matrix of integers in panels; `IntegerWeight` of the torch engine describes the tensors."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    sums: torch.Tensor | None
    outputs: int


def pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] uint8 -> panels [out / width, in / 4, width, 4], padded with zeros."""
    padded = F.pad(codes, (0, -codes.shape[1] % _WORD)).contiguous()
    return pack(padded.view(torch.float32)).view(torch.uint8).unflatten(-1, (-1, _WORD))


def find_ranges(x: torch.Tensor) -> torch.Tensor:
    """How far each row of x [n, in] float32, contiguous, goes below and above zero -> [n, 2]."""
    ranges = x.new_empty(len(x), 2)
    library.call("find_ranges", x.data_ptr(), *x.shape, ranges.data_ptr())
    return ranges


def linear_integers(
    x: torch.Tensor,
    weight: Integers,
    bias: torch.Tensor | None,
    steps: torch.Tensor | None,
    ranges: torch.Tensor | None,
) -> torch.Tensor:
    """x [n, in] float32, contiguous, rounded to integers, times a matrix of integers, plus a packed
    bias -> [n, out].

    The products are summed exactly, and rounded once. A row's result does not depend on the others.

    Parameters
    ----------
    steps : [2] float32, the scale and the zero of all rows; None: each has its own
    ranges : [n, 2] float32, how far rows go below and above zero; None: as they do
    """
    output = x.new_empty(len(x), weight.outputs)
    parts = (steps, ranges, weight.codes, weight.scales, weight.zeros, weight.sums, bias)
    library.call(
        "multiply_integers",
        x.data_ptr(),
        *x.shape,
        library.multiplies_bytes(),
        *(None if part is None else part.data_ptr() for part in parts),
        weight.outputs,
        output.data_ptr(),
    )
    return output

"""Products of activations and weights that are both integers of 8 bits (integers.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
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
    ranges = library.empty((len(x), 2), x.dtype)
    library.call("find_ranges", x.data_ptr(), *x.shape, ranges.data_ptr())
    return ranges


class GroupedIntegers:
    """Products with matrices of integers of equal size, each with its own rows of x, which are rounded to
    integers.

    The products are summed exactly, and rounded once. A row's result does not depend on the others.

    Parameters
    ----------
    weights : of each group
    biases : packed, of each group, or None
    steps : of each group, [2] float32 on the CPU, the scale and the zero of all its rows; None: each row has
        its own
    """

    def __init__(
        self,
        weights: Sequence[Integers],
        biases: Sequence[torch.Tensor | None],
        steps: Sequence[torch.Tensor | None],
    ) -> None:
        self._outputs = weights[0].outputs
        self._kept = [
            (weight.codes, weight.scales, weight.zeros, weight.sums, bias, step)
            for weight, bias, step in zip(weights, biases, steps, strict=True)
        ]
        addresses = [[0 if part is None else part.data_ptr() for part in parts] for parts in self._kept]
        self._matrices = np.array(addresses, dtype=np.uint64)

    def __call__(
        self, x: torch.Tensor, counts: Sequence[int] | np.ndarray, ranges: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, in] float32, contiguous and sorted by group -> [n, out].

        Parameters
        ----------
        counts : of each group's rows, n in all, or fewer: results of rows after them are not written
        ranges : [n, 2] float32, how far rows go below and above zero; None: as they do
        """
        output = library.empty((len(x), self._outputs), x.dtype)
        rows = library.kept(np.asarray(counts, dtype=np.int64))
        library.call(
            "multiply_integers",
            x.data_ptr(),
            rows.ctypes.data,
            len(rows),
            x.shape[1],
            library.multiplies_bytes(),
            None if ranges is None else ranges.data_ptr(),
            self._matrices.ctypes.data,
            self._outputs,
            output.data_ptr(),
        )
        return output

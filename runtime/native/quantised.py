"""Products with quantised weights (quantised.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from runtime.native import library

BY_FLOATS, BY_ROUNDED = "multiply_quantised", "multiply_rounded"
"""The kernels that multiply by quantised matrices; what they make of x: nothing, or integers of 16 bits."""


class Quantised(Protocol):
    """A matrix in panels; `PackedWeight` and `RoundedWeight` of the torch engine describe the tensors."""

    @property
    def kind(self) -> int: ...

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    runs: torch.Tensor
    outputs: int


def linear_quantised(
    x: torch.Tensor, weight: Quantised, bias: torch.Tensor | None, kernel: str = BY_FLOATS
) -> torch.Tensor:
    """x [n, in] float32, contiguous, times a quantised matrix, plus packed bias -> [n, out].

    A row's result does not depend on the others. By BY_ROUNDED, each run of inputs of a row is rounded to
    multiples of 1/32767 of its largest value, and products are summed exactly in each run.
    """
    output = library.empty((len(x), weight.outputs), x.dtype)
    arguments = x.data_ptr(), len(x), x.shape[1], *_matrix(weight, bias)
    library.call(kernel, *arguments, output.data_ptr())
    return output


def _matrix(weight: Quantised, bias: torch.Tensor | None) -> tuple[int | None, ...]:
    """What kernels take of a matrix: all of them the same, between x and the output."""
    return (
        weight.kind,
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        library.FLOATS[weight.scales.dtype],
        weight.scales.shape[2],
        None if weight.zeros is None else weight.zeros.data_ptr(),
        weight.scales.shape[1],
        weight.runs.data_ptr(),
        len(weight.runs),
        None if bias is None else bias.data_ptr(),
        weight.outputs,
    )


class GroupedQuantised:
    """Products with quantised matrices of equal size, each with its own rows of x.

    Parameters
    ----------
    kernel : BY_FLOATS or BY_ROUNDED
    weights : of each group
    biases : packed, of each group, or None
    inputs : columns of x
    """

    repeatable = True

    def __init__(
        self, kernel: str, weights: Sequence[Quantised], biases: Sequence[torch.Tensor | None], inputs: int
    ) -> None:
        self._kept, self._inputs, self._outputs = (weights, biases), inputs, weights[0].outputs
        build = library.loaded()
        assert build is not None
        self._kernel = build.find_repeat(kernel.encode())
        each = [(0, 0, inputs, *_matrix(*own), 0) for own in zip(weights, biases, strict=True)]
        self._arguments = np.array([[value or 0 for value in own] for own in each], dtype=np.uint64)

    def __call__(self, x: torch.Tensor, counts: Sequence[int] | np.ndarray) -> torch.Tensor:
        """x [n, in] float32, contiguous and sorted by group -> [n, out].

        Parameters
        ----------
        counts : of each group's rows, n in all, or fewer: results of rows after them are not written
        """
        output, rows = library.empty((len(x), self._outputs), x.dtype), np.asarray(counts, dtype=np.int64)
        library.call(
            "multiply_each",
            self._kernel,
            self._arguments.ctypes.data,
            self._arguments.shape[1],
            library.kept(rows).ctypes.data,
            len(rows),
            x.data_ptr(),
            self._inputs,
            self._outputs,
            output.data_ptr(),
        )
        return output

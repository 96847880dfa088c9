"""Products with quantised weights (quantised.cpp)."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime.native import library


class Quantised(Protocol):
    """A matrix in panels; `PackedWeight` and `RoundedWeight` of the torch engine describe the tensors."""

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
    return multiplied_by("multiply_quantised", x, weight, bias)


def multiplied_by(kernel: str, x: torch.Tensor, weight: Quantised, bias: torch.Tensor | None) -> torch.Tensor:
    """What a kernel makes of them: all that multiply by quantised matrices take the same arguments."""
    output = library.empty((len(x), weight.outputs), x.dtype)
    library.call(
        kernel,
        x.data_ptr(),
        *x.shape,
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
        output.data_ptr(),
    )
    return output

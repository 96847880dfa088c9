"""Matrices of integers of 8 bits whose inputs are rounded to such integers, too (W8A8)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from runtime import native
from runtime.engine.torch.quantised.activations import Activations, Agree, ranges_of
from runtime.engine.torch.quantised.weight import QuantisedWeight


class IntegerWeight:
    """A matrix of integers [out, in] in memory, for the compiled kernel, which `native.serves` must allow.

    Outputs are in panels of `native.panel_width()`, the last one padded.

    Attributes
    ----------
    codes : [panels, in / 4, width, 4] uint8
    scales : [panels * width] float32
    zeros : [panels * width] uint8, or None: 128
    sums : [panels * width] int32, of the weights of an output without its scale; None where activations are
        symmetric
    activations : the `rounding` of the weight
    """

    def __init__(self, weight: QuantisedWeight, activations: Activations) -> None:
        self.outputs, inputs = weight.codes.shape
        self.activations = activations
        self.codes = native.pack_bytes(weight.codes)
        self.scales = self._padded(weight.scales[:, 0].float())
        self.zeros = None if weight.zeros is None else self._padded(weight.zeros[:, 0])
        self.sums: torch.Tensor | None = None
        if not self.activations.symmetric:
            zeros = weight.kind.middle if weight.zeros is None else weight.zeros[:, 0].int()
            sums = weight.codes.sum(1, dtype=torch.int32) - zeros * inputs
            self.sums = self._padded(sums.int())

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.codes, self.scales, self.zeros, self.sums)
        return sum(part.nbytes for part in parts if part is not None)

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        """[out] -> [panels * width]."""
        return F.pad(values, (0, -len(values) % native.panel_width())).contiguous()


class IntegerProduct:
    """x [n, in] of any type, rounded to integers -> x @ weight^T + bias [n, out], in the same type.

    Parameters
    ----------
    agree : for a part of the inputs: finds the ranges of whole rows
    """

    def __init__(
        self, weight: IntegerWeight, bias: torch.Tensor | None = None, agree: Agree | None = None
    ) -> None:
        self.weight, self.agree = weight, agree
        self.bias = None if bias is None else native.pack_bias(bias)
        self._alone = IntegerProducts([self])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._alone(x, [len(x)])

    @staticmethod
    def grouped(products: Sequence[IntegerProduct]) -> IntegerProducts:
        """One product for all, each with rows of its own."""
        return IntegerProducts(products)


class IntegerProducts:
    """Products of equal size in one call of the kernel. Ranks that divide the inputs agree on the ranges of
    all rows at once."""

    def __init__(self, products: Sequence[IntegerProduct]) -> None:
        steps = [each.weight.activations.steps for each in products]
        self._agree = products[0].agree if any(step is None for step in steps) else None
        self.repeatable = self._agree is None
        self._multiply = native.GroupedIntegers(
            [each.weight for each in products], [each.bias for each in products], steps
        )

    def __call__(self, x: torch.Tensor, counts: Sequence[int] | np.ndarray) -> torch.Tensor:
        """x [n, in], sorted by group, of which each has so many rows -> [n, out]."""
        values = native.converted(x.contiguous(), torch.float32)
        ranges = None if self._agree is None else self._agree(ranges_of(values))
        return native.converted(self._multiply(values, counts, ranges), x.dtype)


def rounding(weight: QuantisedWeight) -> Activations | None:
    """How the inputs of a matrix are rounded; None: not at all, because the checkpoint does not, or an
    output has more than one scale, or too many inputs for sums of 32 bits."""
    alike, inputs = weight.scales.shape[1] == 1, weight.codes.shape[1]
    return weight.activations if alike and inputs <= native.LARGEST_INPUTS else None

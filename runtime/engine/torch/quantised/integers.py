"""Matrices of integers of 8 bits whose inputs are rounded to such integers, too (W8A8)."""

from __future__ import annotations

from collections.abc import Callable

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

    Parameters
    ----------
    activations : the `rounding` of the weight
    """

    def __init__(self, weight: QuantisedWeight, activations: Activations) -> None:
        self.outputs, inputs = weight.codes.shape
        self._activations = activations
        self.codes = native.pack_bytes(weight.codes)
        self.scales = self._padded(weight.scales[:, 0].float())
        self.zeros = None if weight.zeros is None else self._padded(weight.zeros[:, 0])
        self.sums: torch.Tensor | None = None
        if not self._activations.symmetric:
            zeros = weight.kind.middle if weight.zeros is None else weight.zeros[:, 0].int()
            sums = weight.codes.sum(1, dtype=torch.int32) - zeros * inputs
            self.sums = self._padded(sums.int())

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.codes, self.scales, self.zeros, self.sums)
        return sum(part.nbytes for part in parts if part is not None)

    def product(
        self, bias: torch.Tensor | None, agree: Agree | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [n, in] of any type, rounded to integers -> x @ weight^T + bias [n, out], in the same type.

        Parameters
        ----------
        agree : for a part of the inputs: finds the ranges of whole rows
        """
        added = None if bias is None else native.pack_bias(bias)
        steps = self._activations.steps

        def run(x: torch.Tensor) -> torch.Tensor:
            values = x.float().contiguous()
            ranges = None if agree is None or steps is not None else agree(ranges_of(values))
            return native.linear_integers(values, self, added, steps, ranges).to(x.dtype)

        return run

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        """[out] -> [panels * width]."""
        return F.pad(values, (0, -len(values) % native.panel_width())).contiguous()


def rounding(weight: QuantisedWeight) -> Activations | None:
    """How the inputs of a matrix are rounded; None: not at all, because the checkpoint does not, or an
    output has more than one scale, or too many inputs for sums of 32 bits."""
    alike, inputs = weight.scales.shape[1] == 1, weight.codes.shape[1]
    return weight.activations if alike and inputs <= native.LARGEST_INPUTS else None

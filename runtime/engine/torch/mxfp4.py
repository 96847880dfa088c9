"""Weights in mxfp4 (OCP Microscaling Formats 1.0, section 5.3): numbers of 4 bits, an exponent per 32.

The weights stay packed. In float32 and bfloat16 on CPUs the compiled kernels multiply by them as they are, in
float32; elsewhere they are expanded for each product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from runtime import native
from runtime.engine.torch.linear import Product

BLOCK, BLOCK_BYTES = 32, 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sign, two bits of exponent, one of mantissa
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_PAIRS = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
"""The two values of a byte, the one in the low bits first."""


def mxfp4_product(
    blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> Product:
    """x [n, in] of a type -> x @ weight^T + bias [n, out].

    Parameters
    ----------
    blocks : [out, in / 32, 16] uint8, two values each
    scales : [out, in / 32] uint8, exponents of two plus 127
    bias : [out]
    """
    kind = Mxfp4Panels if native.serves(dtype, blocks.device) else Expanding
    return kind(blocks, scales, bias)


class Mxfp4Panels:
    """By our own kernel, which `native.serves` must allow."""

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        self.outputs, (self.packed, self.exponents) = len(blocks), native.pack_mxfp4(codes, scales)
        self.bias = None if bias is None else native.pack_bias(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.grouped([self])(x.contiguous(), [len(x)])

    @staticmethod
    def grouped(panels: Sequence[Mxfp4Panels]) -> native.Grouped:
        """One product for all, each with rows of its own."""
        biases = [each.bias for each in panels if each.bias is not None]
        exponents = [each.exponents for each in panels]
        return native.Grouped([each.packed for each in panels], biases, panels[0].outputs, exponents)


class Expanding:
    """By torch's operators, from weights that are expanded first."""

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._blocks, self._scales, self._bias = blocks, scales, bias
        self._pairs = _PAIRS.to(blocks.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = self._pairs.to(x.dtype)[self._blocks.int()].flatten(-2)
        powers = (self._scales.int() << 23).view(torch.float32).to(x.dtype)  # the exponent of a float32
        return F.linear(x, values.mul_(powers.unsqueeze(-1)).flatten(1), self._bias)

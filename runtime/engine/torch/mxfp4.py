"""Weights in mxfp4 (OCP Microscaling Formats 1.0, section 5.3): numbers of 4 bits, an exponent per 32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK, BLOCK_BYTES = 32, 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sign, two bits of exponent, one of mantissa
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_PAIRS = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])
"""The two values of a byte, the one in the low bits first."""


class Mxfp4Linear:
    """x [n, in] -> x @ weight^T + bias [n, out]. The weight stays packed, and is expanded for each product.

    Parameters
    ----------
    blocks : [out, in / 32, 16] uint8, two values each
    scales : [out, in / 32] uint8, exponents of two plus 127
    bias : [out]
    """

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._blocks, self._scales, self._bias = blocks, scales, bias
        self._pairs = _PAIRS.to(blocks.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = self._pairs.to(x.dtype)[self._blocks.int()].flatten(-2)
        powers = (self._scales.int() << 23).view(torch.float32).to(x.dtype)  # the exponent of a float32
        return F.linear(x, values.mul_(powers.unsqueeze(-1)).flatten(1), self._bias)

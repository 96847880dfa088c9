"""Quantised matrices as the engine keeps them: packed, in panels of outputs, for the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from runtime import native
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight

RUN_INPUTS = 128
"""Most inputs of a run, the part of a group that is summed before it is scaled."""
_SLICE_VALUES = 1 << 22  # weights that are floats at a time without the compiled kernel: 16 MB


class PackedWeight:
    """A quantised matrix [out, in] in memory.

    Outputs are in panels of `width`, the last one padded; inputs are in the order of their groups.

    Attributes
    ----------
    codes : [panels, in, bytes] uint8: a byte for each output of a panel, or two outputs in a byte, the lower
        four bits for the first half of the panel; INT8 is signed here, so that its zero is 0
    scales : [panels, groups, width], or [panels, groups, 1] where all outputs of a panel have the same
    zeros : [panels, groups, bytes] like codes, or None
    runs : [runs, 3] int32: first input, end, and group
    order : [in] the inputs in the order of the codes; None: as they are
    """

    def __init__(self, weight: QuantisedWeight) -> None:
        self.kind, (self.outputs, self.inputs) = weight.kind, weight.codes.shape
        self.on_cpu = native.serves(torch.float32, weight.codes.device)
        self.width = native.panel_width() if self.on_cpu else 32
        self.order, self.runs, codes = in_order(weight)
        self.codes = self._packed(codes)
        self.zeros = None if weight.zeros is None else self._packed(weight.zeros)
        self.scales = packed_scales(weight.scales, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.codes, self.scales, self.zeros, self.runs, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def product(self, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [n, in] of any type -> x @ weight^T + bias [n, out], in the same type.

        The compiled kernel computes in float32 whatever the type of x.
        """
        if not self.on_cpu:
            return lambda x: self._product_in_slices(x, bias)
        return KernelProduct(self, bias, native.BY_FLOATS)

    def dequantised(self, first: int, end: int) -> torch.Tensor:
        """Rows of some panels [(end - first) * width, in] in float32, inputs in the order of the codes."""
        groups = self.runs[:, 2].repeat_interleave(self.runs[:, 1] - self.runs[:, 0])
        values = self._values(self.codes[first:end])
        if self.zeros is not None:
            values -= self._values(self.zeros[first:end])[:, groups]
        values *= self.scales[first:end].float()[:, groups]
        return values.transpose(1, 2).flatten(0, 1)

    def _product_in_slices(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product without the compiled kernel: a slice of the weights is in floats at a time."""
        x = self._ordered(x)
        step = max(1, _SLICE_VALUES // (self.width * self.inputs))
        parts = [
            F.linear(x, self.dequantised(first, first + step).to(x.dtype))
            for first in range(0, len(self.codes), step)
        ]
        result = torch.cat(parts, dim=1)[:, : self.outputs]
        return result if bias is None else result + bias

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(1, self.order)

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        """[out, n] uint8 -> [panels, n, bytes]."""
        if self.on_cpu:
            return native.pack_codes(codes, self.kind == Kind.INT4, self.kind.middle)
        panels = in_panels(codes, self.width)
        if self.kind == Kind.INT4:
            low, high = panels.chunk(2, dim=-1)
            return (low | (high << 4)).contiguous()
        return (panels ^ self.kind.middle).contiguous()

    def _values(self, packed: torch.Tensor) -> torch.Tensor:
        """[panels, n, bytes] -> [panels, n, width] float32."""
        if self.kind == Kind.INT4:
            return torch.cat((packed & 15, packed >> 4), dim=-1).float() - self.kind.middle
        return packed.view(torch.int8 if self.kind == Kind.INT8 else torch.float8_e4m3fn).float()


class InOrder(native.Quantised, Protocol):
    """A quantised matrix, and the order of its inputs."""

    order: torch.Tensor | None
    inputs: int


class KernelProduct:
    """x [n, in] of any type -> x @ weight^T + bias [n, out], in the same type, by a compiled kernel, which
    computes in float32."""

    def __init__(self, weight: InOrder, bias: torch.Tensor | None, kernel: str) -> None:
        self.weight, self.kernel = weight, kernel
        self.bias = None if bias is None else native.pack_bias(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, order = x.contiguous(), self.weight.order
        values = native.converted(x, torch.float32) if order is None else native.take_columns(x, order)
        return native.converted(native.linear_quantised(values, self.weight, self.bias, self.kernel), x.dtype)

    @staticmethod
    def grouped(products: Sequence[KernelProduct]) -> KernelProducts | None:
        """One product for all, each with rows of its own; None: they are not alike enough."""
        alike = {(each.kernel, each.weight.inputs, each.weight.outputs) for each in products}
        if len(alike) > 1 or any(each.weight.order is not None for each in products):
            return None
        return KernelProducts(products)


class KernelProducts:
    """Products of equal size in one call."""

    repeatable = True

    def __init__(self, products: Sequence[KernelProduct]) -> None:
        weights, biases = [each.weight for each in products], [each.bias for each in products]
        first = products[0]
        self._multiply = native.GroupedQuantised(first.kernel, weights, biases, first.weight.inputs)

    def __call__(self, x: torch.Tensor, counts: Sequence[int] | np.ndarray) -> torch.Tensor:
        """x [n, in], sorted by group, of which each has so many rows -> [n, out]."""
        values = native.converted(x.contiguous(), torch.float32)
        return native.converted(self._multiply(values, counts), x.dtype)


def in_order(weight: QuantisedWeight) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """A matrix with its inputs in the order of their groups: that order [in] (None: as they are), the runs,
    and the codes."""
    groups, order = weight.groups.sort(stable=True)
    if torch.equal(groups, weight.groups):
        return None, runs_of(groups), weight.codes
    return order.int(), runs_of(groups), weight.codes[:, order]


def in_panels(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[out, n] -> [panels, n, width]; the last row is repeated to fill the last panel."""
    missing = -len(rows) % width
    if missing:
        rows = torch.cat((rows, rows[-1:].expand(missing, -1)))
    return rows.view(-1, width, rows.shape[1]).transpose(1, 2)


def packed_scales(scales: torch.Tensor, width: int) -> torch.Tensor:
    """[out, groups] -> [panels, groups, width], or [panels, groups, 1] where a panel has one scale."""
    panels = in_panels(scales, width)
    alike = bool((panels == panels[..., :1]).all())
    return (panels[..., :1] if alike else panels).contiguous()


def runs_of(groups: torch.Tensor) -> torch.Tensor:
    """[runs, 3] int32 of sorted groups [in]."""
    numbers, counts = groups.unique_consecutive(return_counts=True)
    runs, first = list[tuple[int, int, int]](), 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        for at in range(first, first + count, RUN_INPUTS):
            runs.append((at, min(at + RUN_INPUTS, first + count), number))
        first += count
    return torch.tensor(runs, dtype=torch.int32).view(-1, 3)

"""Matrices of integers whose inputs, in bfloat16 or float16, become integers of 16 bits in the kernel."""

from __future__ import annotations

import torch

from runtime import native
from runtime.engine.torch.quantised.packed import KernelProduct, in_order, packed_scales, runs_of
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight


class RoundedWeight:
    """A matrix of integers [out, in] in memory, which `serves` must allow.

    Outputs are in panels of `native.panel_width()`, the last one padded; inputs are in the order of their
    groups.

    Attributes
    ----------
    codes : [panels, words, width, 4] uint8, see `native.pack_words`; INT8 is signed here, so that its zero
        is 0
    scales : [panels, groups, width], or [panels, groups, 1] where all outputs of a panel have the same
    zeros : [panels, groups, bytes] uint8, as those of PackedWeight, or None
    runs : [runs, 3] int32: first input, end, and group
    order : [in] the inputs in the order of the codes; None: as they are
    """

    def __init__(self, weight: QuantisedWeight) -> None:
        self.kind, (self.outputs, self.inputs) = weight.kind, weight.codes.shape
        self.order, self.runs, codes = in_order(weight)
        is_4_bits, middle = self.kind == Kind.INT4, self.kind.middle
        self.codes = native.pack_words(codes if is_4_bits else codes ^ middle, self.kind.bits)
        zeros = weight.zeros
        self.zeros = None if zeros is None else native.pack_codes(zeros, is_4_bits, middle)
        self.scales = packed_scales(weight.scales, native.panel_width())

    @staticmethod
    def serves(weight: QuantisedWeight) -> bool:
        """Whether the kernel multiplies by such a matrix on this machine."""
        if weight.kind == Kind.FP8 or not native.serves(torch.float32, weight.codes.device):
            return False
        size = native.inputs_of_word(weight.kind.bits)
        firsts = runs_of(weight.groups.sort().values)[:, 0]
        return native.multiplies_words() and not bool((firsts % size).any())

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.codes, self.scales, self.zeros, self.runs, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def product(self, bias: torch.Tensor | None) -> KernelProduct:
        """x [n, in] of any type -> x @ weight^T + bias [n, out], in the same type."""
        return KernelProduct(self, bias, native.BY_ROUNDED)

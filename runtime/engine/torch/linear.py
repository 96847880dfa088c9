"""Products with weight matrices: the same as F.linear, from a packed copy of the weight where that is faster.

On a CPU the compiled kernels of `native` are used if they are built: in float32, for up to 32 rows 1.2 to
1.6 times as fast as oneDNN's packed layout (AVX-512, one thread), for more rows about as fast, and in
bfloat16 about as fast for any number. Otherwise oneDNN's layout makes products up to 2.5 times as fast as
the plain one in float32, and up to 1.7 times in bfloat16. Each call then costs about 10 us more, so small
matrices stay plain, and the first product of each shape and number of rows costs 1 ms more. Quantised
weights (`quantised/`) stay packed. Weights in 16 bits may be multiplied with x in float32: they become floats
in registers, or, without our kernels, a slice of them does for each product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from runtime import native
from runtime.engine.torch.quantised.packed import PackedWeight
from runtime.torch_private import linear_onednn, pack_onednn

Product = Callable[[torch.Tensor], torch.Tensor]

_PACKABLE = (torch.float32, torch.bfloat16)  # float16 needs instructions that few processors have
_SLICE_VALUES = 1 << 22
_SMALL = 1 << 16  # values; at about this size both take the same time for a few rows


class Linear:
    """x [n, in] -> x @ weight^T + bias [n, out]. Drop the plain weight afterwards: packing copies it.

    Parameters
    ----------
    weight : [out, in], plain or quantised; or what computes the product, with its bias
    bias : [out]
    computed : the type of x; None: that of a plain weight

    Attributes
    ----------
    product : what computes it
    """

    product: Product

    def __init__(
        self,
        weight: torch.Tensor | PackedWeight | Product,
        bias: torch.Tensor | None = None,
        computed: torch.dtype | None = None,
    ) -> None:
        if isinstance(weight, PackedWeight):
            self.product = weight.product(bias)
            return
        if not isinstance(weight, torch.Tensor):
            self.product = weight
            return
        on_cpu, dtype = weight.device.type == "cpu", computed or weight.dtype
        if native.multiplies(dtype, weight.device):
            self.product = Panels(native.pack(weight), bias, len(weight))
        elif dtype != weight.dtype:
            self.product = lambda x: _by_slices(x, weight, bias)
        elif on_cpu and weight.numel() > _SMALL and dtype in _PACKABLE and onednn_works(dtype):
            self.product = by_onednn(weight, bias)
        else:
            self.product = lambda x: F.linear(x, weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class Rows:
    """A weight matrix [out, in] that becomes a Linear, some rows at a time: where our own kernel serves, each
    goes to its place in the panels at once.

    Parameters
    ----------
    empty : makes an uninitialised tensor of the type that the matrix is kept in, on the engine's device
    computed : the type of what is multiplied by it
    """

    def __init__(
        self, outputs: int, inputs: int, empty: Callable[[int, int], torch.Tensor], computed: torch.dtype
    ) -> None:
        sample = empty(0, inputs)
        self._outputs, self._computed = outputs, computed
        self._in_panels = native.multiplies(computed, sample.device)
        if self._in_panels:
            self._values = native.empty_panels(outputs, inputs, sample.dtype)
        else:
            self._values = empty(outputs, inputs)

    def put(self, first: int, rows: torch.Tensor) -> None:
        """Take rows [n, in] of any floating-point type, from output `first` on."""
        if self._in_panels:
            native.pack_rows(self._values, first, rows)
        else:
            self._values[first : first + len(rows)].copy_(rows)

    def linear(self, bias: torch.Tensor | None) -> Linear:
        """The product, once all rows are there."""
        if not self._in_panels:
            return Linear(self._values, bias, self._computed)
        return Linear(Panels(self._values, bias, self._outputs))


class SideBySide(Linear):
    """Several products of the same x, their outputs one after the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.product = lambda x: torch.cat([part(x) for part in parts], dim=1)


class Panels:
    """By our own kernel, which `native.serves` must allow, from weights that `native.pack` has packed."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> None:
        self.outputs, self.packed = outputs, packed
        self.bias = None if bias is None else native.pack_bias(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return native.linear(x.contiguous(), self.packed, self.bias, self.outputs)

    @staticmethod
    def grouped(panels: Sequence[Panels]) -> native.Grouped | None:
        """One product for all, each with rows of its own; None: their types differ."""
        if len({each.packed.dtype for each in panels}) > 1:
            return None
        biases = [each.bias for each in panels if each.bias is not None]
        return native.Grouped([each.packed for each in panels], biases, panels[0].outputs)


def _by_slices(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product with a weight of another type, some of whose rows are in that of x at a time."""
    rows = max(1, _SLICE_VALUES // weight.shape[1])
    product = torch.cat([F.linear(x, part.to(x.dtype)) for part in weight.split(rows)], dim=1)
    return product if bias is None else product + bias


def by_onednn(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """By oneDNN, from its packed layout."""
    packed = pack_onednn(weight)
    return lambda x: linear_onednn(x, packed, bias)


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Whether this torch and processor multiply whole numbers by packed weights exactly and without error."""
    weight = (torch.arange(33 * 17) % 7 - 3).view(33, 17).to(dtype)
    x = (torch.arange(3 * 17) % 5 - 2).view(3, 17).to(dtype)
    bias = torch.arange(33).to(dtype)
    try:
        return torch.equal(by_onednn(weight, bias)(x), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError):
        return False

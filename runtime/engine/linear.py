"""Products with weight matrices: as F.linear gives them, from a copy laid out for the processor where
that is faster.

oneDNN's packed layout makes products on CPUs up to two and a half times as fast as the plain one in float32,
and up to 1.7 times in bfloat16 (AVX-512, one thread). A call costs some 10 us more, so small matrices stay
plain, and the first product of each shape and number of rows 1 ms more. torch's compiler uses it through
operators that are not public, so a small product is tried first: without them, or where they give something
else, F.linear stays.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

_PACKABLE = (torch.float32, torch.bfloat16)  # float16 needs instructions that few processors have
_SMALL = 1 << 16  # values; about here both take the same time for a few rows


class Linear:
    """x [n, in] -> x @ weight^T + bias [n, out]. Give up the plain weight for it: packing makes a copy.

    Parameters
    ----------
    weight : [out, in]
    bias : [out]
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        worth_it = weight.device.type == "cpu" and weight.numel() > _SMALL
        self._packed = worth_it and weight.dtype in _PACKABLE and _packing_works(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return _packed_product(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def _packing_works(dtype: torch.dtype) -> bool:
    """Whether this build and processor multiply whole numbers with packed weights, without an error."""
    weight = (torch.arange(33 * 17) % 7 - 3).view(33, 17).to(dtype)
    x = (torch.arange(3 * 17) % 5 - 2).view(3, 17).to(dtype)
    bias = torch.arange(33).to(dtype)
    try:
        return torch.equal(_packed_product(x, _pack(weight), bias), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError):
        return False

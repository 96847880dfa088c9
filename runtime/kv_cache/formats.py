"""How a pool of KV cache stores the values of a head: as they are, or packed into 8 bits.

A head's values of one token are packed by themselves, with their scale behind them. So KV caches move between
replicas of any shapes as bytes, and a token's values do not depend on what else is in the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from cost_model.errors import InputError
from runtime.options import PLAIN_KV

_LARGEST_FP8 = 448.0
_LARGEST_INT8 = 127.0


class KvFormat(ABC):
    """A format of KV caches. `runtime/native/kv_formats.h` has the same for compiled kernels.

    Attributes
    ----------
    name : as in the option --kv-cache-dtype and in messages
    kind : the number that the kernels know it by
    is_packed : whether it stores something else than the values that attention computes with
    """

    name: ClassVar[str]
    kind: ClassVar[int]
    is_packed: ClassVar[bool] = True

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of a pool's items, for values of this type."""
        return torch.uint8

    @abstractmethod
    def width(self, head_dim: int) -> int:
        """Number of a pool's items that hold one head of a token."""

    @abstractmethod
    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] -> [..., width]."""

    @abstractmethod
    def unpack(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[..., width] -> [..., head_dim] in this type, rounded once."""


class Plain(KvFormat):
    """The values as they are."""

    name, kind, is_packed = PLAIN_KV, 0, False

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def width(self, head_dim: int) -> int:
        return head_dim

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def unpack(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return stored


class Fp8(KvFormat):
    """E4M3 without scales, as vLLM's default. What is larger than its largest number, 448, becomes that."""

    name, kind = "fp8", 1

    def width(self, head_dim: int) -> int:
        return head_dim

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        limited = values.float().clamp(-_LARGEST_FP8, _LARGEST_FP8)
        return limited.to(torch.float8_e4m3fn).view(torch.uint8)

    def unpack(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return stored.view(torch.float8_e4m3fn).to(dtype)


class Int8(KvFormat):
    """Integers of 8 bits for each head of a token, and behind them their scale in float32: the largest
    magnitude divided by 127."""

    name, kind = "int8", 2

    def width(self, head_dim: int) -> int:
        return head_dim + torch.float32.itemsize

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        values = values.float()
        scales = values.abs().amax(-1, keepdim=True) / _LARGEST_INT8
        codes = torch.where(scales > 0, values / scales, 0.0).clamp_(-_LARGEST_INT8, _LARGEST_INT8).round_()
        return torch.cat([codes.to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], dim=-1)

    def unpack(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        head_dim = stored.shape[-1] - torch.float32.itemsize
        codes, scales = stored[..., :head_dim], stored[..., head_dim:].clone()
        return (codes.view(torch.int8).float() * scales.view(torch.float32)).to(dtype)


PLAIN = Plain()
KV_FORMATS: dict[str, KvFormat] = {each.name: each for each in (PLAIN, Fp8(), Int8())}


def kv_format(name: str) -> KvFormat:
    """The format of that name.

    Raises
    ------
    InputError : there is none
    """
    if name not in KV_FORMATS:
        raise InputError("--kv-cache-dtype", "", f"is {name[:60]!r}", f"use one of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]

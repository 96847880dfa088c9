"""Attention over a paged KV cache; `base.py` has the interface."""

from __future__ import annotations

from runtime.engine.torch.attention.base import Attention
from runtime.engine.torch.attention.cpu import CpuAttention
from runtime.engine.torch.attention.gpu import GpuAttention
from runtime.engine.torch.attention.sdpa import SdpaAttention
from runtime.kv_cache.pool import PagedCache

IMPLEMENTATIONS: tuple[type[Attention], ...] = (CpuAttention, GpuAttention, SdpaAttention)
"""Fastest first; the last one serves every cache."""


def make_attention(cache: PagedCache) -> Attention:
    """The fastest attention that serves this cache on this machine."""
    return next(each for each in IMPLEMENTATIONS if each.serves(cache.shape))(cache)

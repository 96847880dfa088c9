"""The parts of torch that this project uses although they are not public, behind functions of our own.

Tried: the oneDNN operators on torch 2.13 (CPU build); CUDA sharing on torch 2.11, on one card only, written
from torch 2.13's `torch.multiprocessing.reductions`. pyproject.toml admits torch 2.6 and later, so callers
treat an AttributeError or RuntimeError as "not available".
"""

from __future__ import annotations

from typing import Any

import torch


def pack_onednn(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] on a CPU in oneDNN's packed layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear_onednn(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] times a packed weight, plus a bias [out] -> [n, out]."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def share_cuda(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What another process of the host needs to map a tensor's GPU memory: numbers and bytes."""
    shared: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()
    return shared


def map_cuda(shared: tuple[Any, ...]) -> torch.UntypedStorage:
    """The memory that another process shared; RuntimeError, TypeError or ValueError if it can't be mapped."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(*shared)
    return storage

"""Memory for weights: mappings of their own, which get large pages while a worker serves."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

_MAPPED = 1 << 18  # values
_LARGE_PAGE = 2 << 20  # bytes
_AT_A_TIME = 8 * _LARGE_PAGE
_COLLAPSE = 25
"""MADV_COLLAPSE, for which Python has no name; kernels before 6.1 can't."""
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LEAST_URGENT = 19
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def mapped(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in CPU memory. A large one has its own memory mapping: it leaves no
    hole in the heap when it is freed."""
    count = math.prod(size)
    if count < _MAPPED:
        return torch.empty(tuple(size), dtype=dtype)
    # Room for the tensor to begin where a large page does.
    length = count * dtype.itemsize + _LARGE_PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _mappings.add(memory)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=-_address(memory) % _LARGE_PAGE).view(
        *size
    )


def use_large_pages() -> None:
    """Gather the pages of all tensors that are `mapped` into large ones, in a thread that lets others go
    first.

    A step reads all weights, and translating their addresses takes some of its time, most of all in virtual
    machines, which translate twice. A load does without large pages: where a hypervisor has taken free memory
    back, getting them takes several times as long as getting what other programs have just given up. Does
    nothing where the kernel has no large pages, or its administrator wants none; nor where they have other
    sizes: kernels for ARM with pages of 16 or 64 kB, which find their addresses faster anyway, make them of
    32 or 512 MB.
    """
    try:
        allowed = "[never]" not in _SETTING.read_text() and int(_SIZE.read_text()) == _LARGE_PAGE
    except OSError:
        return
    if allowed:
        threading.Thread(target=_gather_all, name="large pages", daemon=True).start()


def _gather_all() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)
    kernel = ctypes.CDLL(None, use_errno=True)
    for memory in list(_mappings):
        first = -(-_address(memory) // _LARGE_PAGE) * _LARGE_PAGE
        end = (_address(memory) + len(memory)) // _LARGE_PAGE * _LARGE_PAGE
        for start in range(first, end, _AT_A_TIME):
            part = ctypes.c_void_p(start), ctypes.c_size_t(min(_AT_A_TIME, end - start))
            # An older kernel gathers them by itself, more slowly.
            kernel.madvise(*part, mmap.MADV_HUGEPAGE)
            kernel.madvise(*part, _COLLAPSE)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

"""KV cache pools in memory that other processes of the host can map."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading

import numpy as np
import torch

from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.shared_memory import create_memory, open_memory

POPULATED_BYTES = 2**30
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux
_STEP_BYTES = 2**20


class SharedPool:
    """A KV cache pool in anonymous shared memory. A page takes memory once it is first written.

    Attributes
    ----------
    tensor : the pool, for `PagedCache`
    handle : what another process passes to `map_pool`
    """

    def __init__(self, shape: CacheShape, blocks: int, block_tokens: int) -> None:
        size = shape.pool_size(blocks * block_tokens)
        size_bytes = math.prod(size) * shape.stored_dtype.itemsize
        self._descriptor, self.handle = create_memory("kv", size_bytes)
        self._memory = mmap.mmap(self._descriptor, size_bytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(shape.stored_dtype).view(size)

    def populate(self, limit_bytes: int = POPULATED_BYTES) -> threading.Thread:
        """Have the kernel allocate the first pages of the pool, in a background thread. If requests are the
        first to write to them, allocation takes a tenth of a prefill's time."""
        thread = threading.Thread(
            target=_populate, args=(self.tensor, limit_bytes), name="kv pages", daemon=True
        )
        thread.start()
        return thread

    def close(self) -> None:
        """Prevent new mappings; the memory is freed with the last existing one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _populate(pool: torch.Tensor, limit_bytes: int) -> None:
    """Best effort: kernels before 5.14 can't do it."""
    advise = ctypes.CDLL(None).madvise
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for first in range(0, min(pool.nbytes, limit_bytes), _STEP_BYTES):
        count = min(_STEP_BYTES, pool.nbytes - first)
        if advise(ctypes.c_void_p(pool.data_ptr() + first), ctypes.c_size_t(count), _POPULATE_WRITE):
            return


def map_pool(handle: str, size_bytes: int) -> np.ndarray:
    """Map another process's pool, read-only: [bytes] uint8. Raises as `open_memory` does."""
    opened = open_memory(handle, size_bytes)
    try:
        memory = mmap.mmap(opened, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(opened)
    return np.frombuffer(memory, np.uint8)


def shared_cache(shape: CacheShape, blocks: int, block_tokens: int) -> tuple[PagedCache, SharedPool | None]:
    """A KV cache; if it is in CPU memory, in a pool that other processes of this host can map."""
    if shape.device.type != "cpu" or not shape.part.cells:
        return PagedCache(shape, blocks, block_tokens), None
    shared = SharedPool(shape, blocks, block_tokens)
    return PagedCache(shape, blocks, block_tokens, pool=shared.tensor), shared

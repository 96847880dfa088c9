"""Pools of KV cache in memory that other processes of the host may map."""

from __future__ import annotations

import math
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import torch

from runtime.engine.cache import CacheShape, PagedCache

_NAME = "hexgen2-kv-"


def host_identity() -> str:
    """Equal for processes that can open each other's memory: the same boot, process namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.geteuid()}"


class SharedPool:
    """A pool of KV cache in anonymous shared memory. Pages cost memory when they are first written.

    Attributes
    ----------
    tensor : the pool, for `PagedCache`
    handle : what `MappedPool` needs to find it
    """

    def __init__(self, shape: CacheShape, blocks: int, block_tokens: int) -> None:
        size = (shape.layers, 2, blocks * block_tokens, shape.heads, shape.head_dim)
        size_bytes = math.prod(size) * shape.dtype.itemsize
        name = _NAME + secrets.token_hex(8)
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        self._memory = mmap.mmap(descriptor, size_bytes)
        self._descriptor = descriptor
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(shape.dtype).view(size)
        self.handle = f"{os.getpid()}:{descriptor}:{name}"

    def close(self) -> None:
        """Let nobody new map it; the memory goes with the last view of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class MappedPool:
    """Another process's pool, to read only.

    Attributes
    ----------
    bytes : [layers, 2, slots, heads, bytes of a head], uint8

    Raises
    ------
    OSError : there is no such memory (any more), or not of this size
    """

    def __init__(self, handle: str, size: tuple[int, int, int, int, int]) -> None:
        process, descriptor, name = handle.split(":")
        path = f"/proc/{int(process)}/fd/{int(descriptor)}"
        size_bytes = math.prod(size)
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if f"memfd:{name} " not in os.readlink(f"/proc/self/fd/{opened}") + " ":
                raise OSError(f"{path} is not the memory {name}")
            if os.fstat(opened).st_size != size_bytes:
                raise OSError(f"{path} has {os.fstat(opened).st_size} bytes, not {size_bytes}")
            memory = mmap.mmap(opened, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self.bytes = np.frombuffer(memory, dtype=np.uint8).reshape(size)


def shared_cache(shape: CacheShape, blocks: int, block_tokens: int) -> tuple[PagedCache, SharedPool | None]:
    """A cache that processes of this host can read, if it is in CPU memory."""
    if shape.device.type != "cpu":
        return PagedCache(shape, blocks, block_tokens), None
    shared = SharedPool(shape, blocks, block_tokens)
    return PagedCache(shape, blocks, block_tokens, pool=shared.tensor), shared

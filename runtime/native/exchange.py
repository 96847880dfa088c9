"""Sums over the tensor-parallel ranks of one host, through memory that they share (exchange.cpp).

A sum of a few kilobytes takes microseconds, where one over sockets takes most of a millisecond; a step has
two in each layer. All ranks add in the same order, in float32, and so get the same bits.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

from runtime.native import library
from runtime.shared_memory import create_memory, open_memory

_PIECE_BYTES = 128 * 1024
"""Of a value that ranks exchange at a time: such buffers stay in their caches."""
_MISSING = 7


class Exchange:
    """A rank's access to the memory. All ranks make the same calls in the same order.

    Parameters
    ----------
    handle : from `memory_for`
    limit_s : seconds that a rank waits for another one that lives

    Raises
    ------
    OSError : the memory can't be opened here, or is another rank's by now
    """

    def __init__(self, handle: str, rank: int, ranks: int, limit_s: float) -> None:
        build = library.loaded()
        if build is None:
            raise OSError("there are no compiled kernels")
        size_bytes = _size_bytes(ranks)
        self._rank, self._ranks = rank, ranks
        self._descriptor = open_memory(handle, size_bytes, writable=True)
        self._memory = mmap.mmap(self._descriptor, size_bytes)
        at = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._state = np.array(
            [at, self._descriptor, rank, ranks, _PIECE_BYTES, int(limit_s), 0, 0], dtype=np.int64
        )
        self._address = self._state.ctypes.data
        if not build.attend_exchange(self._address):
            self.close()
            raise OSError(f"rank {rank} has this memory already")

    def close(self) -> None:
        """Leave; others that wait for this rank raise, and so do its further calls."""
        self._state[_MISSING] = 1 + self._rank
        self._memory.close()  # It has the file open, too, and so the lock on it.
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether such tensors can be summed and gathered."""
        return library.serves(tensor.dtype, tensor.device) and tensor.is_contiguous()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in its place."""
        kind = library.FLOATS[tensor.dtype]
        library.call("sum_over_ranks", self._address, tensor.data_ptr(), kind, tensor.numel())
        self.check()
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The columns of [n, columns] of all ranks beside each other on rank 0; None elsewhere."""
        rows, columns = tensor.shape
        output = library.empty((rows, self._ranks * columns), tensor.dtype) if self._rank == 0 else None
        library.call(
            "gather_columns",
            self._address,
            tensor.data_ptr(),
            rows,
            columns * tensor.itemsize,
            None if output is None else output.data_ptr(),
        )
        self.check()
        return output

    def check(self) -> None:
        """Raise RuntimeError if a rank was missing, also in a call that was repeated."""
        if missing := int(self._state[_MISSING]):
            raise RuntimeError(f"tensor-parallel rank {missing - 1} is lost or does not go on")


def memory_for(ranks: int) -> tuple[int, str]:
    """Memory for the exchange of so many ranks: its file descriptor, which may be closed once all ranks have
    opened it, and its handle. OSError if the host has none."""
    descriptor, handle = create_memory("ranks", _size_bytes(ranks))
    try:
        os.posix_fallocate(descriptor, 0, _size_bytes(ranks))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, handle


def _size_bytes(ranks: int) -> int:
    build = library.loaded()
    if build is None:
        raise OSError("there are no compiled kernels")
    return ranks * (build.turn_bytes() + 2 * _PIECE_BYTES)

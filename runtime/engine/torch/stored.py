"""The tensors of safetensors files, read in slices: each byte once, and a chunk ahead of its use."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cost_model.errors import InputError
from runtime import native

REMEDY = "download the checkpoint again"
CHUNK_BYTES = 2 << 20
"""Of a slice that are read at a time: the caches still hold them when they are used."""
_AHEAD = 2
_HEAD_BYTES = 8
_LARGEST_HEADER = 100_000_000
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""

Span = tuple[int, int]
"""A range [first, end)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is: its file and its first byte there, its type in safetensors' names, and its shape."""

    path: Path
    start: int
    type: str
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file.

    Raises
    ------
    InputError : the file is missing, truncated or damaged
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_HEAD_BYTES), "little")
            if not 0 < length <= min(size - _HEAD_BYTES, _LARGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        found = {
            name: _stored(path, entry, _HEAD_BYTES + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise InputError(str(path), "", f"is missing, truncated or damaged ({error})", REMEDY) from error
    return found


def _stored(path: Path, entry: dict, start: int, size: int) -> Stored:
    first, end = entry["data_offsets"]
    shape = tuple(int(length) for length in entry["shape"])
    kind = TYPES.get(entry["dtype"])
    if kind is not None and end - first != math.prod(shape) * kind.itemsize:
        raise ValueError("a tensor has not the bytes of its shape")
    if not (0 <= first <= end <= size - start and min(shape, default=0) >= 0):
        raise ValueError("a tensor is not within the file")
    return Stored(path, start + first, str(entry["dtype"]), shape)


class Reader:
    """Reads slices of tensors, of which a thread of its own reads the next chunks meanwhile."""

    def __init__(self) -> None:
        self.rest()

    def rest(self) -> None:
        """Free the buffers; the next read makes new ones."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * (_AHEAD + 2)
        self._turn = 0

    def whole(self, tensor: Stored, rows: Span | None = None, columns: Span | None = None) -> torch.Tensor:
        """A slice of a tensor; see `chunks`.

        Raises
        ------
        OSError : the file can't be read
        """
        pieces = _Pieces(tensor, rows, columns)
        found = native.mapped(pieces.shape(pieces.rows), TYPES[tensor.type])
        with pieces.path.open("rb") as file:
            pieces.read(file.fileno(), 0, pieces.rows, found)
        return found

    def chunks(
        self, tensor: Stored, rows: Span | None = None, columns: Span | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The slice [rows first:end, columns first:end] of a tensor, some rows at a time.

        Yields
        ------
        the number of the chunk's first row in the slice, and the rows in the type that they are stored in,
        valid until the next chunk

        Raises
        ------
        OSError : the file can't be read
        """
        pieces = _Pieces(tensor, rows, columns)
        step = max(1, CHUNK_BYTES // max(1, pieces.bytes))
        with pieces.path.open("rb") as file:
            if pieces.rows <= step:
                yield 0, self._fill(pieces, file.fileno(), 0, pieces.rows)
                return
            with suppress(OSError):
                pieces.announce(file.fileno())
            under_way, thread = list[tuple[int, Future[torch.Tensor]]](), ThreadPoolExecutor(1, "checkpoint")
            try:
                for first in range(0, pieces.rows, step):
                    count = min(step, pieces.rows - first)
                    reading = thread.submit(self._fill, pieces, file.fileno(), first, count)
                    under_way.append((first, reading))
                    if len(under_way) > _AHEAD:
                        start, done = under_way.pop(0)
                        yield start, done.result()
                for start, done in under_way:
                    yield start, done.result()
            finally:
                thread.shutdown(cancel_futures=True)

    def _fill(self, pieces: _Pieces, file: int, first: int, count: int) -> torch.Tensor:
        """Some rows, in the next buffer."""
        self._turn = (self._turn + 1) % len(self._buffers)
        size = count * pieces.bytes
        if size > len(self._buffers[self._turn]):
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8)
        chunk = self._buffers[self._turn][:size].view(pieces.type).view(pieces.shape(count))
        pieces.read(file, first, count, chunk)
        return chunk


class _Pieces:
    """A slice of a tensor as pieces of its file, one for each row.

    Attributes
    ----------
    rows : how many there are
    bytes : of each piece
    """

    def __init__(self, tensor: Stored, rows: Span | None, columns: Span | None) -> None:
        self.path, self.type = tensor.path, TYPES[tensor.type]
        whole = tensor.shape or (1,)
        self._is_scalar = not tensor.shape
        first, end = rows or (0, whole[0])
        left, right = columns or (0, whole[1] if len(whole) > 1 else 1)
        inner = math.prod(whole[2:]) * self.type.itemsize
        self.rows, self.bytes = end - first, (right - left) * inner
        self._step = math.prod(whole[1:]) * self.type.itemsize
        self._start = tensor.start + first * self._step + left * inner
        self._tail = (right - left, *whole[2:]) if len(whole) > 1 else ()

    def shape(self, count: int) -> tuple[int, ...]:
        """The shape of so many rows."""
        return () if self._is_scalar else (count, *self._tail)

    def read(self, file: int, first: int, count: int, into: torch.Tensor) -> None:
        """Read some rows of an open file."""
        if count * self.bytes:
            native.read_pieces(file, self._start + first * self._step, self._step, self.bytes, count, into)

    def announce(self, file: int) -> None:
        """Let the kernel read ahead further than usual."""
        os.posix_fadvise(file, self._start, self.rows * self._step, os.POSIX_FADV_SEQUENTIAL)

"""Calls of kernels that are kept with their arguments, to be made again all at once (replay.cpp).

What calls kernels from Python costs milliseconds in a step, which reads all weights and so finds Python's own
code and objects outside the caches each time. A step that makes the same calls as one before is replayed
instead, in one call: its inputs are where the other's were, and its results where the other wrote them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.native import library

_ALIGNED = 64  # bytes
_BLOCK_BYTES = 1 << 20
_PACKED = {"p": "q", "l": "q", "f": "d"}


class NotRepeatable(Exception):
    """What is recorded has computed by other means than kernels that can be repeated."""


class _Region:
    """Memory that is given from its begin on, again after each `clear`."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self.clear()

    def clear(self) -> None:
        self._block, self._at = 0, 0

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        length = dtype.itemsize * int(np.prod(size))
        while self._block < len(self._blocks) and self._at + length > len(self._blocks[self._block]):
            self._block, self._at = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(torch.from_numpy(np.empty(max(length, _BLOCK_BYTES), dtype=np.uint8)))
        start = self._at
        self._at += -(-length // _ALIGNED) * _ALIGNED
        return self._blocks[self._block][start : start + length].view(dtype).view(*size)


class Arena:
    """Memory for what recorded calls write, shared by recordings that are never under way together. What a
    layer of a model writes stays until the next layer is done."""

    def __init__(self) -> None:
        self._regions = _Region(), _Region()
        self._current = 0

    def begin(self) -> None:
        for region in self._regions:
            region.clear()

    def turn(self) -> None:
        """A layer is done."""
        self._current = 1 - self._current
        self._regions[self._current].clear()

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._regions[self._current].empty(size, dtype)


class Recording:
    """Records the calls that this thread makes while it is entered.

    Raises
    ------
    NotRepeatable : at the first operator of torch that computes something
    """

    def __init__(self, arena: Arena) -> None:
        self._arena, self._guard = arena, _OnlyViews()
        self._parts = list[Callable[[], object]]()
        self._calls = list[tuple[int, bytes]]()
        self._kept = list[object]()

    def __enter__(self) -> Recording:
        self._arena.begin()
        self._guard.__enter__()
        library.here.recorder = self
        return self

    def __exit__(self, *failure: Any) -> None:
        library.here.recorder = None
        self._guard.__exit__(*failure)

    def turn(self) -> None:
        """A layer is done; see Arena."""
        self._arena.turn()

    def note(self, name: str, signature: str, arguments: Sequence[float | None]) -> None:
        build = library.loaded()
        repeat = None if build is None else build.find_repeat(name.encode())
        if repeat is None:
            raise NotRepeatable(name)
        form = "=" + "".join(_PACKED[letter] for letter in signature)
        self._calls.append((repeat, struct.pack(form, *(argument or 0 for argument in arguments))))

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.empty(size, dtype)

    def keep(self, kept: object) -> None:
        self._kept.append(kept)

    def apart(self, compute: Callable[[torch.Tensor], library.Found], x: torch.Tensor) -> library.Found:
        """compute(x), where it is found by what is recorded next."""
        self.__exit__(None, None, None)
        try:
            output = found = compute(x)
            if found is not None and found is not x:
                output = self._arena.empty(found.shape, found.dtype).copy_(found)
        finally:
            self._guard.__enter__()
            library.here.recorder = self
        self._end_calls()

        def again() -> None:
            found = compute(x)
            if output is not None and found is not None and found is not x:
                output.copy_(found)

        self._parts.append(again)
        return output

    def replay(self) -> Replay:
        """What makes the calls again."""
        self._end_calls()
        return Replay(self._parts, self._kept)

    def _end_calls(self) -> None:
        if self._calls:
            self._parts.append(_Calls(self._calls))
            self._calls = []


class Replay:
    """Makes recorded calls again, in their order.

    Parameters
    ----------
    parts : calls of kernels, and what is computed apart from them
    kept : what must live as long as this
    """

    def __init__(self, parts: Sequence[Callable[[], object]], kept: Sequence[object]) -> None:
        self._parts, self._kept = parts, kept

    def __call__(self) -> None:
        for part in self._parts:
            part()


class _Calls:
    """Calls of kernels, one after the other.

    Parameters
    ----------
    calls : what repeats each, and its arguments, 8 bytes each
    """

    def __init__(self, calls: Sequence[tuple[int, bytes]]) -> None:
        self._arguments = np.frombuffer(b"".join(arguments for _, arguments in calls), dtype=np.uint8).copy()
        table, at = np.empty((len(calls), 2), dtype=np.uint64), self._arguments.ctypes.data
        for line, (repeat, arguments) in zip(table, calls, strict=True):
            line[:] = repeat, at
            at += len(arguments)
        self._table, self._address = table, table.ctypes.data

    def __call__(self) -> None:
        library.call("replay", self._address, len(self._table))


class _OnlyViews(TorchDispatchMode):
    """Refuses operators that compute or write."""


def _only_views(
    _: TorchDispatchMode,
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    results = [each.alias_info for each in func._schema.returns]
    if any(alias is None or alias.is_write for alias in results):
        raise NotRepeatable(str(func))
    return func(*args, **(kwargs or {}))


# What a class of modes defines itself is wrapped by torch, which then imports its compiler: two seconds, and
# 900 modules in each worker.
_OnlyViews.__torch_dispatch__ = _only_views  # type: ignore[assignment]

"""Passes calls between the asyncio thread and the trio thread, in batches: one wake-up for many calls."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

log = logging.getLogger(__name__)


class _Handover:
    """Queues calls from one thread to make them in another, in order; `wake` runs a function there."""

    def __init__(self, wake: Callable[[Callable[[], None]], object]) -> None:
        self._wake, self._woken = wake, False
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        self._calls.append((function, arguments))
        if not self._woken:
            self._woken = True
            try:
                self._wake(self._make_calls)
            except RuntimeError:  # the other thread's loop has ended
                self._calls.clear()

    def _make_calls(self) -> None:
        self._woken = False  # before the calls, so that one added meanwhile wakes this thread again
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception:
                log.exception("a call across threads failed")


class Bridge:
    """Connects the trio thread, in which it is created, with an asyncio loop in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.to_asyncio = _Handover(loop.call_soon_threadsafe).add
        self.to_trio = _Handover(trio.lowlevel.current_trio_token().run_sync_soon).add

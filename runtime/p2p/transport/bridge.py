"""Between the thread of asyncio and that of trio: calls are handed over in batches, one wake-up for many."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

log = logging.getLogger(__name__)


class _Handover:
    """Calls from one thread, made in order in another; `wake` arranges that `make_calls` runs there soon."""

    def __init__(self, wake: Callable[[Callable[[], None]], object]) -> None:
        self._wake, self._woken = wake, False
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def add(self, function: Callable[..., object], *arguments: Any) -> None:
        self._calls.append((function, arguments))
        if not self._woken:
            self._woken = True
            try:
                self._wake(self._make_calls)
            except RuntimeError:  # the other thread's loop has ended: nobody is left to tell
                self._calls.clear()

    def _make_calls(self) -> None:
        self._woken = False  # first, so that a call added from here on wakes this again
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception:
                log.exception("a call across threads failed")


class Bridge:
    """Made in trio's thread, for the asyncio loop of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.to_asyncio = _Handover(loop.call_soon_threadsafe).add
        self.to_trio = _Handover(trio.lowlevel.current_trio_token().run_sync_soon).add

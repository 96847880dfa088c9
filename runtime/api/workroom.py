"""Runs work that may take long on a thread instead of the event loop, one piece at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workroom:
    """A worker thread beside the event loop. The smallest piece of work runs first, so that a small request
    waits for at most one large one.

    Parameters
    ----------
    at_once : work up to this size runs directly on the event loop, as switching threads would take longer
    """

    def __init__(self, name: str, at_once: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._at_once, self._numbers = at_once, itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._busy = False

    async def do(self, size: int, work: Callable[[], Result]) -> Result:
        """Run some work whose time grows with its size, and return the result."""
        if size <= self._at_once:
            return work()
        loop = asyncio.get_running_loop()
        await self._turn(size, loop)
        done = loop.run_in_executor(self._thread, work)
        done.add_done_callback(self._over)  # a thread cannot be stopped: the next piece waits for it
        return await asyncio.shield(done)

    async def _turn(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the thread is free and no smaller work, or earlier work of the same size, is waiting."""
        if not self._busy:
            self._busy = True
            return
        mine: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._next()
            raise

    def _over(self, done: asyncio.Future[Any]) -> None:
        done.exception()  # marks the exception as retrieved if the caller has gone
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn: Any = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

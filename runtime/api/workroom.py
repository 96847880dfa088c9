"""Work on what clients send that may take long: off the event loop, one piece at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workroom:
    """A thread beside the event loop. The smallest piece of work comes first, so that nobody's small request
    waits for more than one large one.

    Parameters
    ----------
    at_once : work of this size at most is done where it is asked for: a thread would take longer
    """

    def __init__(self, name: str, at_once: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._at_once, self._numbers = at_once, itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._busy = False

    async def do(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of some work, whose time grows with its size."""
        if size <= self._at_once:
            return work()
        loop = asyncio.get_running_loop()
        await self._turn(size, loop)
        done = loop.run_in_executor(self._thread, work)
        done.add_done_callback(self._over)  # a thread cannot be stopped: the next piece waits for it
        return await asyncio.shield(done)

    async def _turn(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until nothing smaller, or earlier of the same size, waits, and nothing is being done."""
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
        done.exception()  # nobody else looks at it if who asked has gone
        self._next()

    def _next(self) -> None:
        while self._waiting:
            turn: Any = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

"""Finding workers that live but do not answer: stopped, or stuck where no closed socket shows it."""

from __future__ import annotations

import asyncio

from runtime.launcher.link import Link
from runtime.messages import Ping

PING_EVERY_S = 0.6
MISSES = 4  # so a worker that stops is found within 3 s


async def silence(link: Link, every_s: float = PING_EVERY_S) -> None:
    """Return once the worker at the other end has let MISSES pings in a row go unanswered.

    Any message counts as an answer. Time is counted in pings: an event loop that was held up for long
    misses one, not many.
    """
    missed = 0
    await asyncio.sleep(every_s)
    while missed < MISSES:
        heard = link.heard
        link.send(Ping())
        await asyncio.sleep(every_s)
        missed = missed + 1 if link.heard == heard else 0

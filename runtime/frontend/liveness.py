"""Finding workers that live but do not answer: stopped, or stuck where no closed socket shows it."""

from __future__ import annotations

import asyncio

from runtime.launcher.worker_link import WorkerLink
from runtime.liveness import LOOKS_A_PERIOD, PING_EVERY_S, SilenceTimer
from runtime.protocol.to_workers import Ping


async def silence(link: WorkerLink, every_s: float = PING_EVERY_S) -> None:
    """Ping the worker at the other end; return once it has been silent for too long (see SilenceTimer).

    Any message counts as an answer.
    """
    timer = SilenceTimer()
    await asyncio.sleep(every_s)
    while True:
        link.send(Ping())
        for _ in range(LOOKS_A_PERIOD):
            if timer.has_expired(link.heard):
                return
            await asyncio.sleep(every_s / LOOKS_A_PERIOD)

"""The tasks that read the messages of each worker and notice when it falls silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from runtime.frontend.replica import Replica
from runtime.launcher.worker_link import WorkerLink
from runtime.liveness import LOOKS_A_PERIOD, PING_EVERY_S, SilenceTimer
from runtime.protocol.from_workers import Failed
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Ping

log = logging.getLogger(__name__)


class Listeners:
    """Reads and watches the links of each replica while it serves.

    Parameters
    ----------
    handle : called with every message of a replica's workers except Failed
    lost : called with a replica one of whose workers is gone, failed or silent, and the reason
    lost_attention_worker : called with a replica, which of its attention workers is gone, and the reason
    ping_every_s : interval at which each worker is pinged
    """

    def __init__(
        self,
        handle: Callable[[Replica, Message], None],
        lost: Callable[[Replica, str], None],
        lost_attention_worker: Callable[[Replica, str, str], None],
        ping_every_s: float = PING_EVERY_S,
    ) -> None:
        self._handle, self._ping_every_s = handle, ping_every_s
        self._lost, self._lost_attention_worker = lost, lost_attention_worker
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._of_attention_workers: dict[str, dict[str, list[asyncio.Task[None]]]] = {}

    def listen(self, replica: Replica) -> None:
        """Start reading and watching the links of a replica, and of its attention workers."""
        tasks = self._tasks[replica.replica_id] = list[asyncio.Task[None]]()
        for worker, link in replica.links.items():
            tasks += self._hear(replica, worker, link, partial(self._lost, replica))
        if replica.attention_workers is not None:
            for worker in replica.attention_workers.links.keys() - replica.attention_workers.away:
                self.listen_to(replica, worker)

    def listen_to(self, replica: Replica, attention_worker: str) -> None:
        """Start reading and watching an attention worker of a replica that is listened to."""
        assert replica.attention_workers is not None
        link = replica.attention_workers.links[attention_worker]
        lost = partial(self._lost_attention_worker, replica, attention_worker)
        tasks = self._hear(replica, attention_worker, link, lost)
        self._of_attention_workers.setdefault(replica.replica_id, {})[attention_worker] = tasks

    def leave_attention_worker(self, replica_id: str, attention_worker: str) -> None:
        """Stop listening to an attention worker; may be called while one of its messages is handled."""
        _cancel(self._of_attention_workers.get(replica_id, {}).pop(attention_worker, []))

    def _hear(
        self, replica: Replica, worker: str, link: WorkerLink, lost: Callable[[str], None]
    ) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._read(replica, worker, link, lost)),
            asyncio.create_task(self._watch(worker, link, lost)),
        ]

    def leave(self, replica_id: str) -> None:
        """Stop listening to a replica; may be called while one of its messages is handled."""
        _cancel(self._pop(replica_id))

    async def hand_over(self, replica_id: str) -> None:
        """Stop listening to a replica; then others may read its links."""
        tasks = self._pop(replica_id)
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Stop listening to all replicas."""
        tasks = [task for replica_id in list(self._tasks) for task in self._pop(replica_id)]
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _pop(self, replica_id: str) -> list[asyncio.Task[None]]:
        """The tasks of a replica and its attention workers, which are forgotten."""
        tasks = self._tasks.pop(replica_id, [])
        for others in self._of_attention_workers.pop(replica_id, {}).values():
            tasks += others
        return tasks

    async def _read(
        self, replica: Replica, worker: str, link: WorkerLink, lost: Callable[[str], None]
    ) -> None:
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, Failed):
                    return lost(f"worker {worker} failed: {message.text}")
                self._handle(replica, message)
        except Exception as error:  # whatever it is, no request may wait for this replica any more
            log.exception("worker %s sent what could not be handled", worker)
            return lost(f"worker {worker}: {error}")
        lost(f"worker {worker} ended")

    async def _watch(self, worker: str, link: WorkerLink, lost: Callable[[str], None]) -> None:
        await until_silent(link, self._ping_every_s)
        lost(f"worker {worker} does not answer")


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task is not asyncio.current_task():
            task.cancel()


async def until_silent(link: WorkerLink, every_s: float = PING_EVERY_S) -> None:
    """Ping the worker at the other end; return once it has been silent for too long (see SilenceTimer).

    Any message counts as an answer. This finds workers that live but are stopped or stuck, where no closed
    socket shows it.
    """
    timer = SilenceTimer()
    await asyncio.sleep(every_s)
    while True:
        link.send(Ping())
        for _ in range(LOOKS_A_PERIOD):
            if timer.has_expired(link.heard):
                return
            await asyncio.sleep(every_s / LOOKS_A_PERIOD)

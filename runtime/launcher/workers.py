"""The base of the local, p2p and Ray launchers: the start sequence and changes of workers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from cost_model.errors import HexGen2Error
from runtime.launcher.base import Launcher
from runtime.launcher.startup import bring_to_ready, connect_message, until_ready
from runtime.launcher.worker_link import WorkerLink
from runtime.protocol.from_workers import Listening
from runtime.protocol.to_workers import Configure

START_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 30.0


class WorkersLauncher(Launcher):
    """Brings workers to Ready, ends them, and tells the remaining ones where the others listen.

    Subclasses say how processes are started (`_connect`) and ended (`_end`, `_until_ended`).
    """

    can_change = True

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._links: dict[str, WorkerLink] = {}
        self._configurations: dict[str, Configure] = {}
        self._listening: dict[str, Listening] = {}
        self._ready: set[str] = set()

    async def restart(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        return await self.change(workers, {each: self._configurations[each] for each in workers}, report)

    async def change(
        self, ended: Sequence[str], started: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        self._forget(ended)
        await self._until_ended(ended)
        for worker in ended:
            self._configurations.pop(worker, None)
        self._configurations |= started
        links: dict[str, WorkerLink] = {}
        try:
            if started:
                links = await self._start(list(started), report)
        except BaseException:
            self._forget(list(started))
            raise
        self._introduce()
        return links

    async def turn(self, roles: Mapping[str, Configure]) -> dict[str, WorkerLink]:
        if not self._ready.issuperset(roles):
            raise HexGen2Error("some of the workers have ended")
        links = {worker: self._links[worker] for worker in roles}
        for worker, role in roles.items():
            self._configurations[worker] = self._configurations[worker].turned(role)
            links[worker].send(self._configurations[worker])
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await until_ready(links)
        except TimeoutError:
            raise HexGen2Error(f"the workers were not ready after {TURN_TIMEOUT_S:.0f} s") from None
        self._introduce()
        return links

    def _introduce(self) -> None:
        """Tell all ready workers where the others listen and which replicas they form.

        New workers get this too, because workers that started at the same time may have begun to listen only
        now. Workers that are still starting do not: they would take it for their first Connect, with outdated
        addresses.
        """
        for worker in self._ready:
            self._links[worker].send(connect_message(self._configurations, self._listening, worker))

    async def _start(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        """Start configured workers and wait until they are ready."""
        report(f"starting {len(workers)} workers")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._connect(workers)
                links = {worker: self._links[worker] for worker in workers}
                await bring_to_ready(links, self._configurations, self._listening, report)
        except TimeoutError:
            raise HexGen2Error(f"the workers were not ready after {self._start_timeout_s:.0f} s") from None
        self._ready.update(workers)
        return links

    def _forget(self, workers: Sequence[str]) -> None:
        """End some workers and drop their addresses."""
        self._ready.difference_update(workers)
        for worker in workers:
            self._listening.pop(worker, None)
        self._end(workers)

    @abstractmethod
    async def _connect(self, workers: Sequence[str]) -> None:
        """Start the processes of some workers.

        Put links into `_links` as soon as they exist, and what only the workers' machine knows, such as its
        address, into `_configurations`.

        Raises
        ------
        HexGen2Error : the processes cannot be started
        """

    @abstractmethod
    def _end(self, workers: Sequence[str]) -> None:
        """Kill some workers, even stopped or half-started ones, and close their links.

        The workers may have ended already.
        """

    async def _until_ended(self, workers: Sequence[str]) -> None:
        """Wait, within a time limit, until these workers have ended and their devices are free."""
        return None

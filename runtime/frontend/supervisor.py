"""Restarts the workers of lost replicas, with growing delays if they keep dying."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from cost_model.errors import HexGen2Error
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica
from runtime.launcher.base import Launcher
from runtime.launcher.worker_link import WorkerLink
from runtime.routing.replica_state import ReplicaEvent, ReplicaState

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
STEADY_S = 60.0
"""After serving this long, a replica has overcome the cause of its earlier deaths."""
HOUR_S = 3600.0
ROWS_PER_HOUR = 3
"""Most restarts within an hour, as a multiple of the limit in a row, however long it serves in between."""


@dataclass(slots=True)
class _History:
    in_a_row: int = 0
    up_since_s: float = 0.0
    starts_s: deque[float] = field(default_factory=deque)

    def within_an_hour(self, now_s: float) -> int:
        """Restarts in the last hour."""
        while self.starts_s and now_s - self.starts_s[0] > HOUR_S:
            self.starts_s.popleft()
        return len(self.starts_s)


class Supervisor:
    """Restarts the replicas that the coordinator has lost.

    Parameters
    ----------
    limit : most restarts in a row, each followed by a death within STEADY_S, before a replica stays lost; it
        also stays lost after ROWS_PER_HOUR times this limit within an hour
    report : prints a line for the operator
    now_s : the clock
    """

    def __init__(
        self,
        coordinator: Coordinator,
        launcher: Launcher,
        limit: int,
        report: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator, self._launcher, self._limit, self._report = coordinator, launcher, limit, report
        self._stays_lost: Callable[[Replica], None] = lambda _: None
        self._now_s = now_s
        self._histories: dict[str, _History] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def staying_lost(self) -> Collection[str]:
        """Lost replicas that are not restarted, or only once their machine is back."""
        return self._coordinator.states.which_are(ReplicaState.LOST, ReplicaState.AWAY)

    def on_stays_lost(self, call: Callable[[Replica], None]) -> None:
        """Call a function with each replica that is not restarted, or only once its machine is back."""
        self._stays_lost = call

    def lost(self, replica: Replica) -> bool:
        """Start to restart a lost replica; returns whether it is being restarted."""
        if self._coordinator.states[replica.replica_id] in (ReplicaState.OUTGOING, ReplicaState.LEAVING):
            return False
        if self._limit and replica.links:
            self._tasks[replica.replica_id] = asyncio.create_task(self._bring_back(replica))
            return True
        self._stays_lost(replica)
        return False

    def lost_attention_worker(self, replica: Replica, worker: str) -> bool:
        """Start to restart a lost attention worker; returns whether it is being restarted."""
        if not self._limit:
            self._report(f"attention worker {worker} stays lost")
            return False
        self._tasks[worker] = asyncio.create_task(self._bring_back_attention_worker(replica, worker))
        return True

    async def leave_alone(self, names: Collection[str]) -> list[str]:
        """Do not restart some replicas until `resume`; returns those whose restart was cancelled by this."""
        for name in names:
            self._coordinator.states.on(ReplicaEvent.LEAVE_ALONE, name)
        return await self._cancel(names)

    async def _cancel(self, names: Collection[str]) -> list[str]:
        """Cancel restarts; returns the replicas for which one was in progress."""
        under_way = [name for name in names if name in self._tasks and not self._tasks[name].done()]
        tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return under_way

    def resume(self, names: Collection[str]) -> None:
        """Restart lost replicas that were left alone."""
        for name in names:
            self._coordinator.states.on(ReplicaEvent.RESUME, name)
            self._tasks[name] = asyncio.create_task(self._bring_back(self._coordinator.replicas[name]))

    def forgive(self, names: Collection[str]) -> None:
        """Forget the deaths of some replicas: a request caused them, and it is not resumed again."""
        for name in names:
            if history := self._histories.get(name):
                history.in_a_row = 0
                history.starts_s.clear()

    def forget(self, name: str) -> None:
        """Forget the deaths of an earlier replica that had the same name as a new one."""
        self._histories.pop(name, None)

    async def stop(self) -> None:
        """Cancel every restart."""
        await self._cancel(list(self._tasks))

    async def _bring_back(self, replica: Replica) -> None:
        name = replica.replica_id
        links = await self._started_again(
            name, f"replica {name}", list(replica.links), partial(self._until_reachable, replica)
        )
        if links is not None:
            self._coordinator.revive(name, links)
            self._report(f"replica {name} serves again")
            return
        self._coordinator.revive_no_more(name)
        self._stays_lost(replica)

    async def _bring_back_attention_worker(self, replica: Replica, worker: str) -> None:
        links = await self._started_again(worker, f"attention worker {worker}", [worker])
        if links is not None:
            self._coordinator.revive_attention_worker(replica.replica_id, worker, links[worker])
            self._report(f"attention worker {worker} serves again")
        else:
            self._coordinator.give_up_attention_worker(replica.replica_id, worker)

    async def _started_again(
        self,
        name: str,
        what: str,
        workers: Sequence[str],
        until_reachable: Callable[[], Awaitable[None]] | None = None,
    ) -> dict[str, WorkerLink] | None:
        """Restart workers until that works; None if they have died too often.

        Parameters
        ----------
        name, what : under which their deaths are counted, and what messages call them
        until_reachable : waits for their machine
        """
        history = self._histories.setdefault(name, _History())
        if self._now_s() - history.up_since_s > STEADY_S:
            history.in_a_row = 0
        while not (why_not := self._verdict(history)):
            await asyncio.sleep(min(FIRST_WAIT_S * 2**history.in_a_row, LONGEST_WAIT_S))
            if until_reachable is not None:
                await until_reachable()
            history.in_a_row += 1
            history.starts_s.append(self._now_s())
            log.warning("restarting %s, attempt %d in a row", what, history.in_a_row)
            try:
                links = await self._launcher.restart(workers, log.info)
            except (HexGen2Error, OSError) as error:
                self._report(f"{what} did not start again: {error}")
                continue
            history.up_since_s = self._now_s()
            return links
        self._report(f"{what} stays lost: it died {why_not}")
        return None

    async def _until_reachable(self, replica: Replica) -> None:
        """Wait for a machine that is gone; this does not count as a restart, and a re-plan may replace the
        replica."""
        workers = list(replica.links)
        if gone := self._launcher.unreachable(workers):
            self._report(f"replica {replica.replica_id} waits for {', '.join(gone)}")
            self._coordinator.states.on(ReplicaEvent.MACHINE_GONE, replica.replica_id)
            self._stays_lost(replica)
            await self._launcher.until_reachable(workers)
            self._coordinator.states.on(ReplicaEvent.MACHINE_BACK, replica.replica_id)

    def _verdict(self, history: _History) -> str:
        """Why a replica is not restarted; "" if it is."""
        if history.in_a_row >= self._limit:
            return f"{history.in_a_row} times in a row"
        if (starts := history.within_an_hour(self._now_s())) >= self._limit * ROWS_PER_HOUR:
            return f"{starts} times within an hour"
        return ""

"""Another placement while the fleet serves: searched beside it, taken up wave by wave.

Lost are the GPUs of machines that are gone and, for each replica that stays lost though its machines are
there, all its GPUs. Those of a machine that comes back are in use again from the next new placement on. The
search is a process of its own, as on the command line; replicas that the new placement has too go on
untouched. The others take no new requests once their wave comes (rollout.py), and finish what they have or
hand it on. One whose stages stay the same then turns: its workers keep their weights and take the new role
and engine settings. The others end, and those that take their GPUs start, with weights from the checkpoint.
If there is no new placement, the fleet goes on as it is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from cost_model.errors import HexGen2Error
from hexgen2.checks import verify
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Replica
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica as ServedReplica
from runtime.frontend.rollout import Wave, waves
from runtime.frontend.supervisor import Supervisor
from runtime.launcher.base import Launcher
from runtime.protocol.to_workers import Configure
from runtime.routing.reflow import Reflow

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""How long a replica that leaves may take to finish its requests; then they are resumed elsewhere."""
SEARCH_LIMIT_S = 60.0
ATTEMPTS = 2
SEARCH = "import os; os.nice(10); from hexgen2.cli import main; main()"

Configured = Callable[[Placement], tuple[dict[str, Configure], dict[str, ServedReplica]]]


class Replanner:
    """Searches for another placement after losses or on request, and switches to it.

    Parameters
    ----------
    configured : from a placement to the configurations of its workers, and its replicas without links
    after_s : how long to wait for further losses first
    report : prints a line for the operator
    taken_up : called once a new placement serves
    """

    def __init__(
        self,
        placement: Placement,
        coordinator: Coordinator,
        launcher: Launcher,
        supervisor: Supervisor,
        configured: Configured,
        after_s: float,
        report: Callable[[str], None],
        taken_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._placement, self._coordinator = placement, coordinator
        self._launcher, self._supervisor, self._configured = launcher, supervisor, configured
        self._after_s, self._report, self._taken_up = after_s, report, taken_up
        self._asked, self._at_once = asyncio.Event(), asyncio.Event()
        self._gpus = Cluster.from_spec(placement.cluster).gpu_ids
        self._away = set[str]()  # of the placement's lost GPUs those whose machine was gone
        self._fruitless = list[str]()  # lost GPUs without which there is no placement
        self.busy = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start waiting for losses."""
        self._task = asyncio.create_task(self._run())

    def stays_lost(self, _: ServedReplica) -> None:
        """Plan around a replica that is not restarted, or only once its machine is back."""
        self._asked.set()

    def ask(self) -> bool:
        """Re-plan now without what is lost, even if that is being started again, and with what is back; False
        if there is nothing of either, or it is being done."""
        if self.busy or not (self._coordinator.lost or self._back()):
            return False
        self._at_once.set()
        self._asked.set()
        return True

    def _back(self) -> list[str]:
        """Lost GPUs whose machine has returned."""
        return sorted(self._away.difference(self._launcher.unreachable(self._gpus)))

    async def stop(self) -> None:
        """Stop, and leave the fleet as it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._asked.wait()
            try:
                async with asyncio.timeout(self._after_s):
                    await self._at_once.wait()
            except TimeoutError:
                pass
            self.busy, at_once = True, self._at_once.is_set()
            self._asked.clear()
            self._at_once.clear()
            try:
                await self._replan(at_once)
            except Exception as error:
                log.exception("re-planning failed")
                self._report(f"re-planning failed: {error}; the fleet goes on as it is")
            finally:
                self.busy = False

    async def _replan(self, at_once: bool) -> None:
        before, back = self._placement, self._back()
        dead = list(self._coordinator.lost) if at_once else sorted(self._supervisor.staying_lost)
        away = set(self._launcher.unreachable(self._gpus)).difference(before.lost)
        unusable = away | broken((before.replica(name) for name in dead), away)
        lost = [gpu for gpu in self._gpus if gpu in unusable]
        if not (dead or (at_once and back)):
            return
        if not at_once and lost == self._fruitless and not back:
            return
        given_up = await self._supervisor.leave_alone(dead)
        changes = [f"without {', '.join(lost)}"] * bool(lost) + [f"with {', '.join(back)}"] * bool(back)
        self._report(f"re-planning {' and '.join(changes)}")
        try:
            found = await self._search(lost, back)
        except Exception as error:
            self._supervisor.resume(given_up)
            if not isinstance(error, HexGen2Error):
                raise
            self._fruitless = lost
            self._report(f"no new placement: {error}; the fleet goes on as it is")
            return
        self._away = (self._away | away).difference(back)
        self._fruitless = []
        await self._take_up(found)

    async def _search(self, lost: Sequence[str], back: Sequence[str]) -> Placement:
        with tempfile.TemporaryDirectory(prefix="hexgen2-replan-") as folder:
            before, after = Path(folder) / "before.json", Path(folder) / "after.json"
            self._placement.save(before)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", SEARCH, "search", "--from", str(before)),
                *("--lost", ",".join(lost), "--added", ",".join(back)),
                *("--time-limit", f"{SEARCH_LIMIT_S:g}", "-o", str(after)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                _, said = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if process.returncode:
                lines = said.decode(errors="replace").strip().splitlines()
                raise HexGen2Error(lines[-1] if lines else f"the search ended with {process.returncode}")
            placement = Placement.load(after)
            verify(placement, "the new placement")
            return placement

    # -- the change

    async def _take_up(self, found: Placement) -> None:
        coordinator, before = self._coordinator, self._placement
        await self._supervisor.leave_alone(coordinator.lost)
        dead = list(coordinator.lost)
        alive = {replica.id: replica for replica in before.replicas if replica.id not in dead}
        after = renamed(found, alive)
        worker_configs, replicas = self._configured(after)
        staying = {replica.id for replica in after.replicas} & alive.keys()
        leaving = {name: replica for name, replica in alive.items() if name not in staying}
        coming = {replica.id: replica for replica in after.replicas if replica.id not in staying}
        turns = turning(coming, leaving)
        counts = len(staying), len(turns), len(leaving) - len(turns), len(coming) - len(turns)
        self._report("new placement: {} stay, {} turn, {} leave, {} start".format(*counts))
        await self._supervisor.leave_alone(leaving)
        ended = [gpu for name in dead for gpu in before.replica(name).gpus]
        both = after.model_copy(update={"replicas": [*after.replicas, *leaving.values()]})
        coordinator.change(Reflow(both), {name: replicas[name] for name in coming}, dead)
        self._placement = after
        await self._launcher.change(ended, {}, log.info)
        roles = {name: replica.role for name, replica in (alive | coming).items()}
        for wave in waves(staying, leaving, _blockers(coming, leaving), roles):
            await self._advance(wave, coming, worker_configs, turns)
        known = {replica.id for replica in after.replicas}
        coordinator.change(Reflow(after), {}, [name for name in coordinator.lost if name not in known])
        self._taken_up()
        self._report("the new placement serves")

    async def _advance(
        self,
        wave: Wave,
        coming: Mapping[str, Replica],
        worker_configs: Mapping[str, Configure],
        turns: Mapping[str, str],
    ) -> None:
        coordinator = self._coordinator
        coordinator.retire(wave.leave)
        own = {name: turns[name] for name in wave.start if name in turns}
        leave = wave.leave - set(own.values())
        turned, _ = await asyncio.gather(
            asyncio.gather(*(self._turn(coming[name], own[name], worker_configs) for name in own)),
            asyncio.gather(*(self._empty(name) for name in leave)),
        )
        ended = list[str]()
        for name in leave:
            ended += coordinator.replicas[name].links
            coordinator.leave(name)
        if ended:
            await self._launcher.change(ended, {}, log.info)
            self._report(f"{', '.join(sorted(leave))} ended")
        again = [name for name, done in zip(own, turned, strict=True) if not done]
        starts = [*(name for name in wave.start if name not in own), *again]
        await asyncio.gather(*(self._start(coming[name], worker_configs, name in again) for name in starts))

    async def _turn(self, replica: Replica, before: str, worker_configs: Mapping[str, Configure]) -> bool:
        """Once the replica `before` is empty, let its workers take the role of a new one; False if they are
        to be ended and started anew, because one of them was lost or failed to do so."""
        await self._empty(before)
        is_lost = before in self._coordinator.lost
        await self._coordinator.hand_over(before)
        if is_lost:
            return False
        try:
            links = await self._launcher.turn({gpu: worker_configs[gpu] for gpu in replica.gpus})
        except (HexGen2Error, OSError) as error:
            self._report(f"replica {before} did not turn into {replica.id}, which starts anew: {error}")
            return False
        self._supervisor.forget(replica.id)
        self._coordinator.join(replica.id, links)
        self._report(f"replica {replica.id} serves, with the workers and weights of {before}")
        return True

    async def _empty(self, name: str) -> None:
        """Wait until a replica serves nothing any more; after a while, have that resumed elsewhere."""
        replica = self._coordinator.replicas[name]
        for limit_s in (DRAIN_S, DRAIN_S):
            try:
                async with asyncio.timeout(limit_s):
                    while replica.held:
                        await asyncio.sleep(0.02)
                return
            except TimeoutError:
                self._report(f"{len(replica.held)} requests of replica {name} go on elsewhere")
                self._coordinator.send_away(name)
        self._coordinator.give_up(name, "it did not empty")

    async def _start(
        self, replica: Replica, worker_configs: Mapping[str, Configure], instead: bool = False
    ) -> None:
        """Start the workers of a replica; `instead` of those that have its GPUs still."""
        own, problem = {gpu: worker_configs[gpu] for gpu in replica.gpus}, ""
        for _ in range(ATTEMPTS):
            try:
                links = await self._launcher.change(replica.gpus if problem or instead else (), own, log.info)
            except (HexGen2Error, OSError) as error:
                problem = str(error)
                self._report(f"replica {replica.id} did not start: {error}")
                continue
            self._supervisor.forget(replica.id)
            self._coordinator.join(replica.id, links)
            self._report(f"replica {replica.id} serves")
            return
        self._supervisor.forget(replica.id)
        self._coordinator.give_up(replica.id, f"it did not start: {problem}")


def broken(dead: Iterable[Replica], away: Collection[str]) -> set[str]:
    """GPUs of lost replicas whose machines are all there: any of these may be the reason. Where a machine is
    gone, that is the reason, and the replica's other GPUs are sound.

    Parameters
    ----------
    away : GPUs whose machine is gone
    """
    return {gpu for replica in dead if not set(replica.gpus) & set(away) for gpu in replica.gpus}


def turning(coming: Mapping[str, Replica], leaving: Mapping[str, Replica]) -> dict[str, str]:
    """The new replicas that have the GPUs and stages of one that leaves, and which one that is."""
    found = dict[str, str]()
    for name, replica in coming.items():
        for old, before in leaving.items():
            if replica.stages == before.stages:
                found[name] = old
    return found


def renamed(placement: Placement, alive: Mapping[str, Replica]) -> Placement:
    """A new placement in the names of the fleet: replicas that run already have the names they run under, and
    no other one has the name of one that runs."""
    running = {_shape(replica): name for name, replica in alive.items()}
    names = {r.id: running[_shape(r)] for r in placement.replicas if _shape(r) in running}
    taken = alive.keys() | names.values()
    for replica in placement.replicas:
        if replica.id not in names:
            name = replica.id
            while name in taken:
                name += "'"
            names[replica.id] = name
            taken = taken | {name}
    changed = {
        "replicas": [r.model_copy(update={"id": names[r.id]}) for r in placement.replicas],
        "routes": [
            r.model_copy(update={"from_": names[r.from_], "to": names[r.to]}) for r in placement.routes
        ],
        "moves": [
            m if m.action == "stop" else m.model_copy(update={"replica": names[m.replica]})
            for m in placement.moves
        ],
    }
    return placement.model_copy(update=changed)


def _shape(replica: Replica) -> tuple:
    """What workers are started with: of two replicas that have it in common one can be the other."""
    stages = tuple((tuple(stage.gpus), stage.layers) for stage in replica.stages)
    # The prompts of a step follow from its tokens, and from how long prompts are now.
    decodes = None if replica.role == "prefill" else replica.max_batch
    return replica.role, decodes, replica.engine, stages


def _blockers(coming: Mapping[str, Replica], leaving: Mapping[str, Replica]) -> dict[str, set[str]]:
    """Who has the GPUs of each new replica."""
    return {
        name: {old for old, other in leaving.items() if set(other.gpus) & set(replica.gpus)}
        for name, replica in coming.items()
    }

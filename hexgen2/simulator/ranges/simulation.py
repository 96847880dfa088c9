"""A discrete-event simulation of a placement of overlapping ranges of layers under load.

Each request has a path of its own (runtime/routing/paths/). Every token passes all replicas of the
path, between which it waits for links and for steps. It is deterministic.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from cost_model.base import CostModel
from cost_model.errors import InputError
from cost_model.hardware import Link
from hexgen2.cluster import Cluster
from hexgen2.layer_ranges import range_of
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.range_times import StepScale, scale_to
from hexgen2.schedulers import FLOW
from hexgen2.simulator.event_loop import EventLoop
from hexgen2.simulator.options import Options
from hexgen2.simulator.ranges.network import Network
from hexgen2.simulator.ranges.node import RangeNode, Run
from hexgen2.simulator.records import Records
from runtime.routing.kv_division import divided, keeps_windows_apart
from runtime.routing.paths.path_router import PathRouter, layer_tokens
from runtime.routing.paths.range_graph import COORDINATOR, link_req_s
from runtime.routing.windowed_room import WindowedRoom

RANGE_ASSUMPTIONS = [
    "times are those of the cost model; where tables were given, they are corrected so that nodes pass the "
    "tables' tokens/s once their KV caches are full",
    "messages wait for each other on links, cards and uplinks, first come, first served",
    "a token takes the latency from the last replica of a path back to the first, and no bandwidth",
    "prompts are computed whole; KV cache is counted in tokens, not in blocks",
]


class RangeSimulation(EventLoop):
    """One run of a placement with ranges of layers under the requests of `records`.

    Where the placement was planned with given tables of tokens/s, the times of each replica are corrected so
    that the cost model would predict what the table says, of a replica whose KV cache is full.

    Raises
    ------
    InputError : an option that such placements do not have, or a failure of an unknown replica
    """

    def __init__(
        self,
        placement: Placement,
        cluster: Cluster,
        records: Records,
        options: Options | None = None,
        costs: CostModel | None = None,
    ) -> None:
        super().__init__(placement, records, options)
        options = self.options
        _check(placement, options)
        self._costs = costs or placement.costs()
        self._made = [0] * len(records.requests)
        devices = {replica.id: cluster.index(replica.stages[0].gpus[0]) for replica in placement.replicas}
        self._network = Network(cluster, devices)
        self._nodes = {
            replica.id: self._node(replica, cluster, devices[replica.id]) for replica in placement.replicas
        }
        room, windowed = _rooms(placement, self._costs)
        self._router = PathRouter(
            placement,
            options.scheduler if isinstance(options.scheduler, str) else FLOW,
            options.seed,
            room,
            windowed=windowed,
            queued=lambda replica: self._nodes[replica].requests,
        )
        self._capacity = link_req_s(placement)
        self._runs: dict[int, Run] = {}
        self._freed = False
        self._waiting: deque[tuple[int, float]] = deque()
        for failure in options.failures:
            self.schedule(failure.at_s, self._lose, failure.replica)

    def _node(self, replica: Replica, cluster: Cluster, device: int) -> RangeNode:
        stage = replica.stages[0]
        members = np.array([cluster.index(gpu) for gpu in stage.gpus])
        pairs = np.ix_(members, members)
        inside = Link(
            float(cluster.bandwidth_bytes_s[pairs].min()),
            float(cluster.latency_s[pairs].max()),
            cluster.fabrics[cluster.node_of[device]],
        )
        group = stage.tensor_group(cluster.types[int(cluster.type_of[device])], inside)
        layers, held = self.placement.model.layers, range_of(replica)
        scale, ranges = StepScale(), self.placement.layer_ranges
        if ranges is not None and ranges.tables is not None:
            own, count, last = self.placement.costs(), held[1] - held[0], held[1] == layers
            tokens = self.placement.workload.isl + self.placement.workload.osl
            given = replica.capacity_req_s * tokens
            scale = scale_to(given, own, group, count, last, replica.max_batch)
        return RangeNode(
            replica.id,
            held,
            held[1] == layers,
            self._costs,
            group,
            scale,
            self.options.step_tokens or replica.engine.step_tokens,
            self.records.replicas[replica.id],
            self.schedule,
            self._passed,
            lambda: len(self._router.on[replica.id]),
            shares=self.options.policy == "mixed",
        )

    def _left(self) -> list[int]:
        return [index for index, _ in self._waiting]

    # -- requests

    def _submit(self, now: float, index: int) -> None:
        limit = self.options.queue_limit
        if not self._router.fits(self._isl[index] + self._osl[index]):
            self._fail(index, self._why_not())
        elif limit is not None and len(self._waiting) > limit:
            self._fail(index, "the queue is full")
        else:
            self._waiting.append((index, now))
            self._start_waiting(now)

    def _why_not(self) -> str:
        if not self._router.graph.connected:
            return "no replica is left to serve it"
        return "it is longer than any path can hold"

    def _start_waiting(self, now: float) -> None:
        """Requests start in order, as long as there is room on a path."""
        while self._waiting:
            index, since_s = self._waiting[0]
            tokens = self._isl[index] + self._made[index]
            path = self._router.pick(tokens, self._isl[index] + self._osl[index])
            if path is None:
                return
            self._waiting.popleft()
            self._router.start(index, path, tokens)
            run = self._runs[index] = Run(index, path, tokens, tokens, now)
            names = [hop.replica for hop in path]
            self.records.prefill[index] = self.records.decode[index] = ">".join(names)
            self._nodes[names[0]].record.waited_s += now - since_s
            for name in names:
                record = self.records.replicas[name]
                record.peak_running = max(record.peak_running, len(self._router.on[name]))
            self._enter([run], now)

    def _enter(self, runs: list[Run], now: float) -> None:
        """Requests that are at the same hop reach its replica."""
        alive = [run for run in runs if run.alive]
        if not alive:
            return
        node = self._nodes[alive[0].path[alive[0].hop].replica]
        node.requests += len(alive)
        for run in alive:
            run.at = node.name
        node.take(alive, now)

    def _arrive(self, now: float, runs: list[Run]) -> None:
        self._enter(runs, now)

    def _passed(self, node: RangeNode, runs: list[Run], now: float) -> None:
        """A step has ended: its requests go on to their next replicas, or have a token."""
        node.requests -= len(runs)
        router, name = self._router, node.name
        onward = dict[str, list[Run]]()
        again = dict[str, list[Run]]()
        for run in runs:
            if router.learns:
                before = run.path[run.hop - 1].replica if run.hop else COORDINATOR
                router.answered(before, name, now - run.left_s)
            run.left_s, run.at = now, ""
            run.hop += 1
            if run.hop < len(run.path):
                going = onward
            elif self._token(run, now):
                going = again
            else:
                continue
            following = run.path[run.hop].replica
            if following in going:
                going[following].append(run)
            else:
                going[following] = [run]
        for following, sent in onward.items():
            self._send(name, following, sent, now)
        for following, sent in again.items():
            self.schedule(now + self._network.latency_s(name, following), self._arrive, sent)
        if self._freed:
            self._freed = False
            self._start_waiting(now)

    def _send(self, a: str, b: str, runs: list[Run], now: float) -> None:
        """The activations of a step go to one next replica."""
        tokens = prompts = 0
        for run in runs:
            tokens += run.to_run
            prompts += run.to_run > 1
        bytes_ = tokens * self._costs.activation_bytes_per_token
        arrival_s = self._network.arrival_s(a, b, bytes_, now)
        record = self.records.routes[a, b]
        if not record.capacity_req_s:
            record.capacity_req_s = self._capacity(a, b)
        record.bytes += bytes_
        record.requests += prompts
        record.after_s += (arrival_s - now) * prompts
        self.schedule(arrival_s, self._arrive, runs)

    def _token(self, run: Run, now: float) -> bool:
        """A request has another token; returns whether it goes on."""
        index = run.index
        run.tokens += 1
        if run.to_run > 1:
            self.records.first(index, now)
        else:
            self.records.gap(now - self.records.last_s[index])
            self.records.last_s[index] = now
        run.to_run, run.hop = 1, 0
        self._made[index] += 1
        if self._made[index] >= self._osl[index]:
            self._end(run, now)
            return False
        full = self._router.grow(index)
        if full is not None:
            self._preempt(self._router.latest_on(full), full)  # type: ignore[arg-type]
        return run.alive

    def _end(self, run: Run, now: float) -> None:
        index = run.index
        self._leave(run)
        self._done += 1
        for hop in run.path:
            record = self.records.replicas[hop.replica]
            record.requests += 1
            record.running_s += now - self.records.first_s[index]
        self.records.ended(index, now)
        if self._clients is not None:
            self._clients.ended(now)

    def _leave(self, run: Run) -> None:
        run.alive, self._freed = False, True
        if run.at:
            self._nodes[run.at].requests -= 1
        del self._runs[run.index]
        self._router.end(run.index)

    def _fail(self, index: int, why: str) -> None:
        self.records.fail(index, why)
        if self._clients is not None:
            self._clients.ended(self.now)

    def _preempt(self, index: int, replica: str) -> None:
        """A replica has no room: the request that came last gives up its KV cache and is recomputed later."""
        self.records.replicas[replica].preemptions += 1
        self._put_back(self._runs[index])

    def _put_back(self, run: Run) -> None:
        self._leave(run)
        self._waiting.appendleft((run.index, self.now))

    # -- failures

    def _lose(self, now: float, name: str) -> None:
        """Lose a replica: its requests continue on other paths from the tokens that they have, or fail."""
        self._nodes[name].lose()
        lost = [self._runs[index] for index in self._router.lose(name)]  # type: ignore[index]
        for run in reversed(lost):
            self._put_back(run)
        if not self.options.recover:
            for run in lost:
                self._waiting.remove((run.index, now))
                self._fail(run.index, "a replica of its path was lost")
        waiting, self._waiting = self._waiting, deque()
        for index, since_s in waiting:
            if self._router.fits(self._isl[index] + self._osl[index]):
                self._waiting.append((index, since_s))
            else:
                self._fail(index, f"no path can serve it since {name} is lost")
        self._start_waiting(now)


def _check(placement: Placement, options: Options) -> None:
    known = {replica.id for replica in placement.replicas}
    for failure in options.failures:
        if failure.replica not in known:
            names = ", ".join(replica.id for replica in placement.replicas)
            raise InputError(
                "--fail", failure.replica, "is not a replica of the placement", f"name one of {names}"
            )
    if options.replans:
        problem = f"{placement.strategy} divides the model into ranges of layers, which cannot be re-planned"
        raise InputError("--replan", "", problem, "simulate --fail instead")
    if options.policy not in ("mixed", "chunked"):
        problem = f"is not a policy of ranges of layers ({placement.strategy})"
        raise InputError("--policy", options.policy, problem, "use mixed, or chunked as in Helix")


def _rooms(placement: Placement, costs: CostModel) -> tuple[dict[str, float], dict[str, WindowedRoom]]:
    """Tokens x layers of KV cache by replica, and what layers with a window hold, where that is apart."""
    rooms, windowed = layer_tokens(placement), dict[str, WindowedRoom]()
    if keeps_windows_apart(placement):
        for replica in placement.replicas:
            layers = replica.stages[0].layer_count
            tokens = int(rooms[replica.id] / layers)
            whole, windowed[replica.id] = divided(placement, replica, costs, tokens)
            rooms[replica.id] = whole * layers
    return rooms, windowed

"""A placement under load, event by event.

What decides is what the runtime has: its router, its admission and its accounting of KV cache room. Around
them stand replicas whose steps take what the cost model says, and transfers that share links. All is
deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cost_model.base import CostModel
from cost_model.errors import InputError
from cost_model.pipeline import under_way
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.memory import kv_capacity_tokens
from hexgen2.placement import Placement, Replica
from hexgen2.shared_links import SharedLinks
from hexgen2.simulator.colocated import Colocated, Policy
from hexgen2.simulator.decoding import Decoder
from hexgen2.simulator.prefilling import Prefiller
from hexgen2.simulator.records import Records
from hexgen2.simulator.timing import ReplicaTimes
from hexgen2.simulator.transfers import RouteCost, Transfers, binding, route_cost
from runtime.admission import Admission
from runtime.refusals import Overloaded, TooLong, Unavailable
from runtime.room import Room, kv_budgets
from runtime.router import Route, Router, routes_of


@dataclass(frozen=True)
class Failure:
    """A replica is lost at a time."""

    at_s: float
    replica: str


@dataclass(frozen=True)
class Options:
    """How a simulation differs from the plain one.

    policy : of colocated replicas
    queue_limit : requests that may wait for a route; None: all
    failures : replicas lost on the way
    recover : requests of a lost replica start over elsewhere from prompt and tokens made, else they fail
    front_end_s : what a request takes besides, from the client to the queue of a replica and back
    """

    policy: Policy = "alternate"
    queue_limit: int | None = None
    failures: Sequence[Failure] = ()
    recover: bool = False
    front_end_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Request:
    """A request as admission sees it; `made` tokens were made before it was prefilled anew."""

    index: int
    prompt_tokens: int
    capacity_tokens: int
    made: int = 0
    pinned: Route | None = None
    prefill: str = ""
    decode: str = ""
    phase: str = "waiting"
    computed_s: float = 0.0

    @property
    def one_token(self) -> bool:
        return self.capacity_tokens - self.prompt_tokens <= 1


class Simulation:
    """One run.

    Parameters
    ----------
    placement : checked (see hexgen2.checks)
    requests : what arrives
    records : what becomes of it
    costs : seconds and bytes; None: by the cost model that the placement was made with

    Raises
    ------
    InputError : a failure names no replica of the placement
    """

    def __init__(
        self,
        placement: Placement,
        cluster: Cluster,
        records: Records,
        options: Options | None = None,
        costs: CostModel | None = None,
    ) -> None:
        self.options = options = options or Options()
        self.placement, self.records, self.now = placement, records, 0.0
        requests = records.requests
        self._isl: list[int] = requests.isl.tolist()
        self._osl: list[int] = requests.osl.tolist()
        self._arrival_s: list[float] = (requests.arrival_s + options.front_end_s).tolist()
        self._events: list[tuple[float, int, Callable, Any]] = []
        self._count = self._done = 0
        self._active: dict[int, _Request] = {}
        self.costs = costs or make_cost_model(
            placement.cost_model.name, placement.model, placement.workload.lengths
        )
        self.cluster = cluster
        budgets = kv_budgets(placement)
        self.rooms = {r.id: self._room(r, budgets[r.id]) for r in placement.replicas}
        self.transfers = Transfers(self.schedule)
        self._replicas = {replica.id: self._make(replica) for replica in placement.replicas}
        shared = SharedLinks(cluster)
        links, isl = placement.cost_model.links, self.costs.isl
        self._routes: dict[tuple[str, str], RouteCost] = binding(
            {(r.from_, r.to): route_cost(r, cluster, shared, links, isl) for r in placement.routes}
        )
        limit = options.queue_limit if options.queue_limit is not None else len(requests) + 1
        self._admission: Admission[_Request] = Admission(Router(routes_of(placement)), self.rooms, limit)
        for failure in options.failures:
            if failure.replica not in self._replicas:
                raise InputError("--fail", failure.replica, "is no replica of the placement", self._known())
            self.schedule(failure.at_s, self._lose, failure.replica)

    def run(self, progress: Callable[[Simulation], None] | None = None) -> None:
        """Until every request has ended."""
        arrivals, events, count = self._arrival_s, self._events, len(self._arrival_s)
        arrived = handled = 0
        while arrived < count or events:
            if arrived < count and (not events or arrivals[arrived] <= events[0][0]):
                self.now = arrivals[arrived]
                self._arrive(arrived)
                arrived += 1
            else:
                self.now, _, call, argument = heapq.heappop(events)
                call(self.now, argument)
            handled += 1
            if progress and handled % 4096 == 0:
                progress(self)
        for request in self._admission.waiting:
            self.records.fail(request.index, "no replica is left to serve it")

    @property
    def ended(self) -> int:
        """Requests that have ended, well or not."""
        return self._done + len(self.records.failed)

    def schedule(self, time_s: float, call: Callable[[float, Any], None], argument: Any) -> None:
        """Have call(time_s, argument) happen; of equal times the first scheduled goes first."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, call, argument))

    # -- replicas

    def _known(self) -> str:
        return f"name one of {', '.join(self._replicas)}"

    def _room(self, replica: Replica, budget: int) -> Room:
        places = replica.max_batch * self._at_once(replica)
        if replica.role == "colocated" and self.options.policy != "alternate":
            # Such an engine takes all that come and keeps the accounts itself; only what it could never
            # hold is refused.
            return _Endless(kv_capacity_tokens(replica, self.cluster, self.costs), places)
        return Room(budget * self._at_once(replica), places)

    def _at_once(self, replica: Replica) -> int:
        """Requests under way for each one in a replica's batch."""
        if replica.role == "prefill":
            return 1
        return int(under_way(self.placement.cost_model.pipeline, 1, len(replica.stages)))  # type: ignore[arg-type]

    def _times(self, replica: Replica) -> ReplicaTimes:
        semantics: Any = self.placement.cost_model.pipeline
        return ReplicaTimes(replica, self.cluster, self.costs, semantics)

    def _make(self, replica: Replica) -> Prefiller | Decoder | Colocated:
        times, room = self._times(replica), self.rooms[replica.id]
        record = self.records.replicas[replica.id]
        if replica.role == "prefill":
            calls = self.schedule, self._begun, self._computed
            return Prefiller(times, room.kv_budget_tokens, record, *calls)
        own = (self._isl, self._osl, room.max_batch)
        if replica.role == "decode":
            return Decoder(times, *own, self.records, record, self.schedule, self._ended)
        return Colocated(
            self.options.policy,
            times,
            *own,
            room.kv_budget_tokens,
            self.records,
            record,
            self.schedule,
            self._ended,
        )

    # -- requests

    def _arrive(self, index: int) -> None:
        isl, osl = self._isl[index], self._osl[index]
        self._enqueue(_Request(index, isl, isl + osl))

    def _enqueue(self, request: _Request) -> None:
        try:
            self._admission.enqueue(request)
        except (Overloaded, TooLong, Unavailable) as refused:
            self.records.fail(request.index, str(refused))
            return
        self._start_waiting()

    def _start_waiting(self) -> None:
        while (found := self._admission.next()) is not None:
            self._start(*found)

    def _start(self, request: _Request, route: Route) -> None:
        request.prefill, request.decode, request.phase = route.prefill, route.decode, "prefill"
        index = request.index
        self._active[index] = request
        self.records.prefill[index], self.records.decode[index] = route.prefill, route.decode
        tokens = request.capacity_tokens if route.colocated else request.prompt_tokens
        self.rooms[route.prefill].hold(index, tokens)
        replica = self._replicas[route.prefill]
        if isinstance(replica, Colocated):
            request.phase = "decode"
            replica.submit(index, self.now, request.made)
            return
        assert isinstance(replica, Prefiller)
        if not request.one_token:
            self.rooms[route.decode].hold(index, request.capacity_tokens)
        replica.submit(request, self.now)

    def _begun(self, batch: Sequence[_Request], begun_s: float, ends_s: float) -> None:
        """A prefill replica computes a batch, and sends each layer as it is computed."""
        for request in batch:
            if not request.one_token:
                cost = self._routes[request.prefill, request.decode]
                tokens, layers = request.prompt_tokens, self.placement.model.layers
                self.transfers.begin(request, cost, tokens, layers, begun_s, ends_s, self._moved)

    def _computed(self, batch: Sequence[_Request], now: float) -> None:
        """A prefill replica has computed a batch."""
        for request in batch:
            if self._active.get(request.index) is not request:
                self._prefiller(request).release(request, now)
                continue
            request.phase, request.computed_s = "moving", now
            self.records.first(request.index, now)
            if request.one_token:
                self._prefiller(request).release(request, now)
                self._ended(request.index, now)

    def _moved(self, request: _Request, now: float) -> None:
        """All of a request's KV cache has landed."""
        request.phase = "decode"
        self._prefiller(request).release(request, now)
        self.rooms[request.prefill].release(request.index)
        record = self.records.routes[request.prefill, request.decode]
        record.requests += 1
        record.bytes += self._routes[request.prefill, request.decode].bytes_per_token * request.prompt_tokens
        record.after_s += now - request.computed_s
        decoder = self._replicas[request.decode]
        assert isinstance(decoder, Decoder)
        decoder.land(request.index, now, request.made + 1)
        self._start_waiting()

    def _ended(self, index: int, now: float) -> None:
        """A request has its last token."""
        request = self._active.pop(index)
        self._done += 1
        self.records.ended(index, now)
        self._free(request)
        if len(self._admission):
            self.schedule(now, self._released, None)

    def _free(self, request: _Request) -> None:
        for replica in {request.prefill, request.decode}:
            self.rooms[replica].release(request.index)

    def _released(self, now: float, _: None) -> None:
        self._start_waiting()

    def _prefiller(self, request: _Request) -> Prefiller:
        replica = self._replicas[request.prefill]
        assert isinstance(replica, Prefiller)
        return replica

    # -- failures

    def _lose(self, now: float, name: str) -> None:
        """A replica is gone: what it had starts over or fails, and the router goes on without it."""
        replica = self._replicas[name]
        made = {} if isinstance(replica, Prefiller) else dict(replica.lose(now))
        if isinstance(replica, Prefiller):
            replica.lose()
        stranded = self._admission.lose(name, f"{name} is lost")
        victims = [r for r in self._active.values() if self._needs(r, name)]
        for request in reversed(victims):
            tokens = made.get(request.index, request.made + (request.phase == "moving"))
            self._withdraw(request, name, now)
            self._begin_again(request, tokens)
        for request in stranded:
            self._admission.withdraw(request)
            self.records.fail(request.index, f"no replica can serve it since {name} is lost")
        self._start_waiting()

    def _needs(self, request: _Request, replica: str) -> bool:
        """Whether an active request cannot go on without a replica."""
        return request.decode == replica or (request.prefill == replica and request.phase != "decode")

    def _withdraw(self, request: _Request, lost: str, now: float) -> None:
        """Take a request out of everything."""
        del self._active[request.index]
        self.transfers.cancel(request, now)
        self._free(request)
        if request.prefill != lost and request.phase in ("prefill", "moving"):
            prefiller = self._prefiller(request)
            if not prefiller.withdraw(request) and request.phase == "moving":
                prefiller.release(request, now)

    def _begin_again(self, request: _Request, made: int) -> None:
        """Put a request first in the queue again, with the tokens that it has as part of its prompt."""
        index = request.index
        if not self.options.recover:
            self.records.fail(index, "a replica of its route was lost")
            return
        again = _Request(index, self._isl[index] + made, request.capacity_tokens, made)
        if self._admission.router.routes:
            self._admission.put_back(again)
        else:
            self.records.fail(index, "no replica is left to serve it")


class _Endless(Room):
    """Room for whatever could be held alone."""

    __slots__ = ()

    def has_room(self, tokens: int, prefill_only: bool) -> bool:
        return tokens <= self.kv_budget_tokens

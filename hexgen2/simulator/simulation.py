"""A discrete-event simulation of a placement under load.

Router, admission and KV cache accounting are the runtime's own code. The simulation adds replicas whose steps
take the times of the cost model, and KV transfers that share links. It is deterministic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from cluster_specs.loader import resolve
from cost_model.base import CostModel
from cost_model.errors import InputError
from cost_model.lengths import moved_tokens
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Replica
from hexgen2.placement import Route as PlacedRoute
from hexgen2.prediction.headwise_times import HeadwiseTimes
from hexgen2.schedulers import FLOW
from hexgen2.simulator.changeover import Changeover
from hexgen2.simulator.decode_replica import DecodeReplica
from hexgen2.simulator.event_loop import EventLoop
from hexgen2.simulator.fleet import Fleet, LiveKvBudget
from hexgen2.simulator.headwise_replica import HeadwiseReplica
from hexgen2.simulator.options import Options
from hexgen2.simulator.pipelined_replica import PipelinedReplica
from hexgen2.simulator.prefill_replica import PrefillReplica
from hexgen2.simulator.prompts_for_others import PromptsForOthers
from hexgen2.simulator.records import Records
from hexgen2.simulator.transfers import RouteCost, Transfers
from runtime.routing.admission import Admission
from runtime.routing.fair_queue import FirstCome
from runtime.routing.kv_budget import KvBudget
from runtime.routing.load_shift import LoadShift
from runtime.routing.output_lengths import OutputLengths, make_predictor
from runtime.routing.refusals import Overloaded, TooLong, Unavailable
from runtime.routing.router import Route, Router, routes_of, routes_without
from runtime.routing.schedulers import make_router


@dataclass(eq=False, slots=True)
class _Request:
    """A request as admission sees it.

    Attributes
    ----------
    made : tokens generated before the request was restarted, now part of its prompt
    computed_tokens : of the prompt, or in steps under way, where the request goes on elsewhere
    on_their_way : chunks whose KV cache transfer has begun and not ended
    phase : "waiting", "prefill", "moving" (prefilled, its KV cache in transfer) or "decode"
    output_limit : most output tokens that the client allows; None, since no client of a simulation does, and
        the lengths themselves are not to be known in advance
    """

    index: int
    prompt_tokens: int
    capacity_tokens: int
    made: int = 0
    computed_tokens: int = 0
    on_their_way: int = 0
    prefill: str = ""
    decode: str = ""
    phase: str = "waiting"
    computed_s: float = 0.0
    one_token: bool = field(init=False)
    output_limit: int | None = None

    def __post_init__(self) -> None:
        self.one_token = self.capacity_tokens - self.prompt_tokens <= 1

    @property
    def request_id(self) -> int:
        """By which replicas hold its KV cache."""
        return self.index


class Simulation(EventLoop):
    """One run of a placement under the requests of `records`.

    Parameters
    ----------
    placement : must be valid (see hexgen2.checks)
    records : the requests, and where their fate is written
    costs : the cost model; None: the one that the placement was planned with
    fleet : what another simulation of this placement was built from, to save time

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
        fleet: Fleet | None = None,
    ) -> None:
        super().__init__(placement, records, options)
        options, requests = self.options, records.requests
        self._active: dict[int, _Request] = {}
        self.transfers = Transfers(self.schedule)
        self.kv_budgets: dict[str, KvBudget] = {}
        self._prefill_replicas: dict[str, PrefillReplica | PromptsForOthers] = {}
        self._decode_replicas: dict[str, DecodeReplica | PipelinedReplica] = {}
        self._colocated_replicas: dict[str, DecodeReplica | PipelinedReplica] = {}
        self._running: dict[str, Replica] = {}
        self._routes: dict[tuple[str, str], RouteCost] = {}
        self._changeover: Changeover | None = None
        self._held_back: list[_Request] = []
        # Whether the first request in the queue has found no room, and nothing has become free since.
        self._stuck = False
        fleet = fleet or Fleet(placement, cluster, options, costs)
        self._kv_window = fleet.costs.kv_window
        for replica in placement.replicas:
            self._add_replica(replica, replica.id, fleet)
        self._add_routes(fleet, {replica.id: replica.id for replica in placement.replicas})
        self._shift = LoadShift(placement)
        limit = options.queue_limit if options.queue_limit is not None else len(requests) + 1
        self._admission: Admission[_Request] = Admission(
            self._router(routes_of(placement)), self.kv_budgets, FirstCome(limit), self._routes_left
        )
        for failure in options.failures:
            if failure.replica not in self.kv_budgets:
                raise InputError(
                    "--fail", failure.replica, "is not a replica of the placement", self._known()
                )
            self.schedule(failure.at_s, self._lose, failure.replica)
        for replan in options.replans:
            self.schedule(replan.at_s, self._replan, replan.placement)

    def _after_event(self) -> None:
        """Transfers share links anew once all events of this time are done."""
        events = self._events
        if self.transfers.changed and not (events and events[0][0] == self.now):
            self.transfers.settle(self.now)

    def _left(self) -> list[int]:
        return [request.index for request in (*self._held_back, *self._admission.waiting)]

    def served_tokens(self) -> tuple[float, float]:
        """Prompt and output tokens of the requests that have been served by now. One that decodes counts with
        the share that it has of its output tokens."""
        isl, osl, requests = self._isl, self._osl, self.records.requests
        ended = ~np.isnan(self.records.end_s)
        prompt, output = float(requests.isl[ended].sum()), int(requests.osl[ended].sum())
        for budget in self.kv_budgets.values():
            tokens = dict(budget.held)
            if isinstance(budget, LiveKvBudget):
                tokens.update(budget.grown_of())
            for request, held in tokens.items():
                if (made := held - isl[request]) > 0:
                    prompt, output = prompt + isl[request] * made / osl[request], output + made
        return prompt, output

    # -- replicas

    def _router(self, routes: Sequence[Route]) -> Router:
        """The router of the scheduler that was asked for."""
        lengths = self.options.output_lengths
        if not isinstance(lengths, OutputLengths):
            lengths = make_predictor(lengths, self.placement.workload)
        return make_router(self.options.scheduler, routes, lengths)

    def _known(self) -> str:
        return f"name one of {', '.join(self.kv_budgets)}"

    def _add_replica(self, replica: Replica, name: str, fleet: Fleet) -> None:
        times, kv_budget = fleet.times(replica), fleet.kv_budget(replica)
        batching = self.options.batching(replica)
        record = self.records.replicas[name]
        self.kv_budgets[name], self._running[name] = kv_budget, replica
        if replica.role == "prefill":
            steps = self.schedule, self._begun, self._computed
            size = batching.step_tokens
            self._prefill_replicas[name] = PrefillReplica(size, times, kv_budget, record, *steps)
            return
        lengths = self._isl, self._osl
        calls = self.schedule, self._ended
        sends = self._begun, self._computed
        both = replica.role != "decode" and batching.policy == "mixed" and times.in_flight > 1
        decoder: DecodeReplica | PipelinedReplica
        common = (*lengths, kv_budget, self.records, record, *calls, *sends)
        if isinstance(times, HeadwiseTimes):
            _check_policy(batching.policy)
            decoder = HeadwiseReplica(batching, times, *common, self.options.heads)
        else:
            decoder = (PipelinedReplica if both else DecodeReplica)(batching, times, *common)
        if replica.role != "decode":
            self._colocated_replicas[name] = decoder
        if replica.decodes_for_others:
            self._decode_replicas[name] = decoder
        if replica.prefills_for_others:
            self._prefill_replicas[name] = PromptsForOthers(decoder)
        if isinstance(kv_budget, LiveKvBudget):
            if isinstance(decoder, DecodeReplica):
                counted = decoder
                kv_budget.grown = lambda: counted.grown(self.now)
                kv_budget.grown_at_most = counted.grown_at_most
                kv_budget.grown_of = lambda: counted.uncounted(self.now)
            else:
                kv_budget.grown = kv_budget.grown_at_most = partial(getattr, decoder, "uncounted")
                kv_budget.grown_of = decoder.uncounted_of

    def _add_routes(self, fleet: Fleet, names: Mapping[str, str], more: Sequence[PlacedRoute] = ()) -> None:
        """Add the routes of a placement, and `more`. `names` maps its replica ids to the simulation's."""
        self._fleet, self._names = fleet, names
        capacity = {(r.from_, r.to): r.capacity_req_s for r in (*fleet.placement.routes, *more)}
        # Those of mixed replicas to themselves move nothing.
        for (source, target), cost in fleet.routes(more).items():
            key = names[source], names[target]
            self._routes[key] = cost
            self.records.routes[key].capacity_req_s = capacity[source, target]

    # -- requests

    def _submit(self, now: float, index: int) -> None:
        isl, osl = self._isl[index], self._osl[index]
        self._shift.arrived(isl)
        self._shift_load()
        self._enqueue(_Request(index, isl, isl + osl))

    def _enqueue(self, request: _Request) -> None:
        if self._changeover is not None and not self._admission.router.routes:
            self._held_back.append(request)
            return
        try:
            self._admission.enqueue(request)
        except (Overloaded, TooLong, Unavailable) as refused:
            self._fail(request.index, str(refused))
            return
        if not self._stuck:
            self._start_waiting()

    def _start_waiting(self) -> None:
        while (found := self._admission.next()) is not None:
            self._start(*found)
        self._stuck = len(self._admission) > 0

    def _start(self, request: _Request, route: Route) -> None:
        request.prefill, request.decode, request.phase = route.prefill, route.decode, "prefill"
        index = request.index
        self._active[index] = request
        self._shift.began(index)
        self.records.prefill[index], self.records.decode[index] = route.prefill, route.decode
        tokens = request.prompt_tokens
        on = not (route.colocated or request.one_token)
        self.kv_budgets[route.prefill].hold(index, tokens, route.decode if on else "")
        if route.colocated:
            request.phase = "decode"
            self._colocated_replicas[route.decode].submit(index, self.now, request.made)
            return
        if not request.one_token:
            self.kv_budgets[route.decode].hold(index, tokens)
            self._decode_replicas[route.decode].expect(index, tokens, self.now)
        self._prefill_replicas[route.prefill].submit(request, tokens, self.now)

    def _begun(self, prompts: Sequence[tuple[_Request, int]], begun_s: float, ends_s: float) -> None:
        """A step begins with so many tokens of each of these prompts, whose requests go on elsewhere; each
        layer is sent as soon as it is computed."""
        layers = self.placement.model.layers
        sent, window = dict[RouteCost, tuple[list[_Request], list[float]]](), self._kv_window
        for request, own in prompts:
            if not request.one_token:
                request.on_their_way += 1
                cost = self._routes[request.prefill, request.decode]
                requests, tokens = sent.setdefault(cost, ([], []))
                requests.append(request)
                first, request.computed_tokens = request.computed_tokens, request.computed_tokens + own
                tokens.append(moved_tokens(first, first + own, request.prompt_tokens, window))
        for cost, (requests, tokens) in sent.items():
            self.transfers.begin(requests, cost, sum(tokens), layers, begun_s, ends_s, self._arrived)

    def _computed(self, request: _Request, now: float) -> None:
        """A prefill replica has computed a whole prompt."""
        if self._active.get(request.index) is not request:
            self._prefill_replicas[request.prefill].release(request, request.prompt_tokens, now)
            return
        request.phase, request.computed_s = "moving", now
        self.records.first(request.index, now)
        if request.one_token:
            self._prefill_replicas[request.prefill].release(request, request.prompt_tokens, now)
            self._ended(request.index, now)
        else:
            self.kv_budgets[request.decode].grow(request.index)

    def _arrived(self, request: _Request, now: float) -> None:
        """The KV cache of a chunk has arrived."""
        request.on_their_way -= 1
        if request.phase == "moving" and not request.on_their_way:
            self._moved(request, now)

    def _moved(self, request: _Request, now: float) -> None:
        """The whole KV cache of a request has arrived."""
        request.phase = "decode"
        self._prefill_replicas[request.prefill].release(request, request.prompt_tokens, now)
        self.kv_budgets[request.prefill].release(request.index)
        record = self.records.routes[request.prefill, request.decode]
        record.requests += 1
        moved = moved_tokens(0, request.prompt_tokens, request.prompt_tokens, self._kv_window)
        record.bytes += self._routes[request.prefill, request.decode].bytes_per_token * moved
        record.after_s += now - request.computed_s
        self._decode_replicas[request.decode].land(request.index, now, request.made + 1)
        self._start_waiting()

    def _ended(self, index: int, now: float) -> None:
        """A request has received its last token."""
        request = self._active.pop(index)
        self._done += 1
        self.records.ended(index, now)
        self._shift.ended(index, self._osl[index])
        self._admission.router.learn(self._isl[index], None, self._osl[index])
        self._free(request)
        if len(self._admission):
            self.schedule(now, self._released, None)
        if self._changeover is not None:
            self.schedule(now, self._drain, None)
        if self._clients is not None:
            self._clients.ended(now)

    def _fail(self, index: int, why: str) -> None:
        """A request ends before its last token."""
        self.records.fail(index, why)
        if self._clients is not None:
            self._clients.ended(self.now)

    def _free(self, request: _Request) -> None:
        for replica in {request.prefill, request.decode}:
            self.kv_budgets[replica].release(request.index)

    def _released(self, now: float, _: None) -> None:
        self._start_waiting()

    # -- failures

    def _lose(self, now: float, name: str) -> None:
        """Lose a replica: its requests restart or fail, and the router continues without it."""
        made = dict[int, int]()
        replica = (self._decode_replicas | self._colocated_replicas | self._prefill_replicas)[name]
        if isinstance(replica, PromptsForOthers):
            replica = replica.replica
        if isinstance(replica, PrefillReplica):
            replica.lose()
        else:
            made = dict(replica.lose(now))
        self._running.pop(name, None)
        stranded = self._admission.lose(name, f"{name} is lost")
        victims = [r for r in self._active.values() if self._needs(r, name)]
        for request in reversed(victims):
            tokens = made.get(request.index, request.made + (request.phase == "moving"))
            self._withdraw(request, name, now)
            self._restart(request, tokens)
        for request in stranded:
            self._admission.withdraw(request)
            self._fail(request.index, f"no replica can serve it since {name} is lost")
        self._start_waiting()

    def _routes_left(self, lost: Collection[str]) -> list[Route]:
        """The routes without the lost replicas, with the flow solved again; during a changeover, the routes
        between the replicas that have joined so far."""
        if self._changeover is not None:
            return routes_without(self._changeover.routes(), lost)
        names = self._names
        ids = self._shift.routes(self._ids(lost))
        routes = [replace(r, prefill=names[r.prefill], decode=names[r.decode]) for r in ids]
        more = [
            self._shift.plan.between(own.prefill, own.decode)
            for own, route in zip(ids, routes, strict=True)
            if not own.colocated and (route.prefill, route.decode) not in self._routes
        ]
        if more:
            self._add_routes(self._fleet, names, more)
        return routes

    def _ids(self, names: Collection[str]) -> set[str]:
        """The placement's ids of replicas by their names in the simulation."""
        return {own for own, name in self._names.items() if name in names}

    def _shift_load(self) -> None:
        """Move shares of routes if requests have become longer or shorter, and have to wait."""
        by_flow = self.options.scheduler in (None, FLOW)
        if not (self.options.shift_load and by_flow) or self._changeover is not None:
            return
        admission = self._admission
        moved = self._shift.move(self._ids(admission.states.absent), admission.pressure.high)
        if moved:
            self.records.moved.append((self.now, moved))
            admission.reroute()
            self._stuck = False

    def _needs(self, request: _Request, replica: str) -> bool:
        """Whether an active request still depends on a replica."""
        return request.decode == replica or (request.prefill == replica and request.phase != "decode")

    def _withdraw(self, request: _Request, lost: str, now: float) -> None:
        """Remove a request from admission, replicas and transfers."""
        del self._active[request.index]
        self.transfers.cancel(request)
        self._free(request)
        if request.phase == "decode":
            return
        if request.decode != lost and not request.one_token:
            self._decode_replicas[request.decode].forget(request.index, now)
        if request.prefill != lost:
            prefiller = self._prefill_replicas[request.prefill]
            if not prefiller.withdraw(request, now) and request.phase == "moving":
                prefiller.release(request, request.prompt_tokens, now)

    def _restart(self, request: _Request, made: int) -> None:
        """Put a request back at the head of the queue; its generated tokens become part of its prompt."""
        index = request.index
        if not self.options.recover:
            self._fail(index, "a replica of its route was lost")
            return
        again = _Request(index, self._isl[index] + made, request.capacity_tokens, made)
        if self._admission.router.routes:
            self._admission.put_back(again)
        else:
            self._fail(index, "no replica is left to serve it")

    # -- changeover

    def _replan(self, now: float, placement: Placement) -> None:
        """Begin to switch to another placement."""
        self._changeover = changeover = Changeover(
            placement, self._running, self.kv_budgets, lambda name: not self.kv_budgets[name].held
        )
        cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
        self._next_fleet = Fleet(placement, cluster, self.options)
        self._add_routes(self._next_fleet, changeover.names)
        self._shift = LoadShift(placement)
        for name in changeover.retired:
            del self._running[name]
        self._take_routes(changeover)
        self._drain(now, None)

    def _take_routes(self, changeover: Changeover) -> None:
        routes = routes_without(changeover.routes(), self._admission.states.lost)
        self._admission.router = self._admission.router.with_routes(routes)
        self._stuck = False

    def _drain(self, now: float, _: None) -> None:
        """Start loading the new replicas whose GPUs are free by now."""
        if self._changeover is not None:
            for replica, name, load_s in self._changeover.ready():
                self.schedule(now + load_s, self._join, (replica, name))

    def _join(self, now: float, who: tuple[Replica, str]) -> None:
        """A replica of the new placement has loaded."""
        replica, name = who
        changeover = self._changeover
        if changeover is None or changeover.names.get(replica.id) != name:
            return  # Another placement has replaced this one meanwhile.
        self._add_replica(replica, name, self._next_fleet)
        changeover.join(name)
        self._take_routes(changeover)
        held, self._held_back = self._held_back, []
        for request in held:
            self._enqueue(request)
        if changeover.done:
            self._changeover = None
        self._start_waiting()


def _check_policy(policy: str) -> None:
    if policy != "mixed":
        problem = f"replicas with attention workers do not run under {policy}"
        raise InputError("--policy", policy, problem, "leave it out, or use a placement without them")

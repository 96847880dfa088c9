"""KV budgets, step times and route costs of a placement on its cluster, as the simulation needs them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cost_model.base import CostModel
from cost_model.pipeline import PipelineSemantics, under_way
from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import SharedLinks
from hexgen2.placement import Placement, Replica, Route
from hexgen2.prediction.headwise_times import step_times
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.options import Options
from hexgen2.simulator.transfers import RouteCost, binding, route_cost
from runtime.routing.instances import Instance, instances
from runtime.routing.kv_budget import KvBudget, growth_tokens, kv_budgets, outgoing_tokens
from runtime.routing.kv_division import divided, keeps_windows_apart, windowed_account
from runtime.routing.schedulers import needs_instances
from runtime.routing.windowed_room import WindowedAccount, WindowedRoom


class Fleet:
    """What the simulation builds the replicas and routes of one placement from.

    Parameters
    ----------
    options : of the simulation
    costs : the cost model; None: the one that the placement was planned with
    times : step times that are known already, of replicas under the same cost model
    """

    def __init__(
        self,
        placement: Placement,
        cluster: Cluster,
        options: Options,
        costs: CostModel | None = None,
        times: dict[Hashable, StepTimes] | None = None,
    ) -> None:
        self.placement, self._cluster, self._options = placement, cluster, options
        self._times = {} if times is None else times
        self.costs = costs or placement.costs()
        self._budgets, self._windowed = kv_budgets(placement), dict[str, WindowedRoom]()
        if keeps_windows_apart(placement):
            planned = placement.costs()
            for replica in placement.replicas:
                own = divided(placement, replica, planned, self._budgets[replica.id])
                self._budgets[replica.id], self._windowed[replica.id] = own

    def kv_budget(self, replica: Replica) -> KvBudget:
        """An empty KV budget with the replica's KV capacity and batch size, and what the scheduler needs."""
        budget = self._kv_budget(replica)
        if needs_instances(self._options.scheduler):
            budget.know(self._instances[replica.id])
        return budget

    @cached_property
    def _instances(self) -> Mapping[str, Instance]:
        return instances(self.placement, self._cluster, self.costs)

    def _kv_budget(self, replica: Replica) -> KvBudget:
        places = replica.max_batch * self._in_flight_per_place(replica)
        groups = replica.attention_data_parallel
        if replica.role != "prefill":
            places = self._options.max_batch or places
        windowed = self._windowed_account(replica)
        if replica.role == "colocated" and self._options.policy != "mixed":
            # Such a replica queues every request and does its own accounting; only a request that it could
            # never hold is rejected.
            room = kv_capacity_tokens(
                replica, self._cluster, self.costs, self.placement.workers_of(replica.id)
            )
            if windowed is not None:
                room, _ = divided(self.placement, replica, self.costs, room)
            return _AcceptsAll(room, places, groups=groups, windowed=windowed)
        budget = self._budgets[replica.id] * self._in_flight_per_place(replica)
        if replica.role == "prefill":
            return KvBudget(budget, places, groups=groups, windowed=windowed)
        outgoing = outgoing_tokens(replica, self.placement)
        growth = growth_tokens(self.placement)
        return LiveKvBudget(
            budget, places, growth, groups=groups, outgoing_tokens=outgoing, windowed=windowed
        )

    def _windowed_account(self, replica: Replica) -> WindowedAccount | None:
        """An empty account of the layers with a window, if these are kept apart."""
        if (room := self._windowed.get(replica.id)) is None:
            return None
        room = dataclasses.replace(room, tokens=room.tokens * self._in_flight_per_place(replica))
        return windowed_account(self.placement, replica, room)

    def times(self, replica: Replica) -> StepTimes:
        """The step times of a replica."""
        stages = ((*s.gpus, *s.layers, s.attention_data_parallel, s.expert_parallel) for s in replica.stages)
        workers = self.placement.workers_of(replica.id)
        key = (*stages, replica.engine, *((w.gpu, *w.kv_shares) for w in workers))
        if key not in self._times:
            self._times[key] = step_times(replica, workers, self._cluster, self.costs, self._semantics)
        return self._times[key]

    def routes(self, more: Iterable[Route] = ()) -> Mapping[tuple[str, str], RouteCost]:
        """The cost of each route of the placement and of `more`, keyed by the ids of its two replicas."""
        return self._own_routes if not more else self._costs_of(more)

    @cached_property
    def _own_routes(self) -> dict[tuple[str, str], RouteCost]:
        return self._costs_of(())

    def _costs_of(self, more: Iterable[Route]) -> dict[tuple[str, str], RouteCost]:
        shared, links = SharedLinks(self._cluster), self.placement.cost_model.links
        moved = self.costs.kv_tokens_moved
        return binding(
            {
                (route.from_, route.to): route_cost(route, self._cluster, shared, links, moved)
                for route in (*self.placement.routes, *more)
                if route.from_ != route.to
            }
        )

    def _in_flight_per_place(self, replica: Replica) -> int:
        """Requests in flight per request of the batch size: decode pipelines run several micro-batches."""
        if replica.role == "prefill":
            return 1
        return int(under_way(self._semantics, 1, len(replica.stages)))

    @property
    def _semantics(self) -> PipelineSemantics:
        return self.placement.cost_model.pipeline  # type: ignore[return-value]


@dataclass(slots=True)
class LiveKvBudget(KvBudget):
    """A KV budget that is not told of every generated token but asks: `grown` returns the number of tokens
    not yet counted, and `grown_at_most` an upper bound that is faster to compute; `grown_of` returns the
    requests that have such tokens, and all tokens of each. Until something is released, requests only become
    longer, so what has found no room finds none."""

    grown: Callable[[], int] = int
    grown_at_most: Callable[[], int] = int
    grown_of: Callable[[], Iterable[tuple[int, int]]] = tuple
    _no_room_for: float = math.inf
    _no_room_to_prefill: float = math.inf

    def has_room(self, tokens: int, prefill_only: bool, uncounted: int = 0) -> bool:
        if tokens >= (self._no_room_to_prefill if prefill_only else self._no_room_for):
            return False
        most = uncounted + self.grown_at_most()
        if KvBudget.has_room(self, tokens, prefill_only, most):
            return True
        exactly = uncounted + self.grown()
        if exactly < most and KvBudget.has_room(self, tokens, prefill_only, exactly):
            return True
        if uncounted == 0:
            if prefill_only:
                self._no_room_to_prefill = tokens
            else:
                self._no_room_for = tokens
        return False

    def release(self, request_id: Any) -> None:
        self._no_room_for = self._no_room_to_prefill = math.inf
        KvBudget.release(self, request_id)

    def _windows_have_room(self, tokens: int, prefill_only: bool) -> bool:
        growth = None if prefill_only else self.growth_tokens
        return self.windowed is None or self.windowed.has_room(tokens, growth, self.high_water, self.grown_of)


class _AcceptsAll(KvBudget):
    """A KV budget that accepts every request that would fit alone."""

    __slots__ = ()

    def has_room(self, tokens: int, prefill_only: bool, uncounted: int = 0) -> bool:
        return tokens <= self.largest_request_tokens

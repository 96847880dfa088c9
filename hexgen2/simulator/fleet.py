"""A placement on its cluster: what the simulation makes its replicas and routes of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cost_model.base import CostModel
from cost_model.pipeline import PipelineSemantics, under_way
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import SharedLinks
from hexgen2.placement import Placement, Replica, Route
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.batching import Policy
from hexgen2.simulator.transfers import RouteCost, binding, route_cost
from runtime.routing.kv_budget import Room, growth_tokens, kv_budgets


class Fleet:
    """Rooms, times and routes of a placement.

    Parameters
    ----------
    policy : of colocated replicas
    costs : seconds and bytes; None: by the cost model that the placement was made with
    """

    def __init__(
        self, placement: Placement, cluster: Cluster, policy: Policy, costs: CostModel | None = None
    ) -> None:
        self.placement, self._cluster, self._policy = placement, cluster, policy
        self.costs = costs or make_cost_model(
            placement.cost_model.name, placement.model, placement.workload.lengths
        )
        self._budgets = kv_budgets(placement)

    def room(self, replica: Replica) -> Room:
        """Its room for KV cache and its places, all free."""
        places = replica.max_batch * self._at_once(replica)
        if replica.role == "colocated" and self._policy != "mixed":
            # Such an engine takes all that come and keeps the accounts itself; only what it could never
            # hold is refused.
            return _Endless(kv_capacity_tokens(replica, self._cluster, self.costs), places)
        budget = self._budgets[replica.id] * self._at_once(replica)
        if replica.role == "prefill":
            return Room(budget, places)
        return LiveRoom(budget, places, growth_tokens(self.placement))

    def times(self, replica: Replica) -> StepTimes:
        """Seconds of its steps."""
        return StepTimes(replica, self._cluster, self.costs, self._semantics)

    def routes(self, more: Iterable[Route] = ()) -> dict[tuple[str, str], RouteCost]:
        """What a request takes of each route of the placement and of `more`, by the ids of the replicas at
        its ends."""
        shared, links, isl = SharedLinks(self._cluster), self.placement.cost_model.links, self.costs.isl
        return binding(
            {
                (route.from_, route.to): route_cost(route, self._cluster, shared, links, isl)
                for route in (*self.placement.routes, *more)
            }
        )

    def _at_once(self, replica: Replica) -> int:
        """Requests under way for each one in a replica's batch."""
        if replica.role == "prefill":
            return 1
        return int(under_way(self._semantics, 1, len(replica.stages)))

    @property
    def _semantics(self) -> PipelineSemantics:
        return self.placement.cost_model.pipeline  # type: ignore[return-value]


@dataclass(slots=True)
class LiveRoom(Room):
    """A room that need not be told of every token: `grown` says how many requests have made of late, and
    `grown_at_most`, which is quicker, no less."""

    grown: Callable[[], int] = int
    grown_at_most: Callable[[], int] = int

    def has_room(self, tokens: int, prefill_only: bool) -> bool:
        if Room.has_room(self, tokens + self.grown_at_most(), prefill_only):
            return True
        return Room.has_room(self, tokens + self.grown(), prefill_only)


class _Endless(Room):
    """Room for whatever could be held alone."""

    __slots__ = ()

    def has_room(self, tokens: int, prefill_only: bool) -> bool:
        return tokens <= self.kv_budget_tokens

"""What a solution is worth, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexgen2.region import Region
from hexgen2.search.flow.max_flow import Flow, FlowNetwork, settled
from hexgen2.search.planning.plan import GroupPlan, PlannedStage
from hexgen2.search.problem import Group, NodeCounts, Solution
from hexgen2.search.ties import ranks_above


@dataclass(frozen=True)
class PlannedReplica:
    """A group with the plan that it runs; index is its place in the solution.

    Attributes
    ----------
    own : the plan with which it serves most by itself, where it works for others with another size of chunks
    beside_req_s : what a decode replica serves beside the prompts that are computed for it, if it is known
        how long that takes
    """

    index: int
    group: Group
    plan: GroupPlan
    own: GroupPlan | None = None
    beside_req_s: float | None = None

    @property
    def capacity_req_s(self) -> float:
        """What it serves by itself, or beside the others, in requests/s."""
        return self.plan.capacity_req_s if self.beside_req_s is None else self.beside_req_s

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        return self.plan.stages


@dataclass(frozen=True)
class Evaluation:
    """What a solution is worth, and why: its replicas, the flow network between them, and the maximum flow.

    Attributes
    ----------
    prefill, decode, colocated : replicas by role
    senders, receivers : prefill and decode replicas, and after them colocated ones that work for others
    network, flow : between senders and receivers; the capacity of a colocated one is its share
    regions : of the colocated replicas that may work for others
    score : guides the local search: throughput less cost, plus a small share of the replicas' capacities
    alone : [C] requests/s that each colocated replica serves by itself; where colocated replicas share links
        with KV routes, they take precedence
    cost_req_s, idle_req_s : what it costs to get to this solution, over time (see Evaluator.way_cost)
    """

    solution: Solution
    prefill: tuple[PlannedReplica, ...]
    decode: tuple[PlannedReplica, ...]
    network: FlowNetwork
    flow: Flow
    score: float
    colocated: tuple[PlannedReplica, ...]
    alone: np.ndarray
    cost_req_s: float = 0.0
    idle_req_s: float = 0.0
    senders: tuple[PlannedReplica, ...] = ()
    receivers: tuple[PlannedReplica, ...] = ()
    regions: tuple[Region, ...] = ()

    def region_of(self, replica: PlannedReplica) -> Region | None:
        """What the replica can do if it is a mixed one, else None."""
        if replica.index not in self.mixed:
            return None
        return self.regions[[r.index for r in self.colocated].index(replica.index)]

    @cached_property
    def mixed(self) -> frozenset[int]:
        """Which groups are colocated ones that work for others, by their places in the solution."""
        ends = {replica.index for replica in (*self.senders, *self.receivers)}
        return frozenset(replica.index for replica in self.colocated if replica.index in ends)

    def role_of(self, replica: PlannedReplica) -> str:
        """The replica's role in a placement: "mixed" if it is colocated and works for others, too."""
        return "mixed" if replica.index in self.mixed else replica.group.role

    @cached_property
    def plans(self) -> dict[tuple[str, NodeCounts], GroupPlan]:
        """The plan of each group that works for itself."""
        return {(r.group.role, r.group.counts): r.own or r.plan for r in self.replicas}

    @cached_property
    def routes(self) -> np.ndarray:
        """[P, D] what each route carries, in requests/s: of all maximum flows the one to read (see
        flow.settled)."""
        return settled(self.network, self.flow).routes

    @property
    def kv_limited(self) -> bool:
        """Whether KV routes, and not the replicas, limit the flow."""
        return self.flow.value < min(self.network.prefill.sum(), self.network.decode.sum()) * (1 - 1e-6)

    @property
    def req_s(self) -> float:
        return self.flow.value + float(self.alone.sum())

    @property
    def replicas(self) -> tuple[PlannedReplica, ...]:
        """All of them, prefill, decode, colocated."""
        return (*self.prefill, *self.decode, *self.colocated)

    @property
    def net_req_s(self) -> float:
        """The objective of the search: throughput less the cost of getting there."""
        return self.req_s - self.cost_req_s

    @property
    def rank(self) -> tuple[float, float, float]:
        """Greater is better. Ties in net throughput go to the solution that changes least, then to the higher
        score."""
        return self.net_req_s, -self.idle_req_s, self.score

    def better_than(self, other: Evaluation) -> bool:
        """Whether it ranks above the other."""
        return ranks_above(self.rank, other.rank)

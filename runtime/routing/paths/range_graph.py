"""Which replica may follow which where replicas hold overlapping ranges of layers, and the flow over them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cluster_specs.loader import resolve
from hexgen2.cluster import Cluster
from hexgen2.layer_ranges import may_follow, passing, range_of
from hexgen2.placement import Placement

COORDINATOR = ""
"""Where requests come from, in place of a replica."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A replica on the path of a request, and the layers [first, end) that it computes there."""

    replica: str
    first: int
    end: int

    @property
    def layers(self) -> int:
        """How many these are."""
        return self.end - self.first


RangePath = tuple[Hop, ...]
"""Each layer once, in order."""


@dataclass(frozen=True, eq=False)
class RangeGraph:
    """Replicas as vertices, in order of the placement.

    Attributes
    ----------
    ranges : the layers [first, end) of each replica
    after : by replica, and COORDINATOR, those at which a request may go on
    flow : requests/s from one to the next, where there are any; only proportions matter
    layers : of the model
    """

    ranges: dict[str, tuple[int, int]]
    after: dict[str, tuple[str, ...]]
    flow: dict[tuple[str, str], float]
    layers: int

    @classmethod
    def of(cls, placement: Placement, lost: Collection[str] = ()) -> RangeGraph:
        """The graph of a placement; without the replicas that are lost, the flow is solved anew."""
        assert placement.layer_ranges is not None
        replicas = [replica for replica in placement.replicas if replica.id not in lost]
        partial = placement.layer_ranges.partial_inference
        after = {
            a.id: tuple(b.id for b in replicas if a is not b and may_follow(a, b, partial)) for a in replicas
        }
        after[COORDINATOR] = tuple(replica.id for replica in replicas if range_of(replica)[0] == 0)
        flow = _max_flow(placement, after) if lost else _planned_flow(placement)
        return cls({r.id: range_of(r) for r in replicas}, after, flow, placement.model.layers)

    def hop(self, after: str, replica: str) -> Hop:
        """What a replica computes of a request that comes from another, or from the coordinator."""
        return Hop(replica, self.end_of(after), self.ranges[replica][1])

    def end_of(self, replica: str) -> int:
        """Layers that a request has passed after a replica."""
        return self.ranges[replica][1] if replica != COORDINATOR else 0

    @cached_property
    def _last_first(self) -> list[str]:
        return [*sorted(self.ranges, key=lambda replica: -self.ranges[replica][1]), COORDINATOR]

    def onward(self, may: Callable[[str, Hop], bool] = lambda at, hop: True) -> dict[str, list[Hop]]:
        """By replica, and COORDINATOR, the hops by which a request can reach the last layer, if it `may` take
        them; none for replicas from which it can't, or which hold the last layer."""
        found: dict[str, list[Hop]] = {}
        for at in self._last_first:
            hops = (self.hop(at, b) for b in self.after[at])
            found[at] = [
                hop for hop in hops if (hop.end == self.layers or found[hop.replica]) and may(at, hop)
            ]
        return found

    @property
    def connected(self) -> bool:
        """Whether any path leads through all layers."""
        return bool(self.onward()[COORDINATOR])


def _planned_flow(placement: Placement) -> dict[tuple[str, str], float]:
    entering = passing(placement.replicas, placement.routes)
    flow = {(COORDINATOR, name): each.entering for name, each in entering.items()}
    flow |= {(route.from_, route.to): route.flow_req_s for route in placement.routes}
    return {pair: req_s for pair, req_s in flow.items() if req_s > 0}


def _max_flow(placement: Placement, after: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], float]:
    """The max flow over some of a placement's replicas (Helix, section 4.3), as wide as these and the links
    between them."""
    import networkx as nx

    graph, layers = nx.DiGraph(), placement.model.layers
    graph.add_nodes_from((COORDINATOR, "sink"))
    carries = link_req_s(placement)
    for replica in placement.replicas:
        name = replica.id
        if name not in after:
            continue
        graph.add_edge((name, "in"), (name, "out"), capacity=replica.capacity_req_s)
        for b in after[name]:
            graph.add_edge((name, "out"), (b, "in"), capacity=carries(name, b))
        if range_of(replica)[1] == layers:
            graph.add_edge((name, "out"), "sink")
    for name in after[COORDINATOR]:
        graph.add_edge(COORDINATOR, (name, "in"))
    _, flow = nx.maximum_flow(graph, COORDINATOR, "sink")
    pairs = {(COORDINATOR, name): flow[COORDINATOR][name, "in"] for name in after[COORDINATOR]}
    pairs |= {
        (name, b): flow[name, "out"][b, "in"] for name in after if name != COORDINATOR for b in after[name]
    }
    least = 1e-9 * max(pairs.values(), default=0.0)
    return {pair: req_s for pair, req_s in pairs.items() if req_s > least}


def link_req_s(placement: Placement) -> Callable[[str, str], float]:
    """Requests/s whose activations the link between the first GPUs of two replicas carries."""
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    tokens = placement.workload.isl + placement.workload.osl
    bytes_per_req = tokens * placement.costs().activation_bytes_per_token
    first = {replica.id: cluster.index(replica.stages[0].gpus[0]) for replica in placement.replicas}

    def carried(a: str, b: str) -> float:
        return float(cluster.bandwidth_bytes_s[first[a], first[b]]) / bytes_per_req

    return carried

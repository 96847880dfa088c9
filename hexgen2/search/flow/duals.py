"""Duals of the flow: what its bottlenecks are worth, and how much a step of the search can gain at most.

Where routes share links, the flow is a linear program, and each capacity has a dual: y of each replica and of
each shared resource, w of each route. By weak duality they bound the flow of a similar solution: keep the
duals of what stays, and choose those of what is new so that for every route

    y_p + y_d + w_pd + sum over resources of busy_s y >= 1,

then no flow exceeds the sum of duals times capacities. This rules out most steps without solving a program
for each, and orders the rest by what they promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hexgen2.search.flow.max_flow import FlowNetwork, capacity_duals
from hexgen2.search.flow.routes import RouteUse
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.ties import first_largest

Stages = tuple[PlannedStage, ...]


@dataclass(frozen=True)
class _Replica:
    """A replica with its dual, and those of the ports of each of its stages [L]; the dual of a new replica is
    not known yet, those of its ports are 0."""

    stages: Stages
    capacity_req_s: float
    dual: float | None
    ports: np.ndarray


class Duals:
    """The duals of one evaluated flow.

    Parameters
    ----------
    prefill, decode : stages of the replicas [P], [D] in the network's order
    use_of : what a request of a route between two replicas occupies
    links, layers : how resources are numbered (see shared_use.shared_use)
    """

    def __init__(
        self,
        network: FlowNetwork,
        prefill: Sequence[Stages],
        decode: Sequence[Stages],
        use_of: Callable[[Stages, Stages], RouteUse],
        links: int,
        layers: int,
    ) -> None:
        self._use_of, self._links, self._layers = use_of, links, layers
        y_prefill, y_decode, y_resource = capacity_duals(network)
        # Without sharing, only the routes' own capacities limit them.
        self._links_dual = y_resource[:links] if network.shared else np.zeros(links)
        self._link_duals = self._links_dual.tolist()
        p = len(prefill)
        ports = y_resource[links:].reshape(p + len(decode), layers) if len(y_resource) > links else None
        free = np.zeros(layers)
        self._known = {
            "prefill": {
                s: (float(y), free if ports is None else ports[i])
                for i, (s, y) in enumerate(zip(prefill, y_prefill, strict=True))
            },
            "decode": {
                s: (float(y), free if ports is None else ports[p + i])
                for i, (s, y) in enumerate(zip(decode, y_decode, strict=True))
            },
        }
        self._free = free
        self._pairs: dict[tuple[Stages, Stages], tuple[float, float]] = {}

    def flow_bound(
        self, prefill: Sequence[tuple[Stages, float]], decode: Sequence[tuple[Stages, float]]
    ) -> float:
        """Requests/s that no flow between replicas of these stages and capacities (requests/s) exceeds."""
        left = [self._with_dual("prefill", *replica) for replica in prefill]
        right = [self._with_dual("decode", *replica) for replica in decode]
        if not left or not right:
            return 0.0
        pairs = np.array([[self._pair(p, d) for d in right] for p in left])
        missing, routes = pairs[..., 0], pairs[..., 1]
        # New prefill replicas against the decode replicas with known duals; then new decode replicas.
        y_left = np.array([np.nan if p.dual is None else p.dual for p in left])
        y_right = np.array([np.nan if d.dual is None else d.dual for d in right])
        known = ~np.isnan(y_right)
        for i in np.flatnonzero(np.isnan(y_left)):
            gaps, limits = missing[i, known] - y_right[known], routes[i, known]
            y_left[i] = _cheapest(left[i].capacity_req_s, gaps, limits)
        for j in np.flatnonzero(~known):
            y_right[j] = _cheapest(right[j].capacity_req_s, missing[:, j] - y_left, routes[:, j])
        unpaid = np.maximum(0.0, missing - y_left[:, None] - y_right[None, :])
        ports = math.fsum(float(replica.ports.sum()) for replica in (*left, *right))
        return float(
            (y_left * [p.capacity_req_s for p in left]).sum()
            + (y_right * [d.capacity_req_s for d in right]).sum()
            + (unpaid * routes).sum()
            + self._links_dual.sum()
            + ports
        )

    def toll(self, use: RouteUse) -> float:
        """Requests/s that others lose for each request/s on a route, on links, network cards and uplinks."""
        duals = self._link_duals
        return math.fsum([busy_s * duals[r] for r, busy_s in use.pairs if r < self._links])

    def _with_dual(self, role: str, stages: Stages, capacity_req_s: float) -> _Replica:
        """A replica with its duals, where they are known."""
        dual, ports = self._known[role].get(stages, (None, self._free))
        return _Replica(stages, capacity_req_s, dual, ports)

    def _pair(self, prefill: _Replica, decode: _Replica) -> tuple[float, float]:
        """1 less what the shared resources of a route contribute to its constraint, and its capacity in
        requests/s."""
        key = (prefill.stages, decode.stages)
        found = self._pairs.get(key)
        if found is None:
            use = self._use_of(*key)
            duals = np.concatenate([self._links_dual, prefill.ports, decode.ports])
            found = 1.0 - float((use.busy_s * duals[use.resources]).sum()), 1 / use.transfer_s
            self._pairs[key] = found
        return found


def _cheapest(capacity: float, gaps: np.ndarray, limits: np.ndarray) -> float:
    """The dual y >= 0 that minimises capacity y + sum limits max(0, gaps - y): one of the gaps [n], or 0.
    Capacity and limits [n] are in requests/s."""
    candidates = np.append(np.maximum(gaps, 0.0), 0.0)
    unpaid = (np.maximum(0.0, gaps[None, :] - candidates[:, None]) * limits).sum(axis=1)
    return float(candidates[first_largest(-(capacity * candidates + unpaid))])

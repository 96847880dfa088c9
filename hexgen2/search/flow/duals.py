"""What the flow's bottlenecks are worth, and how much a step can gain at most.

Where routes share links, the flow is a linear program, and its duals price every capacity: y of each
replica, of each shared resource, w of each route. Weak duality bounds the flow of a solution nearby:
keep the prices of what stays, price what is new so that every route is paid for,

    y_p + y_d + w_pd + sum over resources of busy_s y >= 1,

and no flow exceeds the sum of prices times capacities. So most steps are ruled out without a program of
their own, and the rest can be tried in the order of their promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hexgen2.search.flow.max_flow import FlowNetwork, shadow_prices
from hexgen2.search.flow.routes import RouteUse
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.ties import first_largest

Stages = tuple[PlannedStage, ...]


@dataclass(frozen=True)
class _Priced:
    """A replica as the bound sees it: its price, capacity in requests/s, and the price of the ports of each
    of its stages; new ones have no price yet, and ports for nothing."""

    stages: Stages
    capacity_req_s: float
    price: float | None
    ports: np.ndarray


class Prices:
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
        y_prefill, y_decode, y_resource = shadow_prices(network)
        # Without sharing, links cost nothing but the routes' own limits.
        self._links_price = y_resource[:links] if network.shared else np.zeros(links)
        self._link_prices = self._links_price.tolist()
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

    def limit(self, prefill: Sequence[tuple[Stages, float]], decode: Sequence[tuple[Stages, float]]) -> float:
        """Requests/s that no flow between replicas of these stages and capacities exceeds."""
        left = [self._priced("prefill", *replica) for replica in prefill]
        right = [self._priced("decode", *replica) for replica in decode]
        if not left or not right:
            return 0.0
        pairs = np.array([[self._pair(p, d) for d in right] for p in left])
        missing, routes = pairs[..., 0], pairs[..., 1]
        # New prefill replicas against the decode replicas that have a price; then new decode replicas.
        y_left = np.array([np.nan if p.price is None else p.price for p in left])
        y_right = np.array([np.nan if d.price is None else d.price for d in right])
        priced = ~np.isnan(y_right)
        for i in np.flatnonzero(np.isnan(y_left)):
            gaps, limits = missing[i, priced] - y_right[priced], routes[i, priced]
            y_left[i] = _cheapest(left[i].capacity_req_s, gaps, limits)
        for j in np.flatnonzero(~priced):
            y_right[j] = _cheapest(right[j].capacity_req_s, missing[:, j] - y_left, routes[:, j])
        unpaid = np.maximum(0.0, missing - y_left[:, None] - y_right[None, :])
        ports = math.fsum(float(replica.ports.sum()) for replica in (*left, *right))
        return float(
            (y_left * [p.capacity_req_s for p in left]).sum()
            + (y_right * [d.capacity_req_s for d in right]).sum()
            + (unpaid * routes).sum()
            + self._links_price.sum()
            + ports
        )

    def toll(self, use: RouteUse) -> float:
        """Requests/s that a request/s on a route takes from others, on links, network cards and uplinks."""
        price = self._link_prices
        return math.fsum([busy_s * price[r] for r, busy_s in use.pairs if r < self._links])

    def _priced(self, role: str, stages: Stages, capacity_req_s: float) -> _Priced:
        price, ports = self._known[role].get(stages, (None, self._free))
        return _Priced(stages, capacity_req_s, price, ports)

    def _pair(self, prefill: _Priced, decode: _Priced) -> tuple[float, float]:
        """What of 1 the shared resources of a route do not pay, and the route's own requests/s."""
        key = (prefill.stages, decode.stages)
        found = self._pairs.get(key)
        if found is None:
            use = self._use_of(*key)
            price = np.concatenate([self._links_price, prefill.ports, decode.ports])
            found = 1.0 - float((use.busy_s * price[use.resources]).sum()), 1 / use.transfer_s
            self._pairs[key] = found
        return found


def _cheapest(capacity: float, gaps: np.ndarray, limits: np.ndarray) -> float:
    """The price y >= 0 that minimises capacity y + sum limits max(0, gaps - y): at a gap, or 0."""
    candidates = np.append(np.maximum(gaps, 0.0), 0.0)
    unpaid = (np.maximum(0.0, gaps[None, :] - candidates[:, None]) * limits).sum(axis=1)
    return float(candidates[first_largest(-(capacity * candidates + unpaid))])

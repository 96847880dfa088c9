"""Max flow from the coordinator through prefill replicas, KV routes and decode replicas.

HexGen-2, section 3.3. The paper gives each replica an in and an out node; since the coordinator's
own links are not limited here (token ids are some kilobytes a request), the edge (in, out) and the
coordinator's edge are in series and stand as one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

SCALE = 1e9
"""Integer capacities of the solver per unit of the largest possible flow."""


@dataclass(frozen=True)
class FlowNetwork:
    """Capacities in requests/s: prefill [P], decode [D], routes [P, D]."""

    prefill: np.ndarray
    decode: np.ndarray
    routes: np.ndarray


@dataclass(frozen=True)
class Flow:
    """A maximum flow: its value and what each route carries, [P, D], in requests/s."""

    value: float
    routes: np.ndarray


def solve(network: FlowNetwork) -> Flow:
    """A maximum flow of the network, never above any capacity.

    The solver is integer: capacities are rounded down at 1e-9 of the flow's trivial limit.
    """
    p, d = network.routes.shape
    limit = min(network.prefill.sum(), network.decode.sum())
    if limit <= 0:
        return Flow(0.0, np.zeros((p, d)))
    unit = SCALE / limit
    source, sink = p + d, p + d + 1
    tails = np.concatenate([np.full(p, source), np.repeat(np.arange(p), d), p + np.arange(d)])
    heads = np.concatenate([np.arange(p), np.tile(p + np.arange(d), p), np.full(d, sink)])
    capacities = np.concatenate([network.prefill, network.routes.ravel(), network.decode])
    whole = np.floor(np.minimum(capacities, limit) * unit).astype(np.int64)
    solver = max_flow.SimpleMaxFlow()
    arcs = solver.add_arcs_with_capacity(tails, heads, whole)
    status = solver.solve(source, sink)
    if status != solver.OPTIMAL:
        raise RuntimeError(f"max flow ended with status {status}")
    routes = solver.flows(arcs[p : p + p * d]).reshape(p, d) / unit
    return Flow(solver.optimal_flow() / unit, routes)


def balance(network: FlowNetwork, flow: Flow, rounds: int = 20) -> Flow:
    """A flow of the same value that loads the replicas of each role as evenly as the routes allow.

    A maximum flow may fill one replica and leave its twin idle. Here the capacities of each role shrink
    from what they are (slack 1) towards the role's mean utilisation (slack 0), as far as the value can
    still be carried.
    """
    if flow.value <= 0:
        return flow
    mean_prefill, mean_decode = flow.value / network.prefill.sum(), flow.value / network.decode.sum()
    wanted = flow.value * (1 - 1e-7)
    best, low, high, slack = flow, 0.0, 1.0, 0.0
    for _ in range(rounds):
        tried = solve(
            FlowNetwork(
                network.prefill * (mean_prefill + slack * (1 - mean_prefill)),
                network.decode * (mean_decode + slack * (1 - mean_decode)),
                network.routes,
            )
        )
        if tried.value >= wanted:
            best, high = tried, slack
        else:
            low = slack
        if high - low < 1e-6:
            break
        slack = (low + high) / 2
    return best

"""Max flow from the coordinator through prefill replicas, KV routes and decode replicas.

HexGen-2, section 3.3. The paper gives each replica an in and an out node; since the coordinator's
own links are not limited here (token ids are some kilobytes a request), the edge (in, out) and the
coordinator's edge are in series and stand as one.

Where routes share a link, a network card or an uplink, it is a flow with side constraints: a linear program.
Two cheaper solutions are tried first: shares in proportion to the capacities, and the max flow without side
constraints; each is optimal if it respects them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from ortools.graph.python import max_flow

from hexgen2.search.flow.shared_use import SharedUse
from hexgen2.search.linear_program import LinearProgram, Optimum
from hexgen2.search.sparse_rows import SparseRows
from hexgen2.search.ties import TOLERANCE, spread

ROUNDS, FEW_ROUNDS, MANY_PAIRS = 10, 2, 10_000
"""Halvings of the slack to which replicas are loaded evenly; the second with more routes than these."""
SCALE = 1e12
"""The solver's integer capacity that stands for the largest possible flow."""

GLOP_PARAMETERS = "use_preprocessing:false"
"""For programs this small, preprocessing takes longer than it saves."""


@dataclass(frozen=True)
class FlowNetwork:
    """Capacities in requests/s: prefill [P], decode [D], routes [P, D]; and what the routes share, None if
    they share nothing."""

    prefill: np.ndarray
    decode: np.ndarray
    routes: np.ndarray
    shared: SharedUse | None = None

    def carries(self, flow: np.ndarray) -> bool:
        """Whether the routes can carry a flow [P, D], each alone and all together."""
        return bool((flow <= self.routes * (1 + TOLERANCE)).all()) and (
            self.shared is None or self.shared.carries(flow)
        )


@dataclass(frozen=True)
class Flow:
    """A flow: its value and what each route carries [P, D], in requests/s."""

    value: float
    routes: np.ndarray


def solve(network: FlowNetwork) -> Flow:
    """A maximum flow of the network, never above any capacity by more than rounding."""
    even = _in_proportion(network)
    if network.carries(even.routes):
        return even
    pairwise = without_sharing(network)
    if network.shared is None or network.shared.carries(pairwise.routes):
        return pairwise
    return _with_sharing(network)


def _in_proportion(network: FlowNetwork) -> Flow:
    """The flow that the replicas alone allow, with the share of each pair in proportion to their
    capacities."""
    p, d = network.prefill.sum(), network.decode.sum()
    if p <= 0 or d <= 0:
        return Flow(0.0, np.zeros(network.routes.shape))
    value = min(p, d)
    return Flow(float(value), np.multiply.outer(network.prefill / p, network.decode / d) * value)


def without_sharing(network: FlowNetwork) -> Flow:
    """A maximum flow if every route has its links to itself.

    The solver is integer: capacities are rounded down at 1e-12 of the flow's trivial limit.
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


def balance(network: FlowNetwork, flow: Flow) -> Flow:
    """A flow of the same value that loads the replicas of each role as evenly as the routes allow.

    A maximum flow may fill one replica and leave its twin idle. Here the capacities of each role shrink
    from what they are (slack 1) towards the role's mean utilisation (slack 0), as far as the value can
    still be carried; the slack is found to 2^-ROUNDS.
    """
    if flow.value <= 0:
        return flow
    rounds = ROUNDS if network.routes.size <= MANY_PAIRS else FEW_ROUNDS
    mean_prefill, mean_decode = flow.value / network.prefill.sum(), flow.value / network.decode.sum()
    wanted = flow.value * (1 - 1e-9)
    best, at, low, high, slack = flow, network, 0.0, 1.0, 0.0
    for _ in range(rounds + 1):
        shrunk = replace(
            network,
            prefill=network.prefill * (mean_prefill + slack * (1 - mean_prefill)),
            decode=network.decode * (mean_decode + slack * (1 - mean_decode)),
        )
        tried = solve(shrunk)
        if tried.value >= wanted:
            best, at, high = tried, shrunk, slack
        else:
            low = slack
        if high == low:
            break
        slack = (low + high) / 2
    return settled(at, best)


def few_routes(network: FlowNetwork, flow: Flow) -> Flow:
    """A flow with the same load of every replica on at most P + D - 1 routes (the north-west corner rule of
    the transportation problem) if these can carry it, else the given one, which may use every pair."""
    left, right = flow.routes.sum(axis=1), flow.routes.sum(axis=0)
    routes = np.zeros(flow.routes.shape)
    i = j = 0
    while i < len(left) and j < len(right):
        routes[i, j] = moved = min(left[i], right[j])
        left[i] -= moved
        right[j] -= moved
        i, j = (i + 1, j) if left[i] <= right[j] else (i, j + 1)
    return Flow(flow.value, routes) if network.carries(routes) else flow


def settled(network: FlowNetwork, flow: Flow) -> Flow:
    """The maximum flow to report. Many flows have the greatest value, and a solver's pivots decide which it
    returns. This one is the same for every solver: shares in proportion to the capacities if the routes carry
    them, else the flow with the least transfer time (with small weights that tell equal routes apart). If the
    solver does not find it, the given one."""
    even = _in_proportion(network)
    if network.carries(even.routes) or flow.value <= 0:
        return even
    matrix, limits = _constraints(network)
    routes = network.routes.ravel()
    transfer_s = np.divide(1.0, routes, out=np.zeros(routes.size), where=routes > 0)
    try:
        found = _solved(
            routes,
            matrix.then(np.full(routes.size, -1.0)),
            np.append(limits, -flow.value * (1 - 1e-10)),
            -(transfer_s / transfer_s.mean() + 0.1 * spread(routes.size)),
        )
    except RuntimeError:
        return flow
    least = _within(network, found.x)
    return least if least.value >= flow.value * (1 - TOLERANCE) else flow


def _with_sharing(network: FlowNetwork) -> Flow:
    """max sum f under the capacities of replicas and routes, and sum busy_s f <= 1 for each shared
    resource."""
    found = _solved(network.routes.ravel(), *_constraints(network))
    return _within(network, found.x)


def _constraints(network: FlowNetwork) -> tuple[SparseRows, np.ndarray]:
    """Matrix [r, P * D] and limits [r]: matrix @ flow <= limits says what replicas and shared links carry."""
    p, d = network.routes.shape
    none = np.zeros(0, dtype=np.int64)
    busy_s, user, entries = np.zeros(0), none, none
    if network.shared:
        busy_s, user, entries = network.shared.limiting(network.prefill, network.decode)
    # Row by row: the routes of each prefill replica, of each decode replica, and of each shared resource.
    route = np.arange(p * d)
    columns = np.concatenate([route, route.reshape(p, d).T.ravel(), user])
    values = np.concatenate([np.ones(2 * p * d), busy_s])
    rows = np.repeat(np.arange(p + d + len(entries)), np.concatenate([np.full(p, d), np.full(d, p), entries]))
    limits = np.concatenate([network.prefill, network.decode, np.ones(len(entries))])
    return SparseRows.of(rows, columns, values, (len(limits), p * d)), limits


def _solved(
    most: np.ndarray, matrix: SparseRows, limits: np.ndarray, weights: np.ndarray | None = None
) -> Optimum:
    """max sum weights x (1 each by default) over 0 <= x <= most and matrix x <= limits.

    Raises
    ------
    RuntimeError : the solver found nothing, although x = 0 is feasible
    """
    gain = np.ones(len(most)) if weights is None else weights
    used = np.flatnonzero(most > 0)
    if len(used) < len(most):
        gain, matrix = gain[used], matrix.only(used)
    program = LinearProgram(gain, matrix, np.full(len(limits), -np.inf), limits, most[used])
    found = program.solve(GLOP_PARAMETERS) or program.solve()
    if found is None:
        raise RuntimeError("the flow's linear program has no solution")
    if len(used) == len(most):
        return found
    x = np.zeros(len(most))
    x[used] = found.x
    return replace(found, x=x)


def capacity_duals(network: FlowNetwork) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Duals of the linear program: what one more unit of capacity is worth, of each prefill replica [P], each
    decode replica [D] (both in requests/s per request/s), and each shared resource [R] (in requests/s)."""
    p, d = network.routes.shape
    shared = network.shared
    none = np.zeros(0, dtype=np.int64)
    resource, user, busy_s = (shared.resource, shared.route, shared.busy_s) if shared else (none, none, none)
    used, row = np.unique(resource, return_inverse=True)
    route = np.arange(p * d)
    rows = np.concatenate([route // d, p + route % d, p + d + row])
    values = np.concatenate([np.ones(2 * p * d), busy_s])
    limits = np.concatenate([network.prefill, network.decode, np.ones(len(used))])
    columns = np.concatenate([route, route, user])
    matrix = SparseRows.of(rows, columns, values, (len(limits), p * d))
    duals = np.maximum(0.0, _solved(network.routes.ravel(), matrix, limits).duals)
    of_resources = np.zeros(shared.count if shared else 0)
    of_resources[used] = duals[p + d :]
    return duals[:p], duals[p : p + d], of_resources


def _within(network: FlowNetwork, routes: np.ndarray) -> Flow:
    """A solver's flow, scaled down by the little that it may exceed a capacity."""
    flow = np.clip(routes.reshape(network.routes.shape), 0.0, network.routes)
    sides = ((flow.sum(axis=1), network.prefill), (flow.sum(axis=0), network.decode))
    over = [np.divide(sent, most, out=np.zeros_like(most), where=most > 0) for sent, most in sides]
    if network.shared is not None:
        over.append(network.shared.loads(flow))
    flow = flow / max(1.0, *(float(excess.max(initial=0.0)) for excess in over))
    return Flow(float(flow.sum()), flow)

"""How much of both phases mixed replicas do, for themselves and for others.

Where links carry all KV caches, a knapsack says it (hexgen2/search/knapsack.py); elsewhere the flow between
all replicas is a linear program, with their regions (hexgen2/region.py) for capacities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array

from hexgen2.region import Region
from hexgen2.search.flow.max_flow import GLOP_PARAMETERS, FlowNetwork
from hexgen2.search.linear_program import LinearProgram


class Share(NamedTuple):
    """What a mixed replica does, in requests/s: those that it serves alone, prompts that it computes for
    others, and answers that it decodes to prompts of others."""

    alone: float
    sent: float
    received: float


def shares_by_program(
    network: FlowNetwork, regions: Sequence[Region], resource: np.ndarray, at: np.ndarray, busy_s: np.ndarray
) -> list[Share]:
    """What each mixed replica does in a flow of the greatest value, under the links that routes share.

    Parameters
    ----------
    network : between senders [S] and receivers [R], the last of which are the mixed replicas, of whom no
        capacity counts but that of their regions
    resource, at, busy_s : [k] a request that mixed replica at[k] serves alone occupies the shared resource
        for so many seconds
    """
    senders, receivers = network.routes.shape
    mixed, pairs = len(regions), senders * receivers
    first_p, first_d = senders - mixed, receivers - mixed
    row: list[np.ndarray] = []
    column: list[np.ndarray] = []
    value: list[np.ndarray] = []
    limits: list[float] = []

    def entries(columns: np.ndarray, values: np.ndarray | float) -> None:
        row.append(np.full(len(columns), len(limits)))
        column.append(columns)
        value.append(np.broadcast_to(values, len(columns)))

    route = np.arange(pairs).reshape(senders, receivers)
    for i in range(first_p):
        entries(route[i], 1.0)
        limits.append(float(network.prefill[i]))
    for j in range(first_d):
        entries(route[:, j], 1.0)
        limits.append(float(network.decode[j]))
    for k, region in enumerate(regions):
        for a, b in region.edges:
            entries(route[first_p + k], a)
            entries(route[:, first_d + k], b)
            entries(np.array([pairs + k]), a + b)
            limits.append(1.0)
    shared = network.shared
    if shared is not None:
        used, numbers = np.unique(np.concatenate([shared.resource, resource]), return_inverse=True)
        row.append(numbers + len(limits))
        column.append(np.concatenate([shared.route, pairs + at]))
        value.append(np.concatenate([shared.busy_s, busy_s]))
        limits += [1.0] * len(used)
    most = np.concatenate([network.routes.ravel(), np.full(mixed, np.inf)])
    most[route[first_p + np.arange(mixed), first_d + np.arange(mixed)]] = 0.0
    cells = (np.concatenate(value), (np.concatenate(row), np.concatenate(column)))
    matrix = csr_array(coo_array(cells, shape=(len(limits), len(most))))
    # Of equal flows, that which moves fewer KV caches.
    gain = np.concatenate([np.full(pairs, 1 - 1e-6), np.ones(mixed)])
    used = np.flatnonzero(most > 0)
    program = LinearProgram(
        gain[used], matrix[:, used], np.full(len(limits), -np.inf), np.array(limits), most[used]
    )
    found = program.solve(GLOP_PARAMETERS) or program.solve()
    if found is None:
        raise RuntimeError("the linear program of mixed replicas has no solution")
    x = np.zeros(len(most))
    x[used] = found.x
    flow, alone = np.maximum(0.0, x[:pairs]).reshape(senders, receivers), x[pairs:]
    sent, received = flow[first_p:].sum(axis=1), flow[:, first_d:].sum(axis=0)
    return [Share(*map(float, each)) for each in zip(np.maximum(0.0, alone), sent, received, strict=True)]

"""How much of both phases mixed replicas do, for themselves and for others.

Where links carry all KV caches, a knapsack says it (hexgen2/search/knapsack.py); elsewhere the flow between
all replicas is a linear program, with their regions (hexgen2/region.py) for capacities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hexgen2.region import Region
from hexgen2.search.flow.max_flow import GLOP_PARAMETERS, FlowNetwork
from hexgen2.search.linear_program import LinearProgram
from hexgen2.search.sparse_rows import SparseRows

MOVED = 1e-6
"""By so much less counts a request whose KV cache moves: of equal flows, that which moves fewer."""


class Share(NamedTuple):
    """What a mixed replica does, in requests/s: those that it serves alone, prompts that it computes for
    others, and answers that it decodes to prompts of others."""

    alone: float
    sent: float
    received: float


class MixedFlow(NamedTuple):
    """A flow's requests/s, those included that mixed replicas serve alone, and what each of these does."""

    req_s: float
    shares: list[Share]


def flow_by_program(
    network: FlowNetwork, regions: Sequence[Region], resource: np.ndarray, at: np.ndarray, busy_s: np.ndarray
) -> MixedFlow:
    """A flow of the greatest value, under the links that routes share.

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
    sides = np.array([len(region.edges) for region in regions])
    edges = np.array([edge for region in regions for edge in region.edges])
    # The rows: prefill replicas, decode replicas, the sides of each region, and the shared resources.
    side, owner = first_p + first_d + np.arange(len(edges)), np.repeat(np.arange(mixed), sides)
    limits = np.concatenate([network.prefill[:first_p], network.decode[:first_d], np.ones(len(edges))])
    route = np.arange(pairs).reshape(senders, receivers)
    sent, received = route[:first_p], route[:, :first_d]
    entries = [
        (sent // receivers, sent, np.ones(sent.shape)),
        (first_p + received % receivers, received, np.ones(received.shape)),
        (np.repeat(side, receivers), route[first_p + owner], np.repeat(edges[:, 0], receivers)),
        (np.repeat(side, senders), route.T[first_d + owner], np.repeat(edges[:, 1], senders)),
        (side, pairs + owner, edges.sum(axis=1)),
    ]
    shared = network.shared
    if shared is not None:
        links, numbers = np.unique(np.concatenate([shared.resource, resource]), return_inverse=True)
        on_links = np.concatenate([shared.route, pairs + at]), np.concatenate([shared.busy_s, busy_s])
        entries.append((numbers + len(limits), *on_links))
        limits = np.concatenate([limits, np.ones(len(links))])
    most = np.concatenate([network.routes.ravel(), np.full(mixed, np.inf)])
    most[route[first_p + np.arange(mixed), first_d + np.arange(mixed)]] = 0.0
    used = most > 0
    row, column, value = (np.concatenate([part[k].ravel() for part in entries]) for k in range(3))
    kept, number = used[column], np.cumsum(used) - 1
    shape = len(limits), int(used.sum())
    matrix = SparseRows.of(row[kept], number[column[kept]], value[kept], shape)
    gain = np.concatenate([np.full(pairs, 1 - MOVED), np.ones(mixed)])
    program = LinearProgram(gain[used], matrix, np.full(len(limits), -np.inf), limits, most[used])
    found = program.solve(GLOP_PARAMETERS) or program.solve()
    if found is None:
        raise RuntimeError("the linear program of mixed replicas has no solution")
    x = np.zeros(len(most))
    x[used] = found.x
    flow, alone = np.maximum(0.0, x[:pairs]).reshape(senders, receivers), x[pairs:]
    sent, received = flow[first_p:].sum(axis=1), flow[:, first_d:].sum(axis=0)
    each = zip(np.maximum(0.0, alone), sent, received, strict=True)
    return MixedFlow(found.value / (1 - MOVED), [Share(*map(float, one)) for one in each])

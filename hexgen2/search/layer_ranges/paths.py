"""A flow as paths from the first layer to the last, each with its share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hexgen2.search.layer_ranges.instance import Ranges
from hexgen2.search.layer_ranges.max_flow import Flow

NEGLIGIBLE = 1e-9
"""Share of the flow below which rest is left over by rounding."""


@dataclass(frozen=True)
class Path:
    """Nodes in order, the layers that a request computes on each, and the tokens/s that take it."""

    nodes: tuple[int, ...]
    layers: tuple[int, ...]
    tok_s: float


def paths_of(flow: Flow, ranges: Ranges) -> list[Path]:
    """Paths that together are the flow; the widest next edge first, so that there are few."""
    entering, leaving, edges = dict(flow.entering), dict(flow.leaving), dict(flow.edges)
    after: dict[int, list[int]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
    found, least = list[Path](), NEGLIGIBLE * flow.tok_s
    while entering:
        node = max(entering, key=lambda v: (entering[v], -v))
        amount = entering[node]
        if amount <= least:
            del entering[node]
            continue
        nodes = [node]
        while leaving.get(nodes[-1], 0.0) <= least:
            onward = [b for b in after.get(nodes[-1], []) if edges[nodes[-1], b] > least]
            if not onward:
                break
            nodes.append(max(onward, key=lambda b: (edges[nodes[-1], b], -b)))
        pairs = list(itertools.pairwise(nodes))
        amount = min([amount, *(edges[pair] for pair in pairs), leaving.get(nodes[-1], 0.0)])
        if amount <= least:  # Rounding left a dead end.
            entering[node] = 0.0 if len(nodes) == 1 else entering[node]
            if pairs:
                edges[pairs[-1]] = 0.0
            continue
        entering[node] -= amount
        leaving[nodes[-1]] -= amount
        for pair in pairs:
            edges[pair] -= amount
        ends = [0, *(ranges[v][1] for v in nodes)]
        layers = tuple(b - a for a, b in itertools.pairwise(ends))
        found.append(Path(tuple(nodes), layers, amount))
    return found

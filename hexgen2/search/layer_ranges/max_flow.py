"""The most tokens/s that pass a model's layers, for given ranges: a max flow (Helix, section 4.3).

Each node is an edge as wide as what it passes; edges between nodes are as wide as their link. Capacities are
scaled to whole numbers for OR-tools' push-relabel; the value is then added up over the minimum cut, so that
it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from ortools.graph.python.max_flow import SimpleMaxFlow

from hexgen2.search.layer_ranges.instance import Instance, Ranges

_WHOLE = float(2**50)
"""The largest capacity as a whole number: sums over thousands of edges stay below 2^63."""


@dataclass(frozen=True)
class Flow:
    """A max flow.

    Attributes
    ----------
    tok_s : its value
    node_tok_s : [n] what passes each node
    edges : tokens/s from node to node, where there are any
    entering, leaving : tokens/s from and to the coordinator, by node
    """

    tok_s: float
    node_tok_s: tuple[float, ...]
    edges: dict[tuple[int, int], float]
    entering: dict[int, float]
    leaving: dict[int, float]


class FlowValue:
    """The value of the max flow, for many placements of one instance: a few tens of microseconds each."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        most = max((float(table.max()) for table in instance.tables), default=0.0)
        self._total = max(most * instance.nodes, 1e-300)
        self._scale = _WHOLE / self._total
        self._contracted = instance.links_never_limit
        wide = np.minimum(instance.link_tok_s, self._total)
        self._links = np.floor(wide * self._scale).astype(np.int64)
        self._source = np.floor(np.minimum(instance.source_tok_s, self._total) * self._scale).astype(np.int64)
        self._sink = np.floor(np.minimum(instance.sink_tok_s, self._total) * self._scale).astype(np.int64)
        self._numbers = np.arange(instance.nodes)

    def __call__(self, ranges: Ranges | list) -> float:
        """Tokens/s; exact to about 1e-13 of the largest capacity."""
        if self._contracted:
            return self._between_boundaries(ranges)
        graph, _, starts, stops = self._graph(ranges)
        return graph.optimal_flow() / self._scale if len(starts) and len(stops) else 0.0

    def covered(self, ranges: Ranges | list) -> float:
        """An upper bound within microseconds: what the layer with the least capacity passes."""
        instance = self._instance
        change = [0.0] * (instance.layers + 1)
        for held, passes in zip(ranges, instance.passes, strict=True):
            tok_s = passes[held]
            change[held[0]] += tok_s
            change[held[1]] -= tok_s
        least, here = math.inf, 0.0
        for step in change[:-1]:
            here += step
            if here < least:
                least = here
        return least

    def _between_boundaries(self, ranges: Ranges | list) -> float:
        """The value where links never limit: only the layers at which ranges begin and end matter."""
        instance, scale = self._instance, self._scale
        last = instance.layers
        wide: dict[tuple[int, int], float] = {}
        for held, passes in zip(ranges, instance.passes, strict=True):
            tok_s = passes[held]
            if tok_s > 0:
                wide[held] = wide.get(held, 0.0) + tok_s
        graph = SimpleMaxFlow()
        if not instance.partial:
            for (first, end), tok_s in wide.items():
                graph.add_arc_with_capacity(first, end, int(tok_s * scale))
        else:
            enough = int(_WHOLE)
            ends = {end for _, end in wide if end != last}
            for number, ((first, end), tok_s) in enumerate(wide.items(), last + 1):
                graph.add_arc_with_capacity(number, end, int(tok_s * scale))
                if first == 0:
                    graph.add_arc_with_capacity(0, number, enough)
                for boundary in ends:
                    if first <= boundary < end:
                        graph.add_arc_with_capacity(boundary, number, enough)
        if graph.num_nodes() <= last or graph.solve(0, last) != graph.OPTIMAL:
            return 0.0
        return graph.optimal_flow() / scale

    def _graph(self, ranges: Ranges | list) -> tuple[SimpleMaxFlow, np.ndarray, np.ndarray, np.ndarray]:
        """The solved graph: node v has vertices 2v and 2v + 1, then come source and sink. Its arcs are those
        of the nodes, between nodes (from i to j), from the source and to the sink. Not solved if
        either of the last has none."""
        instance, n = self._instance, self._instance.nodes
        pairs = np.array(ranges, dtype=np.int64).reshape(n, 2)
        first, end = pairs[:, 0], pairs[:, 1]
        passes = np.array([table[held] for held, table in zip(ranges, instance.passes, strict=True)])
        begins, goes_on = end[:, None] >= first[None, :], end[:, None] < end[None, :]
        follow = begins & goes_on if instance.partial else end[:, None] == first[None, :]
        used = passes > 0
        i, j = np.nonzero(follow & used[:, None] & used[None, :])
        starts = np.flatnonzero((first == 0) & used)
        stops = np.flatnonzero((end == instance.layers) & used)
        tails = np.concatenate([self._numbers * 2, i * 2 + 1, np.full(len(starts), 2 * n), stops * 2 + 1])
        heads = np.concatenate([self._numbers * 2 + 1, j * 2, starts * 2, np.full(len(stops), 2 * n + 1)])
        widths = np.concatenate(
            [
                np.floor(passes * self._scale).astype(np.int64),
                self._links[i, j],
                self._source[starts],
                self._sink[stops],
            ]
        )
        graph = SimpleMaxFlow()
        graph.add_arcs_with_capacity(tails.astype(np.int32), heads.astype(np.int32), widths)
        if len(starts) and len(stops):
            graph.solve(2 * n, 2 * n + 1)
        return graph, np.stack([i, j], axis=1), starts, stops

    def flow(self, ranges: Ranges) -> Flow:
        """The flow itself, edge by edge."""
        instance, n = self._instance, self._instance.nodes
        graph, pairs, starts, stops = self._graph(ranges)
        if not (len(starts) and len(stops)) or graph.optimal_flow() == 0:
            return Flow(0.0, (0.0,) * n, {}, {}, {})
        amounts = (graph.flows(np.arange(graph.num_arcs(), dtype=np.int32)) / self._scale).tolist()
        inside = set(graph.get_source_side_min_cut())
        widths = [
            *(instance.tok_s(v, held) for v, held in enumerate(ranges)),
            *np.minimum(instance.link_tok_s[pairs[:, 0], pairs[:, 1]], self._total).tolist(),
            *np.minimum(instance.source_tok_s[starts], self._total).tolist(),
            *np.minimum(instance.sink_tok_s[stops], self._total).tolist(),
        ]
        cut = (
            width
            for arc, width in enumerate(widths)
            if graph.tail(arc) in inside and graph.head(arc) not in inside
        )
        between = amounts[n : n + len(pairs)]
        entering = amounts[n + len(pairs) : n + len(pairs) + len(starts)]
        leaving = amounts[n + len(pairs) + len(starts) :]
        return Flow(
            tok_s=math.fsum(cut),
            node_tok_s=tuple(amounts[:n]),
            edges={(a, b): f for (a, b), f in zip(pairs.tolist(), between, strict=True) if f > 0},
            entering={v: f for v, f in zip(starts.tolist(), entering, strict=True) if f > 0},
            leaving={v: f for v, f in zip(stops.tolist(), leaving, strict=True) if f > 0},
        )

"""Random instances of layer ranges, and slow answers to check quick ones against."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import numpy as np

from hexgen2.search.layer_ranges.instance import NOTHING, Instance, Range, Ranges
from hexgen2.search.layer_ranges.max_flow import FlowValue


def instance(seed: int, nodes: int, layers: int, partial: bool, wide_links: bool = False) -> Instance:
    """Nodes of two kinds whose tokens/s fall, not always strictly, with the layers that they hold."""
    rng = random.Random(seed)
    tables = []
    for _ in range(2):
        most = rng.randint(1, layers)
        falling = sorted((float(rng.randint(1, 40)) for _ in range(most)), reverse=True)
        tables.append(np.array([[0.0, *falling]] * 4))
    scale = 1e9 if wide_links else 1.0
    links = np.array([[rng.randint(1, 40) * scale for _ in range(nodes)] for _ in range(nodes)])
    ends = [np.array([rng.randint(10, 60) * scale for _ in range(nodes)]) for _ in range(2)]
    kind = tuple(rng.randrange(2) for _ in range(nodes))
    return Instance(layers, kind, tuple(tables), links, *ends, partial)


def ranges_of(asked: Instance, seed: int) -> Ranges:
    """Random ranges that fit."""
    rng = random.Random(seed)
    return tuple(rng.choice(choices(asked, node)) for node in range(asked.nodes))


def choices(asked: Instance, node: int) -> list[Range]:
    """All ranges that a node can hold, and none."""
    ends = itertools.combinations(range(asked.layers + 1), 2)
    return [NOTHING, *(held for held in ends if asked.tok_s(node, held) > 0)]


def flow_by_networkx(asked: Instance, ranges: Ranges) -> float:
    """The max flow, from the definitions of the paper (section 4.3)."""
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for a, (first, end) in enumerate(ranges):
        tok_s = asked.tok_s(a, (first, end))
        if not tok_s:
            continue
        graph.add_edge((a, "in"), (a, "out"), capacity=tok_s)
        if first == 0:
            graph.add_edge("source", (a, "in"), capacity=float(asked.source_tok_s[a]))
        if end == asked.layers:
            graph.add_edge((a, "out"), "sink", capacity=float(asked.sink_tok_s[a]))
        for b, (start, stop) in enumerate(ranges):
            valid = start <= end < stop if asked.partial else start == end
            if a != b and valid and asked.tok_s(b, (start, stop)):
                graph.add_edge((a, "out"), (b, "in"), capacity=float(asked.link_tok_s[a, b]))
    return float(nx.maximum_flow_value(graph, "source", "sink"))


def best_of_all(asked: Instance) -> float:
    """The greatest flow of all ranges."""
    value = FlowValue(asked)  # The tests compare it with networkx.
    return max(map(value, itertools.product(*(choices(asked, node) for node in range(asked.nodes)))))

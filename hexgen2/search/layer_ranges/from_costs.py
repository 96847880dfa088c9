"""Nodes and tables of tokens/s by a cost model, for clusters of which no table was measured."""

from __future__ import annotations

import numpy as np

from cost_model.base import CostModel, TensorGroup
from hexgen2.prediction.range_times import range_tok_s, requests_held
from hexgen2.search.layer_ranges.instance import Instance, Range
from hexgen2.search.layer_ranges.nodes import RangeNodes
from hexgen2.search.problem import Problem

TOKEN_BYTES = 4
"""Of a token between the coordinator and a node (Helix, figure 2)."""


def nodes_of(problem: Problem, partial: bool) -> RangeNodes:
    """Each machine is one node, tensor-parallel over its GPUs (Helix, section 4.1), or several where the
    model cannot be divided among that many."""
    costs, cluster, layers = problem.costs, problem.cluster, problem.model.layers
    degrees = sorted(problem.model.tensor_degrees(max(map(len, problem.node_gpus), default=1)), reverse=True)
    gpus: list[tuple[int, ...]] = []
    names, machines = list[str](), list[int]()
    for machine, free in enumerate(problem.node_gpus):
        parts = list[tuple[int, ...]]()
        while free:
            degree = next(d for d in degrees if d <= len(free))
            parts.append(free[:degree])
            free = free[degree:]
        gpus += parts
        machines += [machine] * len(parts)
        name = cluster.node_names[machine]
        names += [name] if len(parts) == 1 else [f"{name}-{k}" for k in range(len(parts))]
    groups = [
        TensorGroup(problem.node_accelerator[machine], len(part), problem.node_links[machine][machine])
        for machine, part in zip(machines, gpus, strict=True)
    ]
    card_tok_s = [
        float(cluster.card_bytes_s[machine]) / costs.activation_bytes_per_token for machine in machines
    ]
    kinds: dict[tuple[TensorGroup, float], int] = {}
    kind = tuple(kinds.setdefault(key, len(kinds)) for key in zip(groups, card_tok_s, strict=True))
    tables = tuple(np.minimum(table_of(costs, group, layers), card) for group, card in kinds)
    leaders = np.array([part[0] for part in gpus], dtype=int)
    links = cluster.bandwidth_bytes_s[np.ix_(leaders, leaders)] / costs.activation_bytes_per_token
    coordinator = cluster.card_bytes_s[machines] / TOKEN_BYTES
    instance = Instance(layers, kind, tables, links, coordinator, coordinator, partial)

    def most_requests(node: int, held: Range) -> int:
        return requests_held(costs, groups[node], held, layers)

    return RangeNodes(instance, tuple(gpus), tuple(names), most_requests)


def table_of(costs: CostModel, group: TensorGroup, layers: int) -> np.ndarray:
    """[4, layers + 1] tokens/s by position and layers held (see Instance)."""
    table = np.zeros((4, layers + 1))
    for row in range(4):
        first, last = bool(row & 1), bool(row & 2)
        memory = costs.stage_memory("decode", group, first=first, last=last)
        for count in range(1, layers + (first and last)):
            requests = min(costs.batch_cap, memory.max_batch(count))
            if requests < 1:
                break
            table[row, count] = range_tok_s(costs, group, count, last, requests)
    return table

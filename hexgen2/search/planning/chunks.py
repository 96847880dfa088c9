"""Which sizes of chunks are worth trying in the mixed steps of colocated replicas (cost_model/pipeline.py).

What suits depends on the cards, the model and the lengths of requests more than on the group: a few sizes
are best nearly everywhere in one problem, and to plan with these alone takes half the time. They are found on
a few groups of each kind of node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cost_model.pipeline import CHUNKS
from hexgen2.replica import CHUNK_TOKENS
from hexgen2.search.planning.contenders import ContenderSearch
from hexgen2.search.planning.shapes import Shapes
from hexgen2.search.problem import NodeCounts, Problem, counts_of
from hexgen2.search.ties import first_greatest

LEAST_MEMORY, MEMORIES = 1.1, (1.3, 2.5)
"""Memory of the groups looked at, at least, on one node and on several: a multiple of the weights."""
FEW_GPUS = 48
PROMISING, MOST_PROMISING = 0.95, 0.97
"""Pipelines of a group count if they do this share of what its best one does; with more than FEW_GPUS, where
groups are many and each size costs more time than it gains, the second."""
AS_GOOD = 0.99
"""A size of chunks does for a pipeline if it allows this share of the requests/s of the best size."""


def chunks_worth_trying(problem: Problem, contenders: ContenderSearch, shapes: Shapes) -> tuple[int, ...]:
    """The indices of CHUNKS, rising. Under latency targets, which rule out long steps, also the next smaller
    one and the usual one."""
    rows = contenders.rows([shapes.forms("colocated", counts) for counts in _samples(problem)])
    group, req_s = contenders.full_load_rates(rows)
    if not len(group):
        return tuple(range(len(CHUNKS)))
    best = req_s.max(axis=1)
    of_group = np.zeros(int(group.max()) + 1)
    np.maximum.at(of_group, group, best)
    promising = PROMISING if len(problem.usable) <= FEW_GPUS else MOST_PROMISING
    counted = best >= promising * of_group[group]
    does = req_s[counted] >= AS_GOOD * best[counted, None]
    chosen: set[int] = set()
    while len(does):
        covered = does.sum(axis=0).astype(float)
        chosen.add(first_greatest(range(len(CHUNKS)), covered.tolist()))
        does = does[~does[:, sorted(chosen)].any(axis=1)]
    if problem.targets.given:
        chosen |= {max(0, min(chosen) - 1), CHUNKS.index(CHUNK_TOKENS)}
    return tuple(sorted(chosen))


def _samples(problem: Problem) -> Iterator[NodeCounts]:
    """Groups of each kind of node: all of its GPUs, half of them, and so on, as long as they have the memory;
    and where one has little, others beside it."""
    seen: set[tuple[int, int]] = set()
    weights = problem.model.total_bytes
    sizes = [len(gpus) for gpus in problem.node_gpus]
    memory = [math.fsum(problem.cluster.memory_bytes[list(gpus)].tolist()) for gpus in problem.node_gpus]
    for node, size in enumerate(sizes):
        kind = problem.node_kind[node], size
        if not size or kind in seen:
            continue
        seen.add(kind)
        links = problem.node_links[node]
        # The nearest nodes, and of these the ones of its kind first.
        others = sorted(
            (other for other, count in enumerate(sizes) if count and other != node),
            key=lambda other: (problem.node_kind[other] != kind[0], -links[other].bandwidth_bytes_s, other),
        )
        count = size
        while count and memory[node] * count / size >= LEAST_MEMORY * weights:
            yield counts_of({node: count})
            count //= 2
        for wanted in (times * weights for times in MEMORIES):
            if memory[node] >= wanted:
                continue
            joined, held = {node: size}, memory[node]
            for other in others:
                if held >= wanted:
                    break
                joined[other], held = sizes[other], held + memory[other]
            yield counts_of(joined)

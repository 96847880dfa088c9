"""The initial solution, phase one of HexGen-2 (section 3.2): partition the GPUs, coarsen, assign phases.

Large clusters are partitioned by parts of nodes, which takes less than a second for a thousand GPUs: a part
is a whole node, or an even share of a node that has the memory of several groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cost_model.base import TensorGroup
from cost_model.hardware import NO_LINK
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition.coarsen import CoarseGraph, coarsen, gpu_graph, project
from hexgen2.search.partition.kernighan_lin import kernighan_lin
from hexgen2.search.partition.secondary import secondary_partition
from hexgen2.search.partition.spectral import spectral_partition
from hexgen2.search.planning.classes import LARGE
from hexgen2.search.problem import Problem, Solution
from hexgen2.search.ties import first_largest, greatest

BATCH_PER_REPLICA = 32
"""Concurrent requests per replica in the estimate of the number of groups (Appendix A)."""

MAX_STARTS = 4

Partitioner = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""From bandwidths [n, n], memories [n] and a number of groups to labels [n], every group non-empty."""


def estimated_groups(problem: Problem) -> int:
    """K of section 3.2: the memory of the cluster divided by that of one replica (weights and the KV cache of
    32 requests, Appendix A); at least 2, and at most one group per GPU."""
    costs, available = problem.costs, problem.cluster.memory_bytes[problem.usable]
    memory = costs.stage_memory(
        "decode", TensorGroup(problem.node_accelerator[0], 1, NO_LINK), first=True, last=True
    )
    replica = memory.needed(problem.model.layers, BATCH_PER_REPLICA)
    return max(2, min(int(float(available.sum()) // replica), len(available)))


def start_sizes(problem: Problem) -> list[int]:
    """The numbers of groups to start from: the estimate first, then evenly fewer, down to 2."""
    estimate = estimated_groups(problem)
    sizes = np.unique(np.linspace(2, estimate, min(MAX_STARTS, estimate - 1)).round().astype(int))
    return [int(size) for size in sizes[::-1]]


def spectral_and_swaps(weights: np.ndarray, memory: np.ndarray, groups: int) -> np.ndarray:
    """The partitioner of the paper: spectral, then refined by Kernighan-Lin swaps (labels as Partitioner)."""
    return kernighan_lin(weights, memory, spectral_partition(weights, memory, groups))


def initial_solution(
    evaluator: Evaluator, groups: int, partitioner: Partitioner = spectral_and_swaps
) -> Solution:
    """The partition into `groups` groups with roles. Which side of the secondary partition prefills is
    decided by the flow."""
    problem = evaluator.problem
    graph = group_graph(problem, groups, partitioner)
    side = secondary_partition(graph)
    both = [
        project(problem, graph, ["prefill" if s == first else "decode" for s in side])
        for first in (True, False)
    ]
    return greatest(both, lambda solution: evaluator.evaluate(solution).score)[0]


def group_graph(problem: Problem, groups: int, partitioner: Partitioner) -> CoarseGraph:
    """The usable GPUs divided into `groups` groups; on large clusters by parts of nodes."""
    weights, memory = gpu_graph(problem)
    if len(memory) <= LARGE:
        return coarsen(weights, memory, partitioner(weights, memory, groups))
    part_of = node_parts(problem.cluster.node_of[problem.usable], memory, groups)
    parts = coarsen(weights, memory, part_of)
    if len(parts.members) == groups:
        return parts
    return coarsen(weights, memory, partitioner(parts.weights, parts.memory, groups)[part_of])


def node_parts(node_of: np.ndarray, memory: np.ndarray, groups: int) -> np.ndarray:
    """[n] the part of a node that each GPU belongs to. Every node is divided evenly into as many parts as it
    has memory for groups, but at least one; in total there are at least `groups` parts, and at most one per
    GPU.

    Parameters
    ----------
    node_of : [n] node of each GPU, in rising order
    memory : [n] bytes
    """
    _, node = np.unique(node_of, return_inverse=True)
    sizes, held = np.bincount(node), np.bincount(node, memory)
    parts = np.clip(np.floor(held / held.sum() * groups).astype(int), 1, sizes)
    while parts.sum() < min(groups, len(node)):
        parts[first_largest(np.where(parts < sizes, held / parts, -1.0))] += 1
    place = np.arange(len(node)) - (np.cumsum(sizes) - sizes)[node]
    return (np.cumsum(parts) - parts)[node] + place * parts[node] // sizes[node]

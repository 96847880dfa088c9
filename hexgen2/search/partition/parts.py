"""Parts of a large cluster whose nodes are near each other: racks, sites, machines joined by fast links.

A KV cache should not leave the part in which it was computed, so that replicas of a part can be chosen for
themselves. Nodes are joined by average linkage (Sokal & Michener, 1958) over the logarithm of the bandwidth
between them, which an uplink may limit; the tree is cut where its branches are small enough. Beyond the
paper, whose partition knows single GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cost_model.portable import log
from hexgen2.search.planning.classes import LARGE
from hexgen2.search.problem import Problem
from hexgen2.search.ties import first_largest

if TYPE_CHECKING:
    from scipy.cluster.hierarchy import ClusterNode

FASTEST = 1e13
"""Bytes/s above which all links count as equally fast."""
ROOM = 2.5
"""The memory of a part, as a multiple of the weights: enough for a prefill and a decode replica."""


def near_parts(problem: Problem) -> list[tuple[int, ...]]:
    """The nodes that have GPUs, divided into parts, each in rising order."""
    from scipy.cluster.hierarchy import linkage, to_tree  # Slow to import; small clusters do without.

    sizes = [len(gpus) for gpus in problem.node_gpus]
    nodes = np.flatnonzero(sizes)
    if len(nodes) < 2:
        return [tuple(nodes.tolist())]
    between = bandwidth_between(problem)[np.ix_(nodes, nodes)]
    distance = _logarithms(between.max() / between)
    np.fill_diagonal(distance, 0.0)
    tree = to_tree(linkage(distance[np.triu_indices(len(nodes), 1)], "average"))
    found = [tuple(sorted(nodes[branch].tolist())) for branch in _cut(tree, [sizes[n] for n in nodes])]
    return _with_room(problem, found)


def bandwidth_between(problem: Problem) -> np.ndarray:
    """[n, n] bytes/s between nodes, as links and the uplinks that they cross allow; the same in both
    directions."""
    nodes = len(problem.node_gpus)
    found = np.array([[link.bandwidth_bytes_s for link in row] for row in problem.node_links])
    for uplink in problem.cluster.uplinks:
        inside = np.isin(np.arange(nodes), list(uplink.nodes))
        crossed = inside[:, None] != inside[None, :]
        found[crossed] = np.minimum(found[crossed], uplink.bandwidth_bytes_s)
    return np.clip(np.minimum(found, found.T), 1.0, FASTEST)


def _logarithms(values: np.ndarray) -> np.ndarray:
    """Natural logarithms, the same on every processor."""
    different, which = np.unique(values, return_inverse=True)
    return np.array([log(value) for value in different.tolist()])[which].reshape(values.shape)


def _cut(tree: ClusterNode, sizes: Sequence[int]) -> list[list[int]]:
    """The largest branches with no more than LARGE GPUs, among which a search takes little time; leaf k has
    sizes[k] GPUs."""
    branches, left = [], [tree]
    while left:
        branch = left.pop()
        leaves = branch.pre_order()
        if branch.is_leaf() or sum(sizes[leaf] for leaf in leaves) <= LARGE:
            branches.append(leaves)
        else:
            left += [branch.get_right(), branch.get_left()]
    return branches


def _with_room(problem: Problem, parts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The parts, where those with too little memory are joined with the nearest (of several, the
    smallest)."""
    memory = [float(problem.cluster.memory_bytes[list(gpus)].sum()) for gpus in problem.node_gpus]
    needed = ROOM * problem.model.total_bytes
    between = _logarithms(bandwidth_between(problem))
    parts = list(parts)
    while len(parts) > 1:
        held = [math.fsum(memory[node] for node in part) for part in parts]
        least = first_largest(-np.array(held))
        if held[least] >= needed:
            break
        small = parts.pop(least)
        near = [float(between[np.ix_(small, part)].mean()) for part in parts]
        size = [sum(len(problem.node_gpus[n]) for n in part) for part in parts]
        k = max(range(len(parts)), key=lambda k: (round(near[k], 6), -size[k], -k))
        parts[k] = tuple(sorted(parts[k] + small))
    return sorted(parts)

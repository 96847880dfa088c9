"""Parts of a large cluster whose nodes are near each other: racks, sites, machines joined by fast links.

A KV cache should not leave the part in which it was computed, so that replicas of a part can be chosen for
themselves. Nodes are joined by average linkage (Sokal & Michener, 1958) over the logarithm of the bandwidth
between them, which an uplink may limit; the tree is cut where its branches are small enough. Beyond the
paper, whose partition knows single GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cost_model.portable import log
from hexgen2.search.planning.classes import LARGE
from hexgen2.search.problem import Problem
from hexgen2.search.ties import first_largest

FASTEST = 1e13
"""Bytes/s above which all links count as equally fast."""
ROOM = 2.5
"""The memory of a part, as a multiple of the weights: enough for a prefill and a decode replica."""


def near_parts(problem: Problem) -> list[tuple[int, ...]]:
    """The nodes that have GPUs, divided into parts, each in rising order."""
    sizes = [len(gpus) for gpus in problem.node_gpus]
    nodes = np.flatnonzero(sizes)
    if len(nodes) < 2:
        return [tuple(nodes.tolist())]
    between = bandwidth_between(problem)[np.ix_(nodes, nodes)]
    distance = _logarithms(between.max() / between)
    np.fill_diagonal(distance, 0.0)
    branches = _cut(average_linkage(distance), [sizes[n] for n in nodes])
    found = [tuple(sorted(nodes[branch].tolist())) for branch in branches]
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


Tree = int | tuple["Tree", "Tree"]
"""A leaf, or two branches."""


def average_linkage(distance: np.ndarray) -> Tree:
    """The tree that joins the two branches which are nearest on average, again and again, found by chains of
    nearest neighbours (Murtagh, 1983). Its own code, because SciPy's takes a fifth of a second to import.

    Parameters
    ----------
    distance : [n, n] symmetric
    """
    between = distance.astype(float).copy()
    np.fill_diagonal(between, np.inf)
    trees: list[Tree] = list(range(len(between)))
    sizes, alive = np.ones(len(between)), np.ones(len(between), dtype=bool)
    chain: list[int] = []
    for _ in range(len(between) - 1):
        if not chain:
            chain.append(int(np.argmax(alive)))
        while True:
            last = chain[-1]
            near = int(np.argmin(between[last]))
            # Of equally near ones, that from which the chain came ends it.
            if len(chain) > 1 and between[last, chain[-2]] <= between[last, near]:
                break
            chain.append(near)
        gone, kept = sorted((chain.pop(), chain.pop()), reverse=True)
        trees[kept] = (trees[kept], trees[gone])
        mean = (sizes[kept] * between[kept] + sizes[gone] * between[gone]) / (sizes[kept] + sizes[gone])
        sizes[kept] += sizes[gone]
        alive[gone] = False
        between[kept, :] = between[:, kept] = mean
        between[gone, :] = between[:, gone] = np.inf
        between[kept, kept] = np.inf
    return trees[0]


def leaves_of(tree: Tree) -> list[int]:
    """All leaves."""
    found, left = list[int](), [tree]
    while left:
        branch = left.pop()
        if isinstance(branch, tuple):
            left += branch
        else:
            found.append(branch)
    return found


def _cut(tree: Tree, sizes: Sequence[int]) -> list[list[int]]:
    """The largest branches with no more than LARGE GPUs, among which a search takes little time; leaf k has
    sizes[k] GPUs."""
    branches, left = [], [tree]
    while left:
        branch = left.pop()
        leaves = leaves_of(branch)
        if not isinstance(branch, tuple) or sum(sizes[leaf] for leaf in leaves) <= LARGE:
            branches.append(leaves)
        else:
            left += branch
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

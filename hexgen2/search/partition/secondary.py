"""Secondary partition: which super nodes prefill and which decode.

HexGen-2, section 3.2, step (ii): unlike the first partition it maximises the bandwidth between the two sides,
since every KV cache crosses from one to the other.
"""

from __future__ import annotations

import itertools

import numpy as np

from hexgen2.search.partition.coarsen import CoarseGraph
from hexgen2.search.partition.spectral import RESOLUTION, first_eigenvector, laplacian
from hexgen2.search.ties import first_largest

EXHAUSTIVE_LIMIT = 12
"""Up to this many super nodes, every bipartition is tried (at most 2^11)."""


def secondary_partition(graph: CoarseGraph) -> np.ndarray:
    """[k] the side of each super node, as booleans: a maximum cut, of equal ones the most balanced in
    memory."""
    count = len(graph.members)
    if count < 2:
        return np.zeros(count, dtype=bool)
    if count <= EXHAUSTIVE_LIMIT:
        sides = np.array(list(itertools.product([False, True], repeat=count - 1)), dtype=bool)
        sides = np.hstack([np.zeros((len(sides), 1), dtype=bool), sides])[1:]
        return sides[_best(graph, sides)]
    return _local_search(graph)


def _best(graph: CoarseGraph, sides: np.ndarray) -> int:
    """The index of the best of m bipartitions [m, k]."""
    signs = np.where(sides, 1.0, -1.0)
    cut = np.zeros(len(signs))
    for k, m in itertools.combinations(range(len(graph.members)), 2):
        cut += np.where(sides[:, k] != sides[:, m], graph.weights[k, m], 0.0)
    imbalance = np.abs((signs * graph.memory).sum(axis=1)) / graph.memory.sum()
    value = cut / max(float(graph.weights.sum()) / 2, 1e-30) - 1e-6 * imbalance
    return first_largest(value)


def _local_search(graph: CoarseGraph) -> np.ndarray:
    """[k] a bipartition by local search: start with the signs of the Laplacian's last eigenvector (the
    largest cut of the relaxation), and flip single super nodes while the cut grows."""
    weights = graph.weights / max(float(graph.weights.max()), 1e-30)
    side = first_eigenvector(-laplacian(weights)) > RESOLUTION
    for _ in range(10 * len(side)):
        signs = np.where(side, 1.0, -1.0)
        gain = signs * (weights * signs).sum(axis=1)
        k = first_largest(gain)
        if gain[k] <= 1e-9:
            break
        side[k] = ~side[k]
    if side.all() or not side.any():
        side[first_largest(graph.memory)] ^= True
    return side

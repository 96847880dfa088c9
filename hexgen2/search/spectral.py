"""Initial partition: recursive spectral bisection of the GPU graph.

HexGen-2, section 3.2, step (i). Nodes weigh their memory, edges their bandwidth. Each cut orders the
GPUs along the Fiedler vector of the Laplacian (the eigenvector of its second smallest eigenvalue;
Alpert & Yao, 1995) and splits the order where memory is in proportion to the groups on either side.
"""

from __future__ import annotations

import numpy as np


def spectral_partition(weights: np.ndarray, memory: np.ndarray, groups: int) -> np.ndarray:
    """Label each vertex with a group.

    Parameters
    ----------
    weights : [n, n] symmetric, bandwidth between GPUs; the diagonal is ignored
    memory : [n] bytes
    groups : how many groups, at most n

    Returns
    -------
    [n] integers in 0..groups-1, every group non-empty
    """
    if not 1 <= groups <= len(memory):
        raise ValueError(f"cannot split {len(memory)} vertices into {groups} groups")
    labels = np.zeros(len(memory), dtype=int)
    _bisect(weights, memory, np.arange(len(memory)), groups, 0, labels)
    return labels


def _bisect(
    weights: np.ndarray, memory: np.ndarray, vertices: np.ndarray, groups: int, first: int, labels: np.ndarray
) -> None:
    if groups == 1:
        labels[vertices] = first
        return
    left_groups = groups // 2
    order = vertices[np.argsort(fiedler_vector(weights[np.ix_(vertices, vertices)]), kind="stable")]
    filled = np.cumsum(memory[order]) / memory[order].sum()
    # The cut whose left share is nearest to the left groups' share, leaving enough GPUs on both sides.
    cuts = np.arange(left_groups, len(order) - (groups - left_groups) + 1)
    cut = cuts[np.argmin(np.abs(filled[cuts - 1] - left_groups / groups))]
    _bisect(weights, memory, order[:cut], left_groups, first, labels)
    _bisect(weights, memory, order[cut:], groups - left_groups, first + left_groups, labels)


def fiedler_vector(weights: np.ndarray) -> np.ndarray:
    """The second eigenvector of the graph's Laplacian, rounded so that equal vertices stay equal and
    with its first non-zero entry negative, so that the order does not depend on the solver's sign."""
    adjacency = np.where(np.eye(len(weights), dtype=bool), 0.0, weights)
    adjacency = adjacency / adjacency.max()
    laplacian = np.diag(adjacency.sum(axis=1)) - adjacency
    vector = np.round(np.linalg.eigh(laplacian)[1][:, 1], 9)
    nonzero = vector[np.flatnonzero(vector)]
    return -vector if len(nonzero) and nonzero[0] > 0 else vector

"""Initial partition: recursive spectral bisection of the GPU graph.

HexGen-2, section 3.2, step (i). Nodes weigh their memory, edges their bandwidth. Each cut orders the
GPUs along the Fiedler vector of the Laplacian (the eigenvector of its second smallest eigenvalue;
Alpert & Yao, 1995) and splits the order where memory is in proportion to the groups on either side.

Where nodes are alike there are many such vectors, and rounding decides which of them a solver returns. The
one taken here does not depend on the solver: it is the nearest to the order of the cluster's file."""

from __future__ import annotations

import numpy as np

from hexgen2.search.ties import first_largest, order

ALIKE = 1e-4
"""Eigenvalues that differ by less than this share of the smallest count as equal: rounding mixes the vectors
of eigenvalues that nearly meet."""

RESOLUTION = 1e-6
"""Entries of an eigenvector (of length 1) that are closer count as equal: rounding moves them by 1e-8."""


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
    """Label these vertices with `groups` groups, numbered from `first`, in place."""
    if groups == 1:
        labels[vertices] = first
        return
    left_groups = groups // 2
    ordered = vertices[order(fiedler_vector(weights[np.ix_(vertices, vertices)]).tolist(), RESOLUTION)]
    filled = np.cumsum(memory[ordered]) / memory[ordered].sum()
    # The cut whose left share is nearest to the left groups' share, leaving enough GPUs on both sides.
    cuts = np.arange(left_groups, len(ordered) - (groups - left_groups) + 1)
    cut = cuts[first_largest(-np.abs(filled[cuts - 1] - left_groups / groups))]
    _bisect(weights, memory, ordered[:cut], left_groups, first, labels)
    _bisect(weights, memory, ordered[cut:], groups - left_groups, first + left_groups, labels)


def laplacian(weights: np.ndarray) -> np.ndarray:
    """[n, n] of a graph of these bandwidths [n, n], in units of the largest; the diagonal is ignored."""
    adjacency = np.where(np.eye(len(weights), dtype=bool), 0.0, weights)
    adjacency = adjacency / (adjacency.max() or 1.0)
    return np.diag(adjacency.sum(axis=1)) - adjacency


def fiedler_vector(weights: np.ndarray) -> np.ndarray:
    """[n] the second eigenvector of the graph's Laplacian; entries closer than RESOLUTION count as equal.

    Parameters
    ----------
    weights : [n, n] symmetric, bytes/s; the diagonal is ignored
    """
    matrix = laplacian(weights)
    # The constant vector, of eigenvalue 0, moves behind all others, since eigenvalues are at most twice the
    # largest degree (Gershgorin). So the second eigenvector comes first, also in a graph of several parts.
    apart = 4 * float(np.diag(matrix).max()) + 1.0
    return first_eigenvector(matrix + apart / len(matrix))


def first_eigenvector(matrix: np.ndarray) -> np.ndarray:
    """[n] the eigenvector of the smallest eigenvalue of a symmetric matrix [n, n]; of several, the one
    nearest to 0, 1, ..., n-1 (if all are orthogonal to that, the one with the largest entry).

    It is the projection of that ramp onto the eigenvectors, and therefore the same for every basis that a
    solver may return, sign included."""
    values, vectors = np.linalg.eigh(matrix)
    near = values - values[0] <= ALIKE * abs(values[0]) + 1e-9 * np.abs(values).max()
    basis = vectors[:, near]
    ramp = np.arange(len(matrix)) - (len(matrix) - 1) / 2
    found = basis @ (basis.T @ ramp)
    if np.abs(found).max() <= 1e-3 * np.abs(ramp).max():
        share = (basis * basis).sum(axis=1)
        found = basis @ basis[first_largest(share)]
    return found / np.sqrt((found * found).sum())

"""Initial partition by METIS: multilevel cuts instead of the spectrum.

Karypis & Kumar, 1998: the graph is coarsened by matching, cut when small, and the cut is refined on the
way back. Beyond the paper, whose partition is spectral (spectral.py).
"""

from __future__ import annotations

import numpy as np

from hexgen2.search.ties import first_largest

RECURSIVE_LIMIT = 8
"""Up to this many groups, METIS bisects recursively, which cuts less; beyond, it makes all at once (manual,
4.1)."""

LARGEST_SUM = 2**30
"""Sums of weights stay below this, since METIS may be built with 32-bit integers."""

LARGEST_WEIGHT = 10**6


def metis_partition(weights: np.ndarray, memory: np.ndarray, groups: int, seed: int = 0) -> np.ndarray:
    """Label each vertex with a group so that groups weigh about the same and little bandwidth is cut.

    Parameters
    ----------
    weights : [n, n] symmetric, bandwidth between vertices; the diagonal is ignored
    memory : [n] bytes
    groups : how many groups, at most n
    seed : of METIS's own random choices; the same seed gives the same labels

    Returns
    -------
    [n] integers in 0..groups-1, every group non-empty
    """
    import pymetis  # Slow to import; many searches do without.

    if not 1 <= groups <= len(memory):
        raise ValueError(f"cannot split {len(memory)} vertices into {groups} groups")
    if groups == 1:
        return np.zeros(len(memory), dtype=int)
    edges = np.where(np.eye(len(weights), dtype=bool), 0.0, weights)
    tails, heads = np.nonzero(edges)
    starts = np.searchsorted(tails, np.arange(len(memory) + 1))
    _, labels = pymetis.part_graph(
        groups,
        pymetis.CSRAdjacency(starts.tolist(), heads.tolist()),
        vweights=_whole(memory).tolist(),
        eweights=_whole(edges[tails, heads]).tolist(),
        recursive=groups <= RECURSIVE_LIMIT,
        options=pymetis.Options(seed=seed),
    )
    return _filled(edges, np.array(labels), groups)


def _whole(values: np.ndarray) -> np.ndarray:
    """Integers of at least 1 in proportion to the values."""
    if not values.size:
        return values.astype(int)
    scale = min(LARGEST_WEIGHT / values.max(), LARGEST_SUM / values.sum())
    return np.maximum(1, np.round(values * scale)).astype(int)


def _filled(edges: np.ndarray, labels: np.ndarray, groups: int) -> np.ndarray:
    """The labels with one vertex in each group that METIS left empty: from the largest group, the vertex with
    the least bandwidth to its own group."""
    labels = labels.copy()
    for empty in np.setdiff1d(np.arange(groups), labels):
        members = np.flatnonzero(labels == np.argmax(np.bincount(labels, minlength=groups)))
        labels[members[first_largest(-edges[np.ix_(members, members)].sum(axis=1))]] = empty
    return labels

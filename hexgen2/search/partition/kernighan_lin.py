"""Kernighan-Lin refinement of the initial partition: swaps that cut less bandwidth or balance memory.

HexGen-2, section 3.2, step (i); Kernighan & Lin, 1970. A pass over two groups keeps swapping the best pair of
vertices that has not been swapped yet, even at a loss, and then keeps the best prefix of these swaps.
"""

from __future__ import annotations

import numpy as np

from hexgen2.search.partition.coarsen import sums_by
from hexgen2.search.ties import first_largest, order

MAX_PAIRS = 1000
"""The most pairs of groups that are refined: all pairs of up to 45 groups."""


def kernighan_lin(weights: np.ndarray, memory: np.ndarray, labels: np.ndarray, passes: int = 4) -> np.ndarray:
    """Refined labels [n]; the sizes of the groups stay the same.

    The objective of a pair of groups, to be minimised, is the share of all bandwidth that is cut between them
    plus the share of all memory by which they differ.

    Parameters
    ----------
    weights : [n, n] symmetric bandwidth, the diagonal is ignored
    memory : [n] bytes
    labels : [n] group of each vertex
    """
    edges = np.where(np.eye(len(weights), dtype=bool), 0.0, weights)
    edges = edges / (edges.sum() / 2 or 1.0)
    shares = memory / memory.sum()
    labels = labels.copy()
    pairs = _most_to_gain(edges, shares, labels)
    turn, changed, tried = 0, dict.fromkeys(np.unique(labels).tolist(), 0), dict.fromkeys(pairs, -1)
    for _ in range(passes):
        before = turn
        for a, b in pairs:
            # A pair that found no swap is tried again only after it has changed.
            if tried[a, b] >= max(changed[a], changed[b]):
                continue
            tried[a, b] = turn
            if _refine_pair(edges, shares, labels, a, b):
                turn += 1
                changed[a] = changed[b] = turn
        if turn == before:
            break
    return labels


def _most_to_gain(edges: np.ndarray, shares: np.ndarray, labels: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of groups to refine: all, or the MAX_PAIRS with the largest objective, since none can become
    less than zero."""
    groups = np.unique(labels)
    a, b = np.triu_indices(len(groups), 1)
    held = sums_by(shares, labels)
    objective = sums_by(sums_by(edges, labels).T, labels)[a, b] + np.abs(held[a] - held[b])
    chosen = np.sort(order((-objective).tolist())[:MAX_PAIRS])
    return list(zip(groups[a[chosen]].tolist(), groups[b[chosen]].tolist(), strict=True))


def _refine_pair(edges: np.ndarray, shares: np.ndarray, labels: np.ndarray, a: int, b: int) -> bool:
    """Do one Kernighan-Lin pass between groups a and b, in place; True if it swapped anything."""
    left, right = np.flatnonzero(labels == a), np.flatnonzero(labels == b)
    # What each vertex would save by changing sides: its edges to the other side less those to its own.
    save_left = edges[np.ix_(left, right)].sum(axis=1) - edges[np.ix_(left, left)].sum(axis=1)
    save_right = edges[np.ix_(right, left)].sum(axis=1) - edges[np.ix_(right, right)].sum(axis=1)
    between, within_left, within_right = (
        edges[np.ix_(left, right)],
        edges[np.ix_(left, left)],
        edges[np.ix_(right, right)],
    )
    difference = float(shares[left].sum() - shares[right].sum())
    transfer = 2 * (shares[left][:, None] - shares[right][None, :])
    open_pairs = np.ones(between.shape, dtype=bool)
    total, best, history = 0.0, 0.0, []
    kept = 0
    for _ in range(min(len(left), len(right))):
        gain = save_left[:, None] + save_right[None, :] - 2 * between
        gain = gain + abs(difference) - np.abs(difference - transfer)
        gain[~open_pairs] = -np.inf
        i, j = np.unravel_index(first_largest(gain), gain.shape)
        total += float(gain[i, j])
        history.append((i, j))
        difference -= float(transfer[i, j])
        open_pairs[i, :] = open_pairs[:, j] = False
        # Vertex i now stands on the right and j on the left.
        save_left += 2 * within_left[:, i] - 2 * between[:, j]
        save_right += 2 * within_right[:, j] - 2 * between[i, :]
        if total > best + 1e-12:
            best, kept = total, len(history)
    for i, j in history[:kept]:
        labels[left[i]], labels[right[j]] = b, a
    return kept > 0

"""Division of a model's layers over the stages of a pipeline, uneven and within memory (Appendix A)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hexgen2.search.planning.timing import Timings
from hexgen2.search.ties import first_greatest, first_smallest, order


def balance_layers(
    layers: int, layer_s: Sequence[float], edge_s: Sequence[float], limit: Sequence[int]
) -> list[int] | None:
    """Layers per stage that minimise the slowest stage, max of layer_s * l + edge_s.

    Parameters
    ----------
    layers : total, each stage takes at least one
    layer_s, edge_s : seconds per layer and per stage
    limit : most layers that fit in each stage

    Returns
    -------
    the optimal integer split, or None if it does not fit
    """
    stages = len(layer_s)
    if layers < stages or min(limit) < 1 or sum(limit) < layers:
        return None
    # First as if layers could be divided; what rounding and the limits leave is then moved layer by layer.
    edges = math.fsum(e / a for a, e in zip(layer_s, edge_s, strict=True))
    level = (layers + edges) / math.fsum(1 / a for a in layer_s)
    split = [max(1, min(limit[j], int((level - edge_s[j]) / layer_s[j] + 1e-9))) for j in range(stages)]
    missing = layers - sum(split)
    if missing > 0:
        longer_s = [
            layer_s[j] * (split[j] + 1) + edge_s[j] if split[j] < limit[j] else math.inf
            for j in range(stages)
        ]
        for _ in range(missing):
            j = first_smallest(longer_s)
            split[j] += 1
            longer_s[j] = layer_s[j] * (split[j] + 1) + edge_s[j] if split[j] < limit[j] else math.inf
    while missing < 0:
        several = [j for j in range(stages) if split[j] > 1]
        split[first_greatest(several, [layer_s[j] * split[j] + edge_s[j] for j in several])] -= 1
        missing += 1
    return split


def balance_many(layers: int, timings: Timings, limit: np.ndarray) -> np.ndarray:
    """[n, s] the layers of the stages of n pipelines as balance_layers divides them, but for ties.

    Parameters
    ----------
    layers : total, each stage takes at least one
    limit : [n, s] most layers that fit in each stage; there must be room for all of them
    """
    there = np.arange(limit.shape[1])[None, :] < timings.stages[:, None]
    layer_s, edge_s = timings.layer_s, timings.edge_s
    level = (layers + np.cumsum(edge_s / layer_s, axis=1)[:, -1]) / np.cumsum(1 / layer_s, axis=1)[:, -1]
    split = np.floor((level[:, None] - edge_s) / layer_s + 1e-9)
    split = np.where(there, np.clip(split, 1, limit), 0)
    while len(rows := np.flatnonzero(split.sum(axis=1) < layers)):
        longer_s = layer_s[rows] * (split[rows] + 1) + edge_s[rows]
        room = there[rows] & (split[rows] < limit[rows])
        split[rows, np.where(room, longer_s, np.inf).argmin(axis=1)] += 1
    while len(rows := np.flatnonzero(split.sum(axis=1) > layers)):
        stage_s = layer_s[rows] * split[rows] + edge_s[rows]
        split[rows, np.where(split[rows] > 1, stage_s, -np.inf).argmax(axis=1)] -= 1
    return split


def fastest_layers(layers: int, layer_s: Sequence[float], limit: Sequence[int]) -> list[int] | None:
    """Layers per stage that minimise the sum of the stage times: the fastest stages are filled first.

    Parameters and result are those of balance_layers.
    """
    stages = len(layer_s)
    if layers < stages or min(limit) < 1 or sum(limit) < layers:
        return None
    split = [1] * stages
    missing = layers - stages
    for j in order(layer_s):
        taken = min(missing, limit[j] - 1)
        split[j] += taken
        missing -= taken
    return split

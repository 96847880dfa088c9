"""Which worker holds which part of a KV cache, and which worker sends what to which in a transfer.

A worker holds the layers of its pipeline stage and the KV heads of its tensor-parallel rank. Replicas of
different shapes divide the same (layer, head) grid differently. A transfer plan maps one division to the
other: each cell that a destination worker holds comes from exactly one source worker.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from runtime.protocol.message import StageShape

Stages = tuple[StageShape, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of the (layer, global KV head) grid, both ranges [first, end)."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def cells(self) -> int:
        """Number of (layer, head) pairs; each is 2 x tokens x head_dim values."""
        return (self.end_layer - self.first_layer) * (self.end_head - self.first_head)


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """One part that `source` sends to `destination` for every request on the route."""

    source: str
    destination: str
    part: Part


def head_range(rank: int, degree: int, kv_heads: int) -> tuple[int, int]:
    """Global KV heads [first, end) of a tensor-parallel rank.

    Heads are split evenly. With more ranks than heads, each head is replicated on degree / kv_heads
    neighbouring ranks.

    Raises
    ------
    ValueError : the heads neither split nor replicate evenly
    """
    if kv_heads % degree == 0:
        width = kv_heads // degree
        return rank * width, (rank + 1) * width
    if degree % kv_heads == 0:
        head = rank * kv_heads // degree
        return head, head + 1
    raise ValueError(f"{kv_heads} KV heads neither split nor replicate evenly over {degree} workers")


def held(stages: Stages, worker: str, kv_heads: int) -> Part:
    """The part that a worker holds of every request's KV cache.

    Raises
    ------
    KeyError : no stage has this worker
    """
    for stage in stages:
        if worker in stage.workers:
            heads = head_range(stage.workers.index(worker), len(stage.workers), kv_heads)
            return Part(stage.first_layer, stage.end_layer, *heads)
    raise KeyError(worker)


@lru_cache(maxsize=1024)
def transfers(source: Stages, destination: Stages, kv_heads: int) -> tuple[KvTransfer, ...]:
    """The transfer plan of a route, sorted by first layer: the order in which parts become ready.

    Parameters
    ----------
    source, destination : stages of the prefill and of the decode replica
    kv_heads : KV heads of the model

    Raises
    ------
    ValueError : the source lacks layers that the destination holds, or heads don't split evenly

    Notes
    -----
    If the source replicates a head, the copies share the work: they take turns with the (layer, destination)
    cells of that head, layer by layer. So their loads differ by at most one cell, and all have something to
    send as soon as the first layers are computed.
    """
    wanted = _cells_wanted(destination, kv_heads)
    if missing := sorted(set(wanted) - {layer for stage in source for layer in _layers(stage)}):
        raise ValueError(f"layers {missing} are held by the destination but not by the source")
    dealt: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for stage in source:
        copies = _holders(stage, kv_heads)
        turn = [0] * kv_heads
        for layer in _layers(stage):
            for worker, head in wanted.get(layer, ()):
                sender = copies[head][turn[head] % len(copies[head])]
                turn[head] += 1
                dealt[sender, worker, head].append(layer)
    return _merged(dealt)


@lru_cache(maxsize=4096)
def outgoing(source: Stages, worker: str, destination: Stages, kv_heads: int) -> tuple[KvTransfer, ...]:
    """The transfers of one source worker, sorted by first layer."""
    return tuple(t for t in transfers(source, destination, kv_heads) if t.source == worker)


def even_share(rank: int, degree: int, size: int) -> tuple[int, int]:
    """Rows [first, end) of one of `degree` equal pieces of a dimension; the last may be shorter or empty."""
    width = math.ceil(size / degree)
    return min(rank * width, size), min((rank + 1) * width, size)


def _layers(stage: StageShape) -> range:
    return range(stage.first_layer, stage.end_layer)


def _holders(stage: StageShape, kv_heads: int) -> list[list[str]]:
    """The workers of a stage that hold each global KV head."""
    holders: list[list[str]] = [[] for _ in range(kv_heads)]
    for rank, worker in enumerate(stage.workers):
        for head in range(*head_range(rank, len(stage.workers), kv_heads)):
            holders[head].append(worker)
    return holders


def _cells_wanted(stages: Stages, kv_heads: int) -> dict[int, list[tuple[str, int]]]:
    """The (worker, head) pairs that need each layer, by layer."""
    wanted: dict[int, list[tuple[str, int]]] = {}
    for stage in stages:
        pairs = [
            (worker, head)
            for rank, worker in enumerate(stage.workers)
            for head in range(*head_range(rank, len(stage.workers), kv_heads))
        ]
        for layer in _layers(stage):
            wanted.setdefault(layer, []).extend(pairs)
    return wanted


def _merged(dealt: dict[tuple[str, str, int], list[int]]) -> tuple[KvTransfer, ...]:
    """Merge cells into few rectangles: first layers into runs, then heads with the same runs of layers."""
    heads: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for (source, destination, head), layers in dealt.items():
        for first, end in _runs(layers):
            heads[source, destination, first, end].append(head)
    plan = [
        KvTransfer(source, destination, Part(first, end, *run))
        for (source, destination, first, end), members in heads.items()
        for run in _runs(members)
    ]
    return tuple(sorted(plan, key=lambda t: (t.part.first_layer, t.source, t.destination, t.part.first_head)))


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal runs [first, end) of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs

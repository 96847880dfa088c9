"""Every (worker, layer, head) of a destination comes from exactly one worker that holds it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_shapes import replica_cells, stages

from runtime.kv_cache.layout import (
    KvTransfer,
    Part,
    even_share,
    head_range,
    held,
    outgoing,
    transfers,
)
from runtime.protocol.message import StageShape

Stages = tuple[StageShape, ...]


@st.composite
def replicas(draw: st.DrawFn, name: str, layers: int, kv_heads: int) -> Stages:
    degrees = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if kv_heads % n == 0 or n % kv_heads == 0]
    cuts = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    bounds = [0, *sorted(cuts), layers]
    return stages(
        name,
        [(draw(st.sampled_from(degrees)), first, end) for first, end in pairwise(bounds)],
    )


@st.composite
def routes(draw: st.DrawFn) -> tuple[Stages, Stages, int]:
    layers, kv_heads = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return draw(replicas("p", layers, kv_heads)), draw(replicas("d", layers, kv_heads)), kv_heads


def holders(replica: Stages, kv_heads: int) -> set[tuple[str, int, int]]:
    """Brute force: (worker, layer, head) of everything that a replica holds, one query head per rank at a
    time. Rank r of n has the KV heads h for which some x in [0, kv_heads * n) maps to both."""
    grid = set()
    for stage in replica:
        degree = len(stage.workers)
        for rank, worker in enumerate(stage.workers):
            heads = {x // degree for x in range(kv_heads * degree) if x // kv_heads == rank}
            grid |= {(worker, layer, h) for layer in range(stage.first_layer, stage.end_layer) for h in heads}
    return grid


def cells(part: Part) -> list[tuple[int, int]]:
    layers = range(part.first_layer, part.end_layer)
    return [(layer, head) for layer in layers for head in range(part.first_head, part.end_head)]


def delivered(plan: tuple[KvTransfer, ...]) -> list[tuple[str, int, int]]:
    return [(transfer.destination, *cell) for transfer in plan for cell in cells(transfer.part)]


@settings(max_examples=300, deadline=None)
@given(routes())
def test_held_is_the_brute_force_grid(route: tuple[Stages, Stages, int]) -> None:
    replica, _, kv_heads = route
    grid = holders(replica, kv_heads)
    for worker in (worker for stage in replica for worker in stage.workers):
        mine = {(layer, head) for name, layer, head in grid if name == worker}
        assert set(cells(held(replica, worker, kv_heads))) == mine
    assert replica_cells(replica, kv_heads) == len(grid)


@settings(max_examples=500, deadline=None)
@given(routes())
def test_each_cell_arrives_once_from_a_holder(route: tuple[Stages, Stages, int]) -> None:
    source, destination, kv_heads = route
    plan = transfers(source, destination, kv_heads)
    arrivals = Counter(delivered(plan))
    assert set(arrivals) == holders(destination, kv_heads)
    assert set(arrivals.values()) == {1}
    have = holders(source, kv_heads)
    assert all((t.source, *cell) in have for t in plan for cell in cells(t.part))


@settings(max_examples=300, deadline=None)
@given(routes())
def test_copies_of_a_head_share_the_load(route: tuple[Stages, Stages, int]) -> None:
    source, destination, kv_heads = route
    load = Counter[str]()
    for transfer in transfers(source, destination, kv_heads):
        load[transfer.source] += transfer.part.cells
    for stage in source:
        loads = [load[worker] for worker in stage.workers]
        assert max(loads) - min(loads) <= (len(stage.workers) > kv_heads)


@settings(max_examples=200, deadline=None)
@given(routes())
def test_outgoing_partitions_the_plan(route: tuple[Stages, Stages, int]) -> None:
    source, destination, kv_heads = route
    workers = [worker for stage in source for worker in stage.workers]
    parts = [t for worker in workers for t in outgoing(source, worker, destination, kv_heads)]
    assert Counter(parts) == Counter(transfers(source, destination, kv_heads))


def test_same_shape_is_one_to_one() -> None:
    source, destination = stages("p", [(2, 0, 3), (1, 3, 8)]), stages("d", [(2, 0, 3), (1, 3, 8)])
    assert transfers(source, destination, 4) == (
        KvTransfer("p/0.0", "d/0.0", Part(0, 3, 0, 2)),
        KvTransfer("p/0.1", "d/0.1", Part(0, 3, 2, 4)),
        KvTransfer("p/1.0", "d/1.0", Part(3, 8, 0, 4)),
    )


def test_a_split_is_as_few_rectangles_as_possible() -> None:
    plan = transfers(stages("p", [(1, 0, 5)]), stages("d", [(2, 0, 2), (1, 2, 5)]), 4)
    assert [t.part for t in plan] == [Part(0, 2, 0, 2), Part(0, 2, 2, 4), Part(2, 5, 0, 4)]


def test_replicated_heads_go_copy_to_copy() -> None:
    plan = transfers(stages("p", [(4, 0, 6)]), stages("d", [(4, 0, 6)]), 2)
    assert [(t.source[-1], t.destination[-1]) for t in plan] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "2"),
        ("3", "3"),
    ]


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="3 KV heads"):
        head_range(0, 2, 3)
    with pytest.raises(ValueError, match=r"layers \[4\]"):
        transfers(stages("p", [(1, 0, 4)]), stages("d", [(1, 0, 5)]), 2)
    with pytest.raises(KeyError):
        held(stages("p", [(1, 0, 4)]), "d/0.0", 2)


@given(st.integers(1, 16), st.integers(1, 100))
def test_even_shares_cover_a_dimension(degree: int, size: int) -> None:
    shares = [even_share(rank, degree, size) for rank in range(degree)]
    assert [row for first, end in shares for row in range(first, end)] == list(range(size))
    assert all(end - first <= shares[0][1] for first, end in shares)

"""Paths through ranges of layers: valid, as the flow has them, within KV caches, around lost replicas."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from range_instances import instance, ranges_of

import hexgen2
from hexgen2.layer_ranges import LayerRanges, passing, range_of
from hexgen2.schedulers import PATH_SCHEDULERS
from hexgen2.search.layer_ranges.max_flow import FlowValue
from runtime.routing.paths.path_router import HIGH_WATER, PathRouter, layer_tokens
from runtime.routing.paths.range_graph import COORDINATOR, RangeGraph
from runtime.routing.windowed_room import WindowedRoom

CASE = f"{Path(__file__).parents[2] / 'support' / 'helix_case.json'}#small"
MANY = 1e12


@pytest.fixture(scope="module")
def placed() -> hexgen2.Placement:
    return hexgen2.search(case=CASE, strategy="helix", isl=100, osl=20)


def graph_of(seed: int, nodes: int, layers: int, partial: bool) -> RangeGraph | None:
    """A graph of random ranges with their max flow."""
    asked = instance(seed, nodes, layers, partial)
    ranges = ranges_of(asked, seed)
    flow = FlowValue(asked).flow(ranges)
    names = [str(v) for v in range(nodes)]
    held = {names[v]: each for v, each in enumerate(ranges) if each[1]}
    after = {
        a: tuple(
            b
            for b, (first, last) in held.items()
            if a != b and (first <= end < last if partial else first == end)
        )
        for a, (_, end) in held.items()
    }
    after[COORDINATOR] = tuple(name for name, (first, _) in held.items() if first == 0)
    weights = {(names[a], names[b]): tok_s for (a, b), tok_s in flow.edges.items()}
    weights |= {(COORDINATOR, names[v]): tok_s for v, tok_s in flow.entering.items()}
    return RangeGraph(held, after, weights, layers) if flow.tok_s else None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(0, 5))
def test_onward_hops_are_those_that_reach_the_last_layer(seed, partial, masks):
    graph = graph_of(seed, 7, 6, partial)
    if graph is None:
        return
    masked = set(random.Random(seed).sample(sorted(graph.ranges), min(masks, len(graph.ranges))))
    onward = graph.onward(lambda at, hop: hop.replica not in masked)
    walks = nx.DiGraph((a, b) for a, each in graph.after.items() for b in each if b not in masked)
    walks.add_edges_from((name, "end") for name, (_, end) in graph.ranges.items() if end == graph.layers)
    reach = nx.ancestors(walks, "end")
    for at, hops in onward.items():
        expected = [b for b in graph.after[at] if b in reach and b not in masked]
        assert [hop.replica for hop in hops] == expected
        assert all(hop.layers > 0 and hop.first == graph.end_of(at) for hop in hops)


@pytest.mark.parametrize("scheduler", PATH_SCHEDULERS)
def test_every_layer_once_and_only_where_there_is_room(placed, scheduler):
    router, rng = PathRouter(placed, scheduler, seed=3), random.Random(1)
    ranges = {replica.id: range_of(replica) for replica in placed.replicas}
    room, expected = layer_tokens(placed), Counter()
    alive, refused = {}, 0
    for number in range(600):
        tokens = rng.randint(20, 300)
        path = router.pick(tokens, tokens + 40)
        if path is None:
            refused += 1
        else:
            done = 0
            for hop in path:
                assert (
                    hop.first == done and ranges[hop.replica][0] <= done and hop.end == ranges[hop.replica][1]
                )
                done, needed = hop.end, (tokens + placed.workload.osl) * hop.layers
                alone = not any(name == hop.replica for own, _ in alive.values() for name in own)
                assert alone or expected[hop.replica] + needed <= HIGH_WATER * room[hop.replica]
                expected[hop.replica] += needed
            assert done == placed.model.layers
            router.start(number, path, tokens)
            alive[number] = {hop.replica: hop.layers for hop in path}, tokens
        if alive and (path is None or rng.random() < 0.3):
            ended = rng.choice(sorted(alive))
            layers, tokens = alive.pop(ended)
            router.end(ended)
            for name, count in layers.items():
                expected[name] -= (tokens + placed.workload.osl) * count
    assert refused
    for number in list(alive):
        router.end(number)
    assert not any(router.on.values())


def test_the_flow_is_followed_at_every_replica(placed):
    router = PathRouter(placed, room=dict.fromkeys(layer_tokens(placed), MANY))
    taken: Counter = Counter()
    for number in range(500):
        path = router.pick(1, 1)
        router.start(number, path, 1)
        for at, hop in zip([COORDINATOR, *(h.replica for h in path)], path, strict=False):
            taken[at, hop.replica] += 1
    total = sum(each.entering for each in passing(placed.replicas, placed.routes).values())
    flow = {(route.from_, route.to): route.flow_req_s for route in placed.routes}
    for pair, req_s in flow.items():
        assert taken[pair] == pytest.approx(500 * req_s / total, abs=len(placed.replicas))


def test_swarm_prefers_those_that_answer_quickly_and_queues_those_with_few(placed):
    """Two replicas of all layers; one takes three times as long."""
    whole = [
        replica.model_copy(
            update={"stages": [replica.stages[0].model_copy(update={"layers": (0, placed.model.layers)})]}
        )
        for replica in placed.replicas[:2]
    ]
    two = placed.model_copy(
        update={"replicas": whole, "routes": [], "layer_ranges": LayerRanges(partial_inference=False)}
    )
    a, b = (replica.id for replica in whole)
    counts = {}
    for scheduler in PATH_SCHEDULERS:
        router, counts[scheduler] = PathRouter(two, scheduler, room={a: MANY, b: MANY}), Counter()
        for number in range(400):
            (hop,) = router.pick(1, 1)
            router.start(number, (hop,), 1)
            counts[scheduler][hop.replica] += 1
            router.answered(COORDINATOR, hop.replica, 3.0 if hop.replica == a else 1.0)
            if hop.replica == b:  # The other one keeps its requests.
                router.end(number)
    assert counts["swarm"][b] / counts["swarm"][a] == pytest.approx(3, rel=0.05)
    assert counts["shortest-queue"][b] > 0.95 * 400
    assert 150 < counts["random"][a] < 250
    share = whole[0].utilisation * whole[0].capacity_req_s
    share /= sum(replica.utilisation * replica.capacity_req_s for replica in whole)
    assert counts["flow"][a] == pytest.approx(400 * share, abs=1)


def test_a_request_longer_than_expected_counts_as_it_is(placed):
    router = PathRouter(placed, expected_osl=5)
    path = router.pick(100, 140)
    router.start("a", path, 100)
    name = path[0].replica
    room = router.room[name]
    router.room[name] = 120.0 * path[0].layers
    assert [router.grow("a") for _ in range(20)] == [None] * 20
    assert router.grow("a") == name and router.latest_on(name) == "a"
    router.room[name] = room
    router.end("a")
    assert not router.on[name]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(PATH_SCHEDULERS)))
def test_lost_replicas_are_avoided_as_long_as_a_path_is_left(placed, seed, scheduler):
    rng = random.Random(seed)
    router = PathRouter(placed, scheduler, seed, room=dict.fromkeys(layer_tokens(placed), MANY))
    names = [replica.id for replica in placed.replicas]
    for number in range(20):
        router.start(number, router.pick(1, 1), 1)
    for name in rng.sample(names, len(names)):
        on_it = {number for number in range(20) if number in router.on[name]}
        assert set(router.lose(name)) == on_it
        for number in on_it:
            router.end(number)
        connected = any(end == placed.model.layers for end in _reached(router.graph))
        assert router.graph.connected == connected == router.fits(1)
        if not connected:
            assert router.pick(1, 1) is None
            return
        for number in on_it:
            path = router.pick(1, 1)
            assert not {hop.replica for hop in path} & set(router.lost)
            router.start(number, path, 1)


def _reached(graph: RangeGraph) -> set[int]:
    """Layers up to which a request can get."""
    open_, seen = [COORDINATOR], set()
    while open_:
        for name in graph.after[open_.pop()]:
            if name not in seen:
                seen.add(name)
                open_.append(name)
    return {graph.ranges[name][1] for name in seen}


def test_layers_with_a_window_count_the_end_of_a_request(placed):
    """A long request takes the same share of a replica as one that fills its window; a short one its own."""
    rooms = {
        name: WindowedRoom(tokens=400, window=16, running=32, block_tokens=8) for name in layer_tokens(placed)
    }
    whole = dict.fromkeys(rooms, 1e9)
    router = PathRouter(placed, room=whole, high_water=1.0, block_tokens=8, windowed=rooms)
    (beside,) = {room.beside_prompts for room in rooms.values()}
    started = 0
    while (path := router.pick(5000, 9000, 100)) is not None:
        router.start(started, path, 5000, 100)
        started += 1
    fullest = max(len(requests) for requests in router.on.values())
    assert fullest == beside // 24
    for number in range(started):
        assert router.overfull(number) is None
        router.end(number)
    assert not any(router._expected.values())
    assert router.longest() > 100_000

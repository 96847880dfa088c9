"""Which requests start on paths, while replicas are lost and return; and accounts in blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexgen2
from hexgen2.checks import violations
from hexgen2.layer_ranges import range_of
from hexgen2.schedulers import PATH_SCHEDULERS
from runtime.routing.fair_queue import FirstCome
from runtime.routing.output_lengths import Buckets
from runtime.routing.paths.path_admission import PathAdmission
from runtime.routing.paths.path_router import PathRouter
from runtime.routing.paths.range_plan import RangePlan
from runtime.routing.refusals import TooLong, Unavailable

CASE = f"{Path(__file__).parents[2] / 'support' / 'helix_case.json'}#small"
SIZE = 16


@pytest.fixture(scope="module")
def placed() -> hexgen2.Placement:
    return hexgen2.search(case=CASE, strategy="helix", isl=100, osl=20)


@dataclass(eq=False)
class Asked:
    request_id: str
    prompt_tokens: int
    output_limit: int = 20

    @property
    def capacity_tokens(self):
        return self.prompt_tokens + self.output_limit

    @property
    def one_token(self):
        return self.output_limit == 1


def in_blocks(placed, tokens, scheduler="flow", seed=0, high_water=1.0, **others):
    """A router over replicas that hold so many tokens, in blocks."""
    room = {each.id: tokens * (range_of(each)[1] - range_of(each)[0]) for each in placed.replicas}
    for name, own in others.items():
        room[name] = own * room[name] // tokens
    return PathRouter(placed, scheduler, seed, room, high_water, block_tokens=SIZE)


def admission(placed, tokens=640, **options):
    return PathAdmission(in_blocks(placed, tokens, **options), FirstCome(100), Buckets(placed.workload))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(PATH_SCHEDULERS)))
def test_blocks_that_are_promised_are_there_whatever_requests_do(placed, seed, scheduler):
    """A worker that has these blocks, all layers of its range in each, never lacks one: a request that grows
    is told first, and whoever came last gives way."""
    rng, blocks = random.Random(seed), 40
    router = in_blocks(placed, blocks * SIZE, scheduler, seed, high_water=rng.choice((0.8, 1.0)))
    held, tokens = {name: {} for name in router.on}, {}

    def leave(request):
        for hop in path_of.pop(request):
            del held[hop.replica][request]
            router.release(request, hop.replica)
        del tokens[request]

    path_of = {}
    for number in range(150):
        length = rng.randint(1, 200)
        output = rng.randint(1, 30)
        path = router.pick(length, length + 60, output)
        if path is not None:
            router.start(number, path, length, output)
            path_of[number], tokens[number] = path, length
            for hop in path:
                held[hop.replica][number] = -(-length // SIZE)
        for request in rng.sample(sorted(path_of), min(len(path_of), 5)):
            if request not in path_of:
                continue
            full = router.grow(request)
            tokens[request] += 1
            while full is not None and request in path_of:
                leave(router.latest_on(full))
                full = router.overfull(request) if request in path_of else None
            if request in path_of:
                for hop in path_of[request]:
                    held[hop.replica][request] = -(-tokens[request] // SIZE)
            if request in path_of and rng.random() < 0.05:
                leave(request)
        for name, own in held.items():
            assert sum(own.values()) <= blocks, name
    for request in list(path_of):
        leave(request)
    assert not any(router.on.values()) and not any(router._expected.values()) and not router._requests


def test_the_longest_request_is_the_longest_that_fits(placed):
    names = [replica.id for replica in placed.replicas]
    router = in_blocks(placed, 640)
    assert router.longest() == 640 and router.fits(640) and not router.fits(641)
    less = in_blocks(placed, 640, **{name: 320 for name in names if range_of(placed.replica(name))[0] == 0})
    assert less.longest() == 320
    for name in names:
        less.lose(name)
    assert less.longest() == 0 and not less.graph.connected


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(PATH_SCHEDULERS)))
def test_a_replica_that_returns_is_used_as_before(placed, seed, scheduler):
    rng, router = random.Random(seed), in_blocks(placed, 10**7, scheduler, seed)
    whole = router.graph
    names = [replica.id for replica in placed.replicas]
    lost = rng.sample(names, rng.randint(1, len(names)))
    for name in lost:
        router.lose(name)
    for name in rng.sample(lost, len(lost)):
        router.regain(name)
    assert router.graph.after == whole.after and router.graph.flow == whole.flow and not router.lost
    taken = set()
    for number in range(300):
        path = router.pick(1, 1)
        router.start(number, path, 1)
        taken |= {hop.replica for hop in path}
    if scheduler == "flow":
        assert taken == {replica.id for replica in placed.replicas if replica.utilisation > 0}


def test_requests_start_in_turn_as_room_is_released_hop_by_hop(placed):
    admitting = admission(placed, 160)
    first, second = Asked("r0", 140), Asked("r1", 140)
    admitting.enqueue(first)
    admitting.enqueue(second)
    started, path = admitting.next()
    assert started is first
    others = []
    while (more := admitting.next()) is not None:
        others.append(more)
    assert all(not {hop.replica for hop in path} & {hop.replica for hop in own} for _, own in others)
    if not others:
        for hop in path[:-1]:
            admitting.router.release("r0", hop.replica)
            assert admitting.next() is None or hop.replica != path[-1].replica
        admitting.router.release("r0", path[-1].replica)
    with pytest.raises(TooLong):
        admitting.enqueue(Asked("r2", 150))


def test_requests_wait_for_replicas_that_return_and_are_stranded_without(placed):
    admitting = admission(placed)
    firsts = [replica.id for replica in placed.replicas if range_of(replica)[0] == 0]
    for name in firsts:
        assert admitting.lose(name, f"{name} died", returns=True) == []
    waiting = Asked("r0", 100)
    admitting.enqueue(waiting)
    assert admitting.next() is None and admitting.context_tokens == 640
    admitting.restore(firsts[0])
    assert admitting.next()[0] is waiting
    admitting.lose(firsts[0], "again", returns=True)
    admitting.put_back(waiting)
    stranded = [admitting.give_up(name) for name in firsts]
    assert stranded[-1] == [waiting] and not any(stranded[:-1])
    with pytest.raises(Unavailable, match="no replica is left to serve"):
        admitting.enqueue(Asked("r1", 1))
    assert admitting.context_tokens == 0


def test_answers_are_expected_to_be_as_long_as_they_were(placed):
    admitting = admission(placed, 3200)
    for _ in range(20):
        admitting.learn(100, 500, 400)
    admitting.enqueue(Asked("r0", 100, output_limit=500))
    _, path = admitting.next()
    hop = path[0]
    layers = range_of(placed.replica(hop.replica))
    assert admitting.router._expected[hop.replica] == 512 * (layers[1] - layers[0])  # 500, in blocks


def test_the_placement_without_a_replica_passes_the_checks(placed):
    plan = RangePlan(placed)
    assert plan.placement(()) is placed
    for replica in placed.replicas:
        left = plan.placement([replica.id])
        assert violations(left) == []
        assert {*left.lost} == {*replica.gpus} and len(left.replicas) == len(placed.replicas) - 1
        assert 0 <= left.throughput.req_s <= placed.throughput.req_s * (1 + 1e-6)

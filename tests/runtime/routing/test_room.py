"""The front end's account of KV cache: what requests hold now, and what those that decode will take."""

import random

import pytest

from runtime.routing.kv_budget import Room


def test_what_requests_hold_grows_and_comes_back():
    room = Room(kv_budget_tokens=100, max_batch=4)
    room.hold("a", 10)
    room.grow("a")
    room.grow("a", 4)
    room.grow("unknown", 50)
    assert room.held_tokens == room.held["a"] == 15
    room.release("a")
    room.release("a")
    assert (room.held, room.held_tokens) == ({}, 0)


def test_a_request_is_let_in_if_all_can_still_grow():
    room = Room(kv_budget_tokens=100, max_batch=4, growth_tokens=20)
    room.hold("a", 10)
    assert room.has_room(50, prefill_only=False)  # 10 + 50 + 2 x 20
    assert not room.has_room(51, prefill_only=False)
    assert room.has_room(90, prefill_only=True)
    assert not room.has_room(91, prefill_only=True)
    room.grow("a", 10)
    assert not room.has_room(50, prefill_only=False)


def test_an_empty_replica_takes_what_could_be_held_at_all():
    room = Room(kv_budget_tokens=100, max_batch=4, growth_tokens=90)
    assert room.has_room(95, prefill_only=False)


def test_two_batches_at_most_and_none_while_it_refuses():
    room = Room(kv_budget_tokens=1000, max_batch=2)
    for name in range(4):
        assert room.has_room(1, prefill_only=False)
        room.hold(name, 1)
    assert not room.has_room(1, prefill_only=False)
    assert room.has_room(1, prefill_only=True)
    room.refused = True
    assert not room.has_room(1, prefill_only=True)
    room.release(0)
    assert room.has_room(1, prefill_only=False)


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_that_of_the_parts(seed):
    rng, room = random.Random(seed), Room(kv_budget_tokens=500, max_batch=9)
    for _ in range(300):
        name = rng.randrange(12)
        rng.choice([room.grow, room.release, lambda n: n in room.held or room.hold(n, rng.randrange(9))])(
            name
        )
        assert room.held_tokens == sum(room.held.values())

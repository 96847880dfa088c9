"""The front end's accounting of KV cache: what requests hold now, and what decoding ones will take."""

import random

import pytest

from runtime.routing.kv_budget import KvBudget


def test_what_requests_hold_grows_and_comes_back():
    budget = KvBudget(kv_budget_tokens=100, max_batch=4)
    budget.hold("a", 10)
    budget.grow("a")
    budget.grow("a", 4)
    budget.grow("unknown", 50)
    assert budget.held_tokens == budget.held["a"] == 15
    budget.release("a")
    budget.release("a")
    assert (budget.held, budget.held_tokens) == ({}, 0)


def test_a_request_is_let_in_if_all_can_still_grow():
    budget = KvBudget(kv_budget_tokens=100, max_batch=4, growth_tokens=20)
    budget.hold("a", 10)
    assert budget.has_room(50, prefill_only=False)  # 10 + 50 + 2 x 20
    assert not budget.has_room(51, prefill_only=False)
    assert budget.has_room(70, prefill_only=True)  # 10 + 70 + 20
    assert not budget.has_room(71, prefill_only=True)
    budget.grow("a", 10)
    assert not budget.has_room(50, prefill_only=False)


def test_an_empty_replica_takes_what_could_be_held_at_all():
    budget = KvBudget(kv_budget_tokens=100, max_batch=4, growth_tokens=90)
    assert budget.has_room(95, prefill_only=False)


def test_two_batches_at_most_and_none_while_it_refuses():
    budget = KvBudget(kv_budget_tokens=1000, max_batch=2)
    for name in range(4):
        assert budget.has_room(1, prefill_only=False)
        budget.hold(name, 1)
    assert not budget.has_room(1, prefill_only=False)
    assert budget.has_room(1, prefill_only=True)
    budget.refused = True
    assert not budget.has_room(1, prefill_only=True)
    budget.release(0)
    assert budget.has_room(1, prefill_only=False)


def test_prompts_for_others_do_not_grow_and_take_no_place_in_the_batch():
    budget = KvBudget(kv_budget_tokens=1000, max_batch=1, growth_tokens=100)
    for name in range(4):
        budget.hold(name, 100, target="elsewhere")
    assert budget.has_room(500, prefill_only=False)  # 4 x 100 + 500 + 100
    assert not budget.has_room(501, prefill_only=False)
    assert budget.has_room(600, prefill_only=True)
    budget.hold("a", 100)
    budget.hold("b", 100)
    assert not budget.has_room(1, prefill_only=False)
    assert budget.has_room(200, prefill_only=True)  # beside the growth of a and b
    assert not budget.has_room(201, prefill_only=True)


def test_prompts_for_others_leave_room_for_those_that_decode():
    budget = KvBudget(kv_budget_tokens=1000, max_batch=8, outgoing_tokens=100)
    assert budget.has_room_toward("x", 300, share=0.5)  # one always may
    budget.hold("a", 40, target="x")
    assert budget.has_room_toward("x", 10, share=0.5) and not budget.has_room_toward("x", 11, share=0.5)
    budget.hold("own", 500)
    assert budget.has_room_toward("y", 60, share=0.1) and not budget.has_room_toward("y", 61, share=1.0)
    budget.release("a")
    assert budget.has_room_toward("y", 300, share=0.1)


def test_memory_that_comes_in_blocks_is_counted_in_blocks():
    budget = KvBudget(kv_budget_tokens=64, max_batch=8, rounding_tokens=15)
    budget.hold("a", 17)  # 2 blocks of 16
    assert budget.has_room(17, prefill_only=True)
    assert not budget.has_room(18, prefill_only=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_that_of_the_parts(seed):
    rng, budget = random.Random(seed), KvBudget(kv_budget_tokens=500, max_batch=9)
    for _ in range(300):
        name = rng.randrange(12)
        rng.choice(
            [budget.grow, budget.release, lambda n: n in budget.held or budget.hold(n, rng.randrange(9))]
        )(name)
        assert budget.held_tokens == sum(budget.held.values())


def test_a_request_has_to_fit_into_one_attention_group():
    assert KvBudget(kv_budget_tokens=100, max_batch=4).largest_request_tokens == 100
    assert KvBudget(kv_budget_tokens=100, max_batch=4, groups=4).largest_request_tokens == 25

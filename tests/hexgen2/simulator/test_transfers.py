"""Transfers that share links, compared with closed forms."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from hexgen2.simulator.transfers import RouteCost, Transfers, binding


class Clock:
    """Runs scheduled events in order."""

    def __init__(self):
        self.events, self.count, self.landed = [], 0, {}

    def schedule(self, time_s, call, argument):
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, call, argument))

    def done(self, request, now):
        self.landed[request] = now

    def run(self, transfers):
        while self.events:
            now, _, call, argument = heapq.heappop(self.events)
            call(now, argument)
            if not self.events or self.events[0][0] > now:
                transfers.settle(now)
        return self.landed


NIC = RouteCost({("nic",): 0.01}, 100.0, 0.0)


def test_one_transfer_takes_its_time_after_the_prefill_that_it_could_not_hide_in():
    clock = Clock()
    transfers = Transfers(clock.schedule)
    transfers.begin("a", NIC, 100, 1, 0.0, 5.0, clock.done)  # one layer: nothing to send before its end
    assert clock.run(transfers) == {"a": approx(6.0)}


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_only_the_last_layer_is_left_where_the_prefill_is_longer(latency):
    clock = Clock()
    transfers = Transfers(clock.schedule)
    cost = RouteCost({("nic",): 0.01}, 100.0, latency)
    transfers.begin("a", cost, 100, 10, 0.0, 5.0, clock.done)
    assert clock.run(transfers) == {"a": approx(5.0 + latency + 0.1)}


def test_a_slow_link_is_busy_from_the_start_of_the_prefill_on():
    clock = Clock()
    transfers = Transfers(clock.schedule)
    transfers.begin("a", NIC, 1000, 1000, 2.0, 4.0, clock.done)  # 10 s alone, 2 s of them during the prefill
    assert clock.run(transfers) == {"a": approx(12.0)}


def test_equal_transfers_share_equally():
    clock = Clock()
    transfers = Transfers(clock.schedule)
    for name in "abc":
        transfers.begin(name, NIC, 100, 1, 0.0, 1.0, clock.done)
    assert clock.run(transfers) == {name: approx(1.0 + 3 * 1.0) for name in "abc"}


def test_a_later_one_halves_the_pace_of_the_first_while_both_are_under_way():
    clock = Clock()
    transfers = Transfers(clock.schedule)
    transfers.begin("a", NIC, 200, 1, 0.0, 0.0, clock.done)
    transfers.begin("b", NIC, 50, 1, 0.0, 1.0, clock.done)
    # a: 1 s alone, then both at half rate. b needs 0.5 s of the link, so it takes 1 s; then a has 0.5 s left.
    assert clock.run(transfers) == {"b": approx(2.0), "a": approx(2.5)}


def test_a_cancelled_one_makes_room():
    clock = Clock()
    transfers = Transfers(clock.schedule)
    transfers.begin("a", NIC, 100, 1, 0.0, 0.0, clock.done)
    transfers.begin("b", NIC, 100, 1, 0.0, 0.0, clock.done)
    clock.schedule(1.0, lambda now, name: transfers.cancel(name), "b")
    assert clock.run(transfers) == {"a": approx(1.5)}


def test_prefills_that_press_each_other_go_at_half_pace_until_one_is_gone():
    clock = Clock()
    transfers = Transfers(clock.schedule)
    for name in "ab":
        transfers.begin(name, NIC, 1000, 1000, 0.0, 4.0, clock.done)  # 10 s alone: each needs more than half
    clock.schedule(1.0, lambda now, name: transfers.cancel(name), "b")
    assert clock.run(transfers) == {"a": approx(10.5)}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["p", "q"]),
            st.integers(1, 500),
            st.floats(0, 5),
            st.floats(0, 3),
            st.integers(1, 8),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_link_carries_more_than_it_can_and_nothing_lands_before_it_is_computed(asked):
    costs = {
        "p": RouteCost({("nic",): 0.01, ("port", 1): 0.002}, 1.0, 0.0),
        "q": RouteCost({("nic",): 0.02, ("uplink",): 0.03}, 1.0, 0.0),
    }
    clock = Clock()
    transfers = Transfers(clock.schedule)
    for k, (route, tokens, begins, takes, layers) in enumerate(asked):
        transfers.begin(k, costs[route], tokens, layers, begins, begins + takes, clock.done)
    landed = clock.run(transfers)
    assert landed.keys() == set(range(len(asked)))
    for k, (route, tokens, begins, takes, layers) in enumerate(asked):
        alone = tokens * max(costs[route].busy_s.values())
        assert landed[k] >= begins + takes + alone / layers - 1e-9
        assert landed[k] >= begins + alone - 1e-9
    for resource in [("nic",), ("uplink",)]:
        users = [k for k, one in enumerate(asked) if resource in costs[one[0]].busy_s]
        if users:
            work = sum(costs[asked[k][0]].busy_s[resource] * asked[k][1] for k in users)
            assert max(landed[k] for k in users) - min(asked[k][2] for k in users) >= work - 1e-9


def test_only_resources_that_can_bind_are_kept():
    costs = {
        "ad": RouteCost({"card a": 2.0, "link ad": 1.0, "port d": 0.1}, 1.0, 0.0),
        "ae": RouteCost({"card a": 2.0, "link ae": 3.0}, 1.0, 0.0),
    }
    kept = binding(costs)
    assert kept["ad"].busy_s == {"card a": 2.0}
    assert kept["ae"].busy_s == {"card a": 2.0, "link ae": 3.0}

"""Transfers that share links, compared with closed forms."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from hexgen2.simulator.transfers import RouteCost, Transfers, _demand, _Path, _Resource, _Route, binding


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
OTHER = RouteCost({("nic",): 0.01}, 100.0, 0.0)
THIRD = RouteCost({("nic",): 0.01}, 100.0, 0.0)


def landed(*asked, cancel=()):
    """When each request of (requests, cost, tokens, layers, begins_s, computed_s) arrives; `cancel` has pairs
    (time_s, request)."""
    clock = Clock()
    transfers = Transfers(clock.schedule)
    for one in asked:
        transfers.begin(*one, clock.done)
    for time_s, request in cancel:
        clock.schedule(time_s, lambda now, name: transfers.cancel(name), request)
    return clock.run(transfers)


def test_one_transfer_takes_its_time_after_the_prefill_that_it_could_not_hide_in():
    # One layer: nothing to send before its end.
    assert landed(("a", NIC, 100, 1, 0.0, 5.0)) == {"a": approx(6.0)}


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_only_the_last_layer_is_left_where_the_prefill_is_longer(latency):
    cost = RouteCost({("nic",): 0.01}, 100.0, latency)
    assert landed(("a", cost, 100, 10, 0.0, 5.0)) == {"a": approx(5.0 + latency + 0.1)}


def test_a_slow_link_is_busy_from_the_start_of_the_prefill_on():
    # 10 s alone, 2 s of them during the prefill.
    assert landed(("a", NIC, 1000, 1000, 2.0, 4.0)) == {"a": approx(12.0)}


def test_the_prompts_of_a_step_arrive_together():
    assert landed(("ab", NIC, 200, 1, 0.0, 1.0)) == {"a": approx(3.0), "b": approx(3.0)}


def test_a_route_sends_first_what_was_computed_first():
    found = landed(("a", NIC, 200, 1, 0.0, 0.0), ("b", NIC, 50, 1, 0.0, 1.0))
    assert found == {"a": approx(2.0), "b": approx(2.5)}


def test_what_is_being_computed_waits_for_what_is_computed():
    # b could send 1 s of its 2 s while it is computed, but a has the link for half of that.
    found = landed(("a", NIC, 100, 1, 0.0, 0.5), ("b", NIC, 200, 200, 0.5, 2.5))
    assert found["a"] == approx(1.5)
    assert found["b"] == approx(2.5 + 2 - (200 * 0.01 * (1 - 1 / 200)) / 2, abs=0.01)


def test_routes_share_a_card_equally():
    found = landed(
        *((name, cost, 100, 1, 0.0, 1.0) for name, cost in zip("abc", (NIC, OTHER, THIRD), strict=True))
    )
    assert found == {name: approx(1.0 + 3 * 1.0) for name in "abc"}


def test_a_route_halves_the_pace_of_another_while_both_send():
    # a: 1 s alone, then both at half rate. b needs 0.5 s of the card, so it takes 1 s; then a has 0.5 s left.
    found = landed(("a", NIC, 200, 1, 0.0, 0.0), ("b", OTHER, 50, 1, 0.0, 1.0))
    assert found == {"b": approx(2.0), "a": approx(2.5)}


def test_routes_have_equal_times_whatever_part_of_a_prompt_they_send():
    # A prompt of b takes the card for 10 s, those of a for 1 s: each has half of it for 20 s.
    part = RouteCost({("nic",): 0.1}, 100.0, 0.0)
    found = landed(*((f"a{k}", NIC, 100, 1, 0.0, 0.0) for k in range(20)), (["b"], part, 100, 1, 0.0, 0.0))
    assert found["b"] == approx(20.0)


def test_what_a_route_cannot_use_others_get():
    # c is limited to a quarter of the card elsewhere, so a has three quarters of it, and not a half.
    narrow = RouteCost({("nic",): 0.01, ("link",): 0.04}, 100.0, 0.0)
    found = landed(("a", NIC, 300, 1, 0.0, 0.0), ("c", narrow, 100, 1, 0.0, 0.0))
    assert found == {"a": approx(4.0), "c": approx(4.0)}


def test_a_cancelled_one_makes_room():
    found = landed(("a", NIC, 100, 1, 0.0, 0.0), ("b", NIC, 100, 1, 0.0, 5.0), cancel=[(1.0, "b")])
    assert found == {"a": approx(1.0)}


def test_requests_of_the_same_step_go_on_without_a_cancelled_one():
    assert landed(("ab", NIC, 200, 1, 0.0, 0.0), cancel=[(1.0, "b")]) == {"a": approx(2.0)}


def test_prefills_that_press_each_other_go_at_half_pace():
    # 10 s alone, 4 s long: each could use the whole card and has half of it, until the end of both.
    found = landed(("a", NIC, 1000, 1000, 0.0, 4.0), ("b", OTHER, 1000, 1000, 0.0, 4.0))
    assert found == {"a": approx(20.0), "b": approx(20.0)}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["p", "q", "r"]),
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
        "r": RouteCost({("uplink",): 0.01}, 1.0, 0.0),
    }
    found = landed(
        *(
            ([k], costs[route], tokens, layers, begins, begins + takes)
            for k, (route, tokens, begins, takes, layers) in enumerate(asked)
        )
    )
    assert found.keys() == set(range(len(asked)))
    for k, (route, tokens, begins, takes, layers) in enumerate(asked):
        alone = tokens * max(costs[route].busy_s.values())
        assert found[k] >= begins + takes + alone / layers - 1e-9
        assert found[k] >= begins + alone - 1e-9
    for resource in [("nic",), ("uplink",)]:
        users = [k for k, one in enumerate(asked) if resource in costs[one[0]].busy_s]
        if users:
            work = sum(costs[asked[k][0]].busy_s[resource] * asked[k][1] for k in users)
            assert max(found[k] for k in users) - min(asked[k][2] for k in users) >= work - 1e-9


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rates_are_fair_and_waste_nothing(data):
    # Each route has its demand or a full resource, and no less than equal shares would give.
    names = [f"r{k}" for k in range(data.draw(st.integers(1, 4)))]
    resources = {name: _Resource() for name in names}
    paths, routes = [], []
    for _ in range(data.draw(st.integers(1, 7))):
        own = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        uses = [(resources[name], data.draw(st.floats(0.001, 1))) for name in own]
        paths.append(_Path(uses, min(1 / seconds for _, seconds in uses)))
    for path in paths:
        asked = data.draw(st.lists(st.floats(0.1, 1000), min_size=1, max_size=3))
        for _ in range(data.draw(st.integers(1, 4))):
            route = _Route(path)
            # A demand may change before the rates are asked for; several routes may have the same.
            for demand in data.draw(st.lists(st.sampled_from(asked), min_size=1, max_size=3)):
                _demand(route, min(demand, path.alone))
            routes.append(route)
    shared = Transfers(Clock().schedule)._shared_rates(paths)
    assert shared.keys() == {(route.path, route.demand) for route in routes}
    rates = {route: shared[route.path, route.demand] for route in routes}
    load = {
        name: sum(s * rates[route] for route in routes for used, s in route.path.uses if used is resource)
        for name, resource in resources.items()
    }
    users = {
        id(resource): sum(resource in (used for used, _ in route.path.uses) for route in routes)
        for resource in resources.values()
    }
    assert all(share <= 1 + 1e-9 for share in load.values())
    for route in routes:
        full = [n for n, of in resources.items() if route.path in of.users and load[n] > 1 - 1e-9]
        assert rates[route] == approx(route.demand) or full
        equal = min(1 / (users[id(resource)] * seconds) for resource, seconds in route.path.uses)
        assert rates[route] >= min(route.demand, equal) * (1 - 1e-9)


def test_only_resources_that_can_bind_are_kept():
    costs = {
        "ad": RouteCost({"card a": 2.0, "link ad": 1.0, "port d": 0.1}, 1.0, 0.0),
        "ae": RouteCost({"card a": 2.0, "link ae": 3.0}, 1.0, 0.0),
    }
    kept = binding(costs)
    assert kept["ad"].busy_s == {"card a": 2.0}
    assert kept["ae"].busy_s == {"card a": 2.0, "link ae": 3.0}

"""The router's guarantees: proportions after any number of picks, no bursts, no starvation."""

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.routing.router import CREDIT_LIMIT, Route, Router, routes_without

weights = st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=12)


def routes_from(values):
    return [Route(f"p{i}", f"d{i}", value) for i, value in enumerate(values)]


@settings(deadline=None)
@given(weights, st.integers(1, 400))
def test_every_prefix_is_within_one_request_of_its_share(values, picks):
    routes = routes_from(values)
    router, counts, total = Router(routes), Counter(), sum(values)
    for done in range(1, picks + 1):
        counts[router.pick()] += 1
        for route in routes:
            assert abs(counts[route] - done * route.weight / total) < 1


@settings(deadline=None)
@given(weights, st.integers(1, 200), st.integers(1, 200), st.data())
def test_a_route_without_room_is_not_starved_and_does_not_burst(values, blocked_picks, free_picks, data):
    routes = routes_from(values)
    blocked = data.draw(st.sampled_from(routes))
    router = Router(routes)
    others, counts = sum(values) - blocked.weight, Counter()
    for _ in range(blocked_picks):
        counts[router.pick(lambda route: route is not blocked)] += 1
    assert counts[blocked] == 0
    assert len(routes) > 1 or counts == {None: blocked_picks}
    for route in routes:
        if route is not blocked:
            assert abs(counts[route] - blocked_picks * route.weight / others) < 1
    counts = Counter(router.pick() for _ in range(free_picks))
    for route in routes:
        assert abs(counts[route] - free_picks * route.weight / sum(values)) < 2


def test_equal_weights_alternate():
    router = Router(routes_from([2, 2]))
    assert [router.pick().prefill for _ in range(6)] == ["p0", "p1"] * 3


def test_spares_are_used_only_when_no_planned_route_has_room():
    planned, spare, other = Route("p", "d", 1.0), Route("p", "e", 0.0), Route("q", "e", 0.0)
    router = Router([spare, planned, other])
    assert {router.pick() for _ in range(20)} == {planned}
    assert Counter(router.pick(lambda route: route.decode == "e") for _ in range(10)) == {spare: 5, other: 5}


def test_nothing_admissible_changes_nothing():
    one, other = Router(routes_from([3, 1])), Router(routes_from([3, 1]))
    for _ in range(5):
        assert one.pick(lambda _: False) is None
    assert [one.pick() for _ in range(8)] == [other.pick() for _ in range(8)]


def test_no_routes():
    assert Router([]).pick() is None


@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_no_route_to_a_lost_replica_is_left(lost):
    routes = [Route("p0", "d0", 1), Route("p0", "d1", 1), Route("p1", "d0", 1), Route("p1", "d1", 2)]
    router = Router(routes)
    router.pick()
    left = router.with_routes(routes_without(router.routes, {lost}))
    assert all(lost not in (route.prefill, route.decode) for route in left.routes)
    assert lost not in {name for _ in range(10) for name in _names(left.pick())}


def _names(route):
    return (route.prefill, route.decode)


def test_with_routes_goes_on_where_the_router_stands():
    router, reference = Router(routes_from([3, 2])), Router(routes_from([3, 2]))
    before = [router.pick(), router.pick()], [reference.pick(), reference.pick()]
    assert before[0] == before[1]
    successor = router.with_routes(router.routes)
    assert [successor.pick() for _ in range(10)] == [reference.pick() for _ in range(10)]


def test_the_router_needs_neither_torch_nor_asyncio():
    check = "import sys, runtime.routing.router; print('torch' in sys.modules, 'asyncio' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "False"]


limits = st.lists(st.sampled_from([0, 0, 100, 200]), min_size=1, max_size=8)


@st.composite
def limited_routes(draw):
    """Routes, some of which take long prompts only."""
    least = draw(limits)
    return [Route(f"p{i}", f"d{i}", draw(st.floats(0.1, 10)), tokens) for i, tokens in enumerate(least)]


@settings(deadline=None)
@given(limited_routes(), st.lists(st.integers(1, 300), max_size=200))
def test_every_request_gets_a_route_and_short_ones_none_for_long_prompts_while_there_is_room(routes, prompts):
    router = Router(routes)
    shortest = min(route.min_prompt_tokens for route in routes)
    for tokens in prompts:
        picked = router.pick(prompt_tokens=tokens)
        assert picked is not None
        assert tokens >= picked.min_prompt_tokens or picked.min_prompt_tokens == shortest


@settings(deadline=None)
@given(limited_routes(), st.integers(0, 10**6))
def test_shares_hold_where_there_are_long_prompts_enough(routes, seed):
    """However prompts follow one another: of a long run, each route gets its share but for the credit that it
    may have left."""
    router, counts, rng, picks = Router(routes), Counter(), random.Random(seed), 6000
    total = sum(route.weight for route in routes)
    longer = {tokens: sum(r.weight for r in routes if r.min_prompt_tokens >= tokens) for tokens in (100, 200)}
    # Of every length a little more than the routes for such prompts should have.
    spare = 1.15
    over_200, over_100 = (min(1.0, spare * longer[tokens] / total) for tokens in (200, 100))
    for _ in range(picks):
        drawn = rng.random()
        tokens = 250 if drawn < over_200 else 150 if drawn < over_100 else 50
        counts[router.pick(prompt_tokens=tokens)] += 1
    for route in routes:
        assert abs(counts[route] - picks * route.weight / total) < (len(routes) + 1) * CREDIT_LIMIT
        if not router.takes(route, 50) and over_100 < 1:
            assert counts[route] > 0


@settings(deadline=None)
@given(limited_routes(), st.integers(1, 400))
def test_credit_is_bounded_while_no_long_prompt_comes(routes, picks):
    router = Router(routes)
    for _ in range(picks):
        assert router.pick(prompt_tokens=1) is not None
    credits = [standing.credit for standing in router._standing]
    assert sum(credits) == pytest.approx(0, abs=1e-6)
    assert all(-len(routes) * (CREDIT_LIMIT + 1) <= credit <= CREDIT_LIMIT + 1 for credit in credits)


def test_after_short_prompts_the_long_ones_go_to_their_route_until_it_has_caught_up():
    short, long = Route("m", "m", 3.0), Route("p", "m", 1.0, 1000)
    router = Router([short, long])
    assert {router.pick(prompt_tokens=10) for _ in range(40)} == {short}  # the other one is due 10 requests
    caught_up = [router.pick(prompt_tokens=2000) for _ in range(40)]
    assert caught_up[:10] == [long] * 10
    assert 9 + 10 <= caught_up.count(long) <= 11 + 10


def test_limits_make_no_difference_to_long_prompts():
    plain, limited = Router(routes_from([3, 2])), Router([Route("p0", "d0", 3), Route("p1", "d1", 2, 500)])
    for _ in range(50):
        assert plain.pick().prefill == limited.pick(prompt_tokens=500).prefill


@settings(deadline=None)
@given(limited_routes(), st.lists(st.tuples(st.integers(1, 300), st.sets(st.integers(0, 7))), max_size=200))
def test_no_request_waits_beside_room_nor_leaves_room_that_its_length_allows(routes, asked):
    router = Router(routes)
    for tokens, full in asked:
        rooms = {route for k, route in enumerate(routes) if k not in full}
        allowed = {route for route in rooms if router.takes(route, tokens)}
        picked = router.pick(rooms.__contains__, prompt_tokens=tokens)
        if picked is None:
            assert not rooms
        else:
            assert picked in (allowed or rooms)
    assert sum(standing.credit for standing in router._standing) == pytest.approx(0, abs=1e-6)


def test_short_prompts_on_a_route_for_long_ones_leave_the_shares_of_all_others_as_they_are():
    short, long = Route("m", "m", 3.0), Route("p", "m", 1.0, 1000)
    router = Router([short, long])
    assert {router.pick(lambda route: route is long, prompt_tokens=10) for _ in range(10)} == {long}
    assert Counter(router.pick(prompt_tokens=2000) for _ in range(40)) == {short: 30, long: 10}


def test_spares_are_used_only_where_no_route_for_longer_prompts_has_room():
    short, long, spare = Route("m", "m", 3.0), Route("p", "m", 1.0, 1000), Route("s", "s", 0.0)
    router = Router([short, long, spare])
    assert router.pick(lambda route: route is not short, prompt_tokens=10) is long
    assert router.pick(lambda route: route is spare, prompt_tokens=10) is spare


def test_routes_for_long_prompts_take_short_ones_if_no_others_are_left():
    routes = [Route("m", "m", 3.0), Route("p", "m", 1.0, 1000), Route("q", "m", 1.0, 2000)]
    left = Router(routes).with_routes(routes[1:])
    assert {left.pick(prompt_tokens=10) for _ in range(10)} == {routes[1]}
    assert {left.pick(prompt_tokens=3000) for _ in range(60)} == set(routes[1:])
    spare = Route("s", "s", 0.0)
    assert Router([spare, routes[1]]).pick(prompt_tokens=10) is routes[1]

"""The router's guarantees: proportions after any number of picks, no bursts, no starvation."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.routing.router import Route, Router, routes_without

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

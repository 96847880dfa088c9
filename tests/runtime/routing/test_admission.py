"""Which routes have room: what mixed replicas keep for prompts of others, for KV caches of others and for
themselves."""

from dataclasses import dataclass

import pytest

from runtime.routing.admission import Admission
from runtime.routing.fair_queue import FirstCome
from runtime.routing.kv_budget import KvBudget
from runtime.routing.refusals import TooLong
from runtime.routing.router import Route, Router

LOCAL, TO_B, TO_D, BACK = Route("a", "a", 8.0), Route("a", "b", 1.0), Route("a", "d", 3.0), Route("b", "a", 2)
ROUTES = [LOCAL, TO_B, TO_D, BACK]


@dataclass(eq=False)
class Asked:
    prompt_tokens: int
    output_tokens: int = 10

    @property
    def capacity_tokens(self):
        return self.prompt_tokens + self.output_tokens

    @property
    def one_token(self):
        return self.output_tokens == 1


def admission(routes=ROUTES, **tokens):
    """Admission over replicas of 1000 tokens, or of others; mixed ones keep 200 for prompts of others."""
    tokens = {"a": 1000, "b": 1000, "d": 1000} | tokens
    mixed = {"a", "b"}
    replicas = {
        name: KvBudget(size, 50, outgoing_tokens=200 if name in mixed else None)
        for name, size in tokens.items()
    }
    return Admission(Router(routes), replicas, FirstCome(100)), replicas


def open_routes(admitting, asked):
    return {route for route in admitting.router.routes if admitting._has_room(asked)(route)}


def fill(replicas, route, number, tokens=10):
    """Hold so many requests as the front end does on a route."""
    alone = route.colocated
    for _ in range(number):
        request = object()
        replicas[route.prefill].hold(request, tokens, "" if alone else route.decode)
        if not alone:
            replicas[route.decode].hold(request, tokens)


def test_a_route_takes_its_share_of_the_room_for_prompts_of_others():
    """A quarter of what a sends goes to b (own requests do not count): that may take half of the 200."""
    admitting, replicas = admission()
    fill(replicas, TO_B, 9)
    assert open_routes(admitting, Asked(10)) == set(ROUTES)
    fill(replicas, TO_B, 1)
    assert open_routes(admitting, Asked(10)) == {LOCAL, TO_D, BACK}
    fill(replicas, TO_D, 9)
    assert open_routes(admitting, Asked(10)) == {LOCAL, TO_D, BACK}
    fill(replicas, TO_D, 1)  # now all 200 are taken
    assert open_routes(admitting, Asked(10)) == {LOCAL, BACK}


def test_own_and_incoming_requests_take_what_is_not_kept_for_prompts_of_others():
    admitting, replicas = admission()
    fill(replicas, LOCAL, 59)
    fill(replicas, BACK, 20)
    assert open_routes(admitting, Asked(10)) == {LOCAL, TO_B, TO_D}  # b may send no more
    fill(replicas, LOCAL, 1)
    assert open_routes(admitting, Asked(10)) == {TO_B, TO_D}  # 200 of the 1000 are kept for these
    fill(replicas, TO_D, 20)
    assert replicas["a"].held_tokens == 1000
    assert open_routes(admitting, Asked(10)) == set()


def test_pressure_counts_requests_that_find_others_waiting():
    admitting, _ = admission()
    admitting.enqueue(Asked(500))
    assert admitting.pressure.share == 0
    admitting.enqueue(Asked(500))
    once = admitting.pressure.share
    assert admitting.next() and admitting.next()
    admitting.enqueue(Asked(500))
    assert 0 < admitting.pressure.share < once


def test_a_request_starts_where_both_ends_could_hold_it():
    admitting, _ = admission([LOCAL, TO_D, BACK], a=100, b=300, d=300)
    for asked, may in (
        (Asked(90, 10), True),  # alone, or from a to d
        (Asked(90, 210), True),  # from a to d only
        (Asked(299, 1), True),  # on b, where it begins: one token needs no second replica
        (Asked(300, 1), False),
        (Asked(101, 10), False),
        (Asked(90, 211), False),
    ):
        assert admitting.can_ever_start(asked) == may, asked
    with pytest.raises(TooLong):
        admitting.enqueue(Asked(101, 10))
    assert admitting.context_tokens == 300

"""The fair queue: shares between clients, order within a client, and places that become free again."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.routing.fair_queue import FairQueue, FirstCome
from runtime.routing.refusals import Overloaded, TooMany


@dataclass(eq=False)
class Asked:
    client: str
    cost_tokens: int
    number: int = 0


def asked(client, *costs):
    return [Asked(client, cost, number) for number, cost in enumerate(costs)]


def refusal(ask, *given):
    """The name and text of the error, if it is one."""
    try:
        ask(*given)
    except Overloaded as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drained(queue):
    return [queue.popleft() for _ in range(len(queue))]


CLIENTS = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), CLIENTS, st.integers(1, 500)),
        st.tuples(st.just("serve"), CLIENTS, st.just(0)),
        st.tuples(st.just("cancel"), CLIENTS, st.integers(0, 5)),
    ),
    max_size=120,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_clients_that_wait_get_like_shares_in_their_own_order(steps):
    """Theorem 1 of Golestani: over any time in which both have requests waiting, the service of two clients
    differs by at most the largest request of each."""
    queue, waiting, number = FairQueue(limit=10_000), {name: [] for name in "abcd"}, 0
    served, largest = dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0)
    together: dict = {}
    for kind, client, value in steps:
        if kind == "join":
            request = Asked(client, value, number := number + 1)
            assert queue.make_way(request) is None
            queue.append(request)
            waiting[client].append(request)
            largest[client] = max(largest[client], value)
        elif kind == "cancel" and value < len(waiting[client]):
            queue.remove(waiting[client].pop(value))
        elif kind == "serve" and len(queue):
            expected = queue.first()
            got = queue.popleft()
            assert got is expected and got is waiting[got.client].pop(0)
            served[got.client] += got.cost_tokens
        assert sorted(r.number for r in queue) == sorted(r.number for line in waiting.values() for r in line)
        busy = {name for name in waiting if waiting[name]}
        together = {
            pair: together.get(pair, (served[pair[0]], served[pair[1]]))
            for pair in ((one, two) for one in busy for two in busy if one < two)
        }
        for (one, two), (first, second) in together.items():
            gap = abs((served[one] - first) - (served[two] - second))
            assert gap <= largest[one] + largest[two]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_one_client_is_served_first_come_first_served(costs):
    fair, plain = FairQueue(), FirstCome()
    for request in asked("a", *costs):
        assert fair.ahead(request) == len(fair)
        fair.append(request)
        plain.append(request)
    assert list(fair) == list(plain)
    assert drained(fair) == drained(plain)


def test_huge_prompts_of_one_do_not_hold_up_the_short_ones_of_another():
    queue = FairQueue()
    for request in [*asked("huge", *[1000] * 5), *asked("small", *[100] * 30)]:
        queue.append(request)
    order = [request.client for request in drained(queue)]
    assert [place for place, client in enumerate(order) if client == "huge"] == [9, 20, 31, 33, 34]


@given(st.integers(1, 300), st.integers(1, 9))
def test_no_stream_of_newcomers_holds_a_request_up_for_ever(cost, cost_of_others):
    queue, served = FairQueue(), 0
    queue.append(waits := Asked("waits", cost))
    while True:
        queue.append(Asked(f"newcomer-{served}", cost_of_others))
        if queue.popleft() is waits:
            break
        served += 1
    assert served * cost_of_others <= cost


def test_equal_requests_take_turns():
    queue = FairQueue()
    for request in [*asked("a", *[7] * 6), *asked("b", *[7] * 3), *asked("c", *[7] * 3)]:
        queue.append(request)
    assert "".join(request.client for request in drained(queue)) == "abcabcabcaaa"


def test_those_who_must_start_again_are_first_and_pay_once():
    queue = FairQueue()
    for request in [*asked("a", 10, 10), *asked("b", 10, 10)]:
        queue.append(request)
    first = queue.popleft()
    queue.appendleft(first)
    assert queue.first() is first and len(queue) == 4
    assert "".join(request.client for request in drained(queue)) == "abab"


def test_a_cancelled_request_frees_its_place_and_is_not_paid():
    queue = FairQueue()
    big, later, other = Asked("a", 1000), Asked("a", 10, 1), Asked("b", 20)
    for request in (big, later, other):
        queue.append(request)
    queue.remove(big)
    assert list(queue) == [later, other] and queue.waiting_of("a") == 1
    assert drained(queue) == [later, other]


def test_a_full_queue_makes_way_for_who_has_fewer_waiting():
    queue = FairQueue(limit=4)
    greedy = asked("greedy", 5, 5, 5, 5)
    for request in greedy:
        assert queue.make_way(request) is None
        queue.append(request)
    with pytest.raises(Overloaded) as caught:
        queue.make_way(Asked("greedy", 5))
    assert not isinstance(caught.value, TooMany)
    leaves = queue.make_way(modest := Asked("modest", 5))
    assert leaves is greedy[-1]
    queue.remove(leaves)
    queue.append(modest)
    assert queue.make_way(Asked("modest", 5)) is greedy[-2]
    queue.remove(greedy[-2])
    queue.append(Asked("modest", 5))
    with pytest.raises(Overloaded):
        queue.make_way(Asked("modest", 5))


@given(st.lists(st.tuples(CLIENTS, st.booleans()), max_size=40), st.integers(0, 6), st.integers(1, 4))
def test_a_client_learns_beforehand_whether_there_is_a_place(steps, limit, client_limit):
    queue = FairQueue(limit=limit, client_limit=client_limit)
    for client, serve in steps:
        request = Asked(client, 5)
        before, after = refusal(queue.check_place, client), refusal(queue.make_way, request)
        assert before == after
        if not before:
            if (leaves := queue.make_way(request)) is not None:
                queue.remove(leaves)
            queue.append(request)
        if serve and len(queue):
            queue.popleft()


def test_a_client_may_have_a_limit_of_its_own():
    queue = FairQueue(limit=10, client_limit=2)
    for request in asked("a", 1, 1):
        queue.append(request)
    with pytest.raises(TooMany):
        queue.make_way(Asked("a", 1))
    assert queue.make_way(Asked("b", 1)) is None


def test_many_passing_clients_leave_nothing_behind():
    queue = FairQueue(limit=10_000)
    queue.append(Asked("stays", 10**9))
    queue.append(Asked("stays", 1))
    for number in range(5000):
        queue.append(Asked(f"passing-{number}", 1))
        queue.popleft()
    assert len(queue._lines) < 3000
    drained(queue)
    assert not queue._lines


def test_ahead_counts_those_who_are_served_before():
    queue = FairQueue()
    for request in asked("a", *[10] * 8):
        queue.append(request)
    assert queue.ahead(Asked("a", 1)) == 8
    newcomer = Asked("b", 1)
    ahead = queue.ahead(newcomer)
    queue.append(newcomer)
    assert drained(queue).index(newcomer) == ahead

"""The account of layers with a window, against the blocks that a worker's pool hands out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from runtime.kv_cache.windows import WindowedPool
from runtime.routing.kv_budget import KvBudget
from runtime.routing.windowed_room import WindowedAccount, WindowedRoom

GROWTH = 24
"""Tokens that requests are expected to grow by, and here, that each grows by at most."""


def roomy(
    window: int, size: int, whole: int, windowed: int, running: int = 32
) -> tuple[KvBudget, WindowedPool]:
    """A replica's account, and the blocks of its driver; so many blocks of each kind."""
    room = WindowedRoom(windowed * size, window, running, size)
    budget = KvBudget(whole * size, 1000, GROWTH, windowed=WindowedAccount(room))
    return budget, WindowedPool(whole, windowed, size, window, running)


def lengths(rng: random.Random, longest: int) -> Iterator[int]:
    """Of prompts: short and long ones by turns."""
    while True:
        yield rng.randrange(1, rng.choice((12, longest)))


@pytest.mark.parametrize("seed", range(24))
def test_no_request_that_the_account_admits_lacks_blocks(seed: int) -> None:
    """Whatever comes and goes, and however requests grow; a decode replica keeps a block for each request."""
    rng = random.Random(seed)
    window, size = rng.choice([(9, 8), (16, 4), (33, 16), (1, 8), (16, 8), (2, 4), (5, 2)])
    budget, pool = roomy(window, size, rng.choice((200, 4000)), rng.choice((40, 90)))
    tokens, blocks, left = dict[str, int](), dict[str, list[int]](), dict[str, int]()
    coming, most, admitted = lengths(rng, 300), 0, 0
    waiting = next(coming)
    for step in range(400):
        while budget.has_room(waiting, False):
            name, admitted = f"r{admitted}", admitted + 1
            budget.hold(name, waiting)
            taken = pool.reserve(waiting, (), len(tokens), name)
            assert taken is not None, (step, waiting, len(tokens))
            tokens[name], blocks[name], left[name] = waiting, taken[0], rng.randrange(1, GROWTH + 1)
            waiting = next(coming)
        most = max(most, len(tokens))
        for name in list(tokens):
            if tokens[name] == len(blocks[name]) * size:
                more = pool.allocate(1, owner=name)
                assert more is not None, (step, name)
                blocks[name] += more
            tokens[name] += 1
            assert pool.extend(name, tokens[name]) == tokens[name]
            budget.grow(name)
            pool.passed(name, tokens[name], True)
            left[name] -= 1
            if not left[name]:
                pool.release(blocks.pop(name), name)
                budget.release(name)
                del tokens[name], left[name]
    for name in list(tokens):
        pool.release(blocks.pop(name), name)
        budget.release(name)
    assert pool.free == pool.blocks and budget.held_tokens == 0
    assert budget.windowed is not None and budget.windowed._taken == budget.windowed._sent == 0
    assert most > 2 and admitted > 50


def test_long_requests_take_no_more_than_the_window() -> None:
    """Where all layers have one, as many run as the windowed blocks hold, whatever their length."""
    budget, pool = roomy(window=16, size=8, whole=100_000, windowed=60)
    for number, tokens in enumerate((5000, 2000, 9000, 700) * 5):
        assert budget.has_room(tokens, False)
        budget.hold(number, tokens)
        assert pool.reserve(tokens, (), number, str(number)) is not None
    assert not budget.has_room(5000, False)  # 20 requests of 3 blocks fill the room
    budget.release(3)
    assert budget.has_room(50_000, False)


def test_short_requests_take_their_own_tokens() -> None:
    room = WindowedRoom(tokens=640, window=100, running=64, block_tokens=8)
    assert [room.held(tokens) for tokens in (1, 8, 9, 99, 10_000)] == [8, 8, 16, 104, 112]
    assert [room.computing(tokens) for tokens in (1, 100, 10_000)] == [8, 104, 176]


def test_what_a_mixed_replica_keeps_for_others() -> None:
    """Its own requests leave room for prompts that go on elsewhere, and for one that is being computed."""
    room = WindowedRoom(tokens=800, window=16, running=32, block_tokens=8)
    account = WindowedAccount(room, kept=160)
    assert (room.most, room.most_computing, room.beside_prompts) == (24, 56, 768)
    own = 0
    while account.has_room(500, 8):
        account.hold(own, 500, 8)
        own += 1
    assert own == (768 - 160) // 24
    sent = 0
    while account.has_room(500, None):
        account.hold(f"sent{sent}", 500, None)
        sent += 1
    assert (own + sent) * 24 <= 768 < (own + sent + 1) * 24
    account.release(0)
    assert account.has_room(500, 8) and account.has_room(500, None)


def test_tokens_that_were_not_counted_yet_count_if_they_decide() -> None:
    """Requests that decode are asked for their tokens only where these may fill the room."""
    room = WindowedRoom(tokens=240, window=100, running=8, block_tokens=8)
    account, asked = WindowedAccount(room), []

    def by_now() -> list[tuple[str, int]]:
        asked.append(True)
        return [("a", 96), ("b", 40)]

    assert account.has_room(8, 8, uncounted=by_now) and not asked
    account.hold("a", 8, 8)
    account.hold("b", 8, 8)
    assert account.has_room(64, 8, uncounted=by_now) and asked == [True]
    assert not account.has_room(88, 8, uncounted=by_now)
    assert account.has_room(88, 8)

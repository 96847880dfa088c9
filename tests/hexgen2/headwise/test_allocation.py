"""The heads of many requests through arrivals, growth, moves and ends, against accounts written down anew."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hexgen2.headwise.allocation import SPARE_TOKENS, Allocation
from hexgen2.headwise.profile import DeviceProfile

KV_HEADS, QUERY_HEADS, HEAD_BYTES = 4, 8, 512.0
PRIMARY = DeviceProfile(1e-9, 1e-12, 0.0)
WORKER = DeviceProfile(1e-9, 3e-12, 1e-5, 1e-9, 4e-5)


def allocation(*tokens):
    """The first device is a primary worker; with room for so many tokens of all heads."""
    profiles = [PRIMARY, *[WORKER] * (len(tokens) - 1)]
    room = [each * KV_HEADS * HEAD_BYTES for each in tokens]
    return Allocation(profiles, QUERY_HEADS, KV_HEADS, HEAD_BYTES, room)


def heads_of(own, request):
    return own.heads(own.rows([request]))[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_accounts_hold_through_everything(seed):
    rng = np.random.default_rng(seed)
    own, there, moves, kept = allocation(6000, 3000, 2000), {}, [], {}
    for number in range(120):
        what = rng.integers(6)
        if what <= 1:
            tokens = float(rng.integers(1, 900))
            fits = own.has_room(tokens)
            assert own.place({number: tokens}) == fits
            if fits:
                there[number] = tokens
        elif what == 2 and there:
            gone = int(rng.choice(list(there)))
            own.remove(gone)
            del there[gone]
            kept.pop(gone, None)
        elif what == 3 and there:
            grown = [r for r in there if rng.random() < 0.7]
            if grown:
                for request in grown:
                    there[request] += 5.0
                own.grow(own.rows(grown), np.array([there[r] for r in grown]))
        elif what == 4:
            move = own.crowded_request() or own.slow_request(0.1)
            if move is not None:
                sent = own.begin(move)
                assert math.isclose(sent, move.added.sum() * there[move.request] * HEAD_BYTES)
                kept[move.request] = move.added * there[move.request] * HEAD_BYTES
                moves.append(move)
        elif moves:
            move = moves.pop(0)
            alive = move.request in kept
            assert own.finish(move) == alive
            if alive:
                del kept[move.request]
                assert heads_of(own, move.request).tolist() == move.new.tolist()
        held = sum(kept.values(), np.zeros(3))
        for request, tokens in there.items():
            heads = heads_of(own, request)
            assert heads.sum() == KV_HEADS and (heads >= 0).all()
            held = held + heads * tokens * HEAD_BYTES
        assert np.allclose(own.held_bytes, held)
        assert all((r in own) == (r in there) for r in range(number + 1))


def test_a_crowded_device_sends_what_came_last_elsewhere():
    """Section 5.3.2: of those on the exhausted device, the last request moves if others have room."""
    own = allocation(1000, 4000)
    assert own.place({1: 400.0}) and own.place({2: 400.0})
    assert heads_of(own, 1)[0] == heads_of(own, 2)[0] == KV_HEADS  # the worker is not worth its start
    assert own.crowded_request() is None
    own.grow(own.rows([1, 2]), np.array([490.0, 490.0]))
    move = own.crowded_request()
    assert move is not None and move.request == 2 and move.new[0] < KV_HEADS
    own.begin(move)
    assert own.crowded_request() is None  # the move under way makes room
    assert own.finish(move)
    assert own.held_bytes[0] + 2 * KV_HEADS * HEAD_BYTES * SPARE_TOKENS <= 1000 * KV_HEADS * HEAD_BYTES * 1.02
    own.grow(own.rows([1, 2]), np.array([900.0, 2500.0]))
    assert own.overfull_requests() == [] or own.crowded_request() is not None


def test_nothing_moves_where_all_memory_is_full():
    own = allocation(500, 500)
    assert own.place({1: 480.0}) and own.place({2: 480.0})
    own.grow(own.rows([1, 2]), np.array([505.0, 505.0]))
    assert own.crowded_request() is None
    assert own.overfull_requests()[0] == 2


def test_theta_decides_when_a_slow_request_moves():
    """Section 5.3.1: only where the time is more than 1 + theta times the ideal, and then it gets shorter."""
    own = allocation(10**6, 10**6)
    assert own.place({1: 1000.0}) and own.place({2: 1000.0})
    own.grow(own.rows([1]), np.array([200_000.0]))
    excess = own.time_s() / own.ideal_s() - 1
    assert excess > 0.1
    assert own.slow_request(excess * 1.01) is None
    move = own.slow_request(excess * 0.99)
    assert move is not None and move.request == 1
    before = own.time_s()
    own.begin(move)
    assert math.isclose(own.time_s(), before)  # attention goes on where the caches are
    own.finish(move)
    assert own.time_s() < before


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_ideal_is_no_more_than_the_time(seed):
    """Up to whole heads, which the ideal may divide."""
    rng = np.random.default_rng(seed)
    own = allocation(10**6, 10**6, 10**6)
    for request in range(int(rng.integers(1, 30))):
        own.place({request: float(rng.integers(1, 5000))})
    assert own.ideal_s() <= own.time_s() * (1 + 1e-9)

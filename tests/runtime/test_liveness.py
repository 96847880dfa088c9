"""When silence counts as a loss, with clocks that the tests control: frozen processes are found, and delays
of our own are not blamed on others, in asyncio (workers) and in trio (peers)."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from runtime.frontend.listeners import until_silent
from runtime.p2p.transport import watch

LIMIT_S = 2.4  # 4 periods of 0.6 s
FOUND_S = 3.0
LATE_S = 0.15  # of each wake-up, on an overloaded machine
ENOUGH_S = 60.0


class TurnedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances when there is nothing else to do; every timer fires `late_s` late."""

    def __init__(self) -> None:
        self.now_s = self.late_s = 0.0
        super().__init__(_NoWaiting(self))

    def time(self) -> float:
        return self.now_s


class _NoWaiting(selectors.SelectSelector):
    def __init__(self, loop: TurnedLoop) -> None:
        super().__init__()
        self._turned = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self._turned.now_s += timeout + self._turned.late_s
        return super().select(0)


class Worker:
    """The link to a worker that answers every ping after a delay, until it freezes."""

    def __init__(self, loop: TurnedLoop, answers_after_s: float = 0.01, freezes_at_s: float = 1e9) -> None:
        self._loop, self._answers_after_s, self._freezes_at_s = loop, answers_after_s, freezes_at_s
        self.heard = self.pings = 0

    def send(self, message: object) -> None:
        self.pings += 1
        if self._loop.now_s + self._answers_after_s < self._freezes_at_s:
            self._loop.call_later(self._answers_after_s, self._answer)

    def _answer(self) -> None:
        self.heard += 1


def found_at_s(
    worker_of: Callable[[TurnedLoop], Worker],
    late_s: float = 0.0,
    held_up_at_s: float = 1e9,
    held_up_s: float = 0.0,
) -> float:
    """When a worker counts as lost; infinite if that takes more than ENOUGH_S."""
    loop = TurnedLoop()
    loop.late_s = late_s

    def hold_up() -> None:
        loop.now_s += held_up_s

    async def watched() -> float:
        loop.call_at(held_up_at_s, hold_up)
        try:
            async with asyncio.timeout(ENOUGH_S + held_up_s):
                await until_silent(worker_of(loop))
        except TimeoutError:
            return float("inf")
        return loop.time()

    try:
        return loop.run_until_complete(watched())
    finally:
        loop.close()


def test_a_worker_that_freezes_is_found_within_three_seconds():
    for freezes_at_s in (1.0, 5.3, 5.61, 5.9, 6.0, 6.01):
        found_s = found_at_s(lambda loop: Worker(loop, freezes_at_s=freezes_at_s))  # noqa: B023
        assert freezes_at_s < found_s <= freezes_at_s + FOUND_S


@pytest.mark.parametrize("answers_after_s", [0.0, 0.59, 1.7, 2.3])
def test_a_worker_that_is_slow_to_answer_is_kept(answers_after_s):
    assert found_at_s(lambda loop: Worker(loop, answers_after_s)) == float("inf")


@pytest.mark.parametrize("held_up_s", [3.0, 10.0, 45.0])
def test_being_held_up_once_is_not_held_against_a_worker(held_up_s):
    """The answer to the last ping is slow too, but still within the limit."""
    held_up = {"held_up_at_s": 7.0, "held_up_s": held_up_s}
    assert found_at_s(lambda loop: Worker(loop, LIMIT_S - 0.2), **held_up) == float("inf")
    found_s = found_at_s(lambda loop: Worker(loop, freezes_at_s=6.0), **held_up)
    assert 6.0 + LIMIT_S + held_up_s - 0.8 <= found_s <= 6.0 + FOUND_S + held_up_s


def test_being_late_again_and_again_is_not_held_against_a_worker():
    """Every check runs late, and the answer takes twice the limit; a frozen worker is still found."""
    assert found_at_s(lambda loop: Worker(loop, 2 * LIMIT_S - 1.0), late_s=LATE_S) == float("inf")
    found_s = found_at_s(lambda loop: Worker(loop, freezes_at_s=6.0), late_s=LATE_S)
    assert 6.0 + LIMIT_S < found_s <= 6.0 + FOUND_S * (0.12 + LATE_S) / 0.12


def in_turned_time(body: Callable[[SimpleNamespace, MockClock], Awaitable[float]]) -> float:
    clock = MockClock(autojump_threshold=0)

    async def main() -> float:
        return await body(SimpleNamespace(heard=0), clock)

    return trio.run(main, clock=clock)


async def peer(muxer: SimpleNamespace, every_s: float, until_s: float) -> None:
    """A peer that says something now and then."""
    while trio.current_time() < until_s:
        muxer.heard += 1
        await trio.sleep(every_s)


async def given_up(muxer: SimpleNamespace, beside: Callable[[trio.Nursery], None]) -> float:
    """When a peer counts as lost; infinite if that takes more than ENOUGH_S."""
    found_s = float("inf")
    with trio.move_on_after(ENOUGH_S):
        async with trio.open_nursery() as nursery:
            beside(nursery)
            begun_s = trio.current_time()
            await watch.silence(muxer)  # type: ignore[arg-type]
            found_s = trio.current_time() - begun_s
            nursery.cancel_scope.cancel()
    return found_s


def test_a_peer_that_freezes_is_found_within_three_seconds():
    async def body(muxer, clock):
        begun_s = trio.current_time()
        return await given_up(muxer, lambda nursery: nursery.start_soon(peer, muxer, 0.6, begun_s + 5.5))

    assert 4.8 + LIMIT_S - 0.2 <= in_turned_time(body) <= 5.5 + FOUND_S


def test_a_peer_that_says_little_is_kept():
    async def body(muxer, clock):
        return await given_up(muxer, lambda nursery: nursery.start_soon(peer, muxer, LIMIT_S - 0.2, 1e9))

    assert in_turned_time(body) == float("inf")


@pytest.mark.parametrize("held_up_s", [3.0, 10.0])
def test_being_held_up_is_not_held_against_a_peer(held_up_s):
    """This thread stalls; a peer that froze meanwhile still gets its full time."""

    async def hold_up(clock):
        await trio.sleep(1.0)
        clock.jump(held_up_s)

    async def body(muxer, clock):
        return await given_up(muxer, lambda nursery: nursery.start_soon(hold_up, clock))

    assert LIMIT_S + held_up_s - 0.2 <= in_turned_time(body) <= FOUND_S + held_up_s


def test_being_late_again_and_again_is_not_held_against_a_peer():
    async def late(clock):
        while True:
            await trio.sleep(0.1)
            clock.jump(LATE_S)

    def body_with(every_s):
        async def body(muxer, clock):
            def beside(nursery):
                nursery.start_soon(late, clock)
                if every_s:
                    nursery.start_soon(peer, muxer, every_s, 1e9)

            return await given_up(muxer, beside)

        return body

    assert in_turned_time(body_with(0.0)) > LIMIT_S + 1.0
    assert in_turned_time(body_with(LIMIT_S + 0.6)) == float("inf")

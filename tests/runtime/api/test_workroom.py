"""Work off the event loop: smallest first, one at a time, even if clients leave meanwhile."""

import asyncio
import threading

import pytest

from runtime.api.workroom import Workroom


def test_the_smallest_piece_that_waits_comes_first():
    async def scenario():
        room, done, gate = Workroom("test", 10), [], threading.Event()

        def work(size):
            if size == 1000:
                gate.wait(20)
            done.append(size)
            return size

        def ask(size):
            return asyncio.create_task(room.do(size, lambda: work(size)))

        first = ask(1000)
        await asyncio.sleep(0.05)
        others = [ask(size) for size in (500, 30, 700, 30, 5)]
        await asyncio.sleep(0.05)
        assert done == [5]  # ran in the calling thread
        gate.set()
        assert await asyncio.gather(first, *others) == [1000, 500, 30, 700, 30, 5]
        assert done == [5, 1000, 30, 30, 500, 700]

    asyncio.run(scenario())


def test_who_goes_holds_nobody_up_and_a_failure_is_its_own():
    async def scenario():
        room, gate, running = Workroom("test", 0), threading.Event(), []

        def slow():
            running.append(1)
            gate.wait(20)
            assert len(running) == 1
            running.pop()
            raise RuntimeError("planted")

        gone = asyncio.create_task(room.do(5, slow))
        waiting = [asyncio.create_task(room.do(size, lambda: len(running))) for size in (6, 7, 8)]
        await asyncio.sleep(0.05)
        gone.cancel()
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not waiting[1].done()  # the thread is still working on it
        gate.set()
        assert await asyncio.gather(*waiting[1:]) == [0, 0]
        with pytest.raises(ZeroDivisionError):
            await room.do(1, lambda: 1 // 0)
        assert await room.do(1, lambda: "after") == "after"

    asyncio.run(scenario())

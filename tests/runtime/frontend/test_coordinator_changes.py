"""The coordinator while replicas change: no request waits for one that leaves, and none is refused while
another one starts."""

import asyncio
import socket

import pytest
from scripted import PROMPT, FakeDriver, run, sampling, serving, settle, tokens_of

from runtime.frontend.replica import Replica
from runtime.launcher.worker_link import StreamLink
from runtime.routing.refusals import Unavailable
from runtime.routing.replica_state import ReplicaState
from runtime.routing.router import Route, routes_without

OLD = [Route("p0", "d0", 1.0)]
BOTH = [*OLD, Route("p0", "d1", 1.0)]
EXPECTED = [300, 301, 302, 303]


class Plan:
    """Routes as a placement would have them."""

    def __init__(self, routes):
        self.all = routes

    def routes(self, lost):
        return routes_without(self.all, lost)


async def another(name):
    """A running fake driver of a new replica, and the link to it."""
    ours, theirs = socket.socketpair()
    driver = FakeDriver(name, await StreamLink.over(theirs))
    driver.task = asyncio.create_task(driver.run())
    return driver, {f"n/{name}": await StreamLink.over(ours)}


def coming(name):
    return Replica(name, "decode", f"n/{name}", {}, 100, 4, 3)


def test_a_replica_that_is_retired_finishes_and_the_new_one_takes_over():
    async def scenario():
        async with serving(OLD) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            first = coordinator.submit(PROMPT, sampling())
            coordinator.change(Plan(BOTH), {"d1": coming("d1")})
            assert coordinator.states.which_are(ReplicaState.STARTING) == {"d1"}
            coordinator.retire(["d0"])
            waiting = coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.05)
            assert waiting.state.value == "waiting"
            drivers["d0"].gate.set()
            assert await tokens_of(first) == EXPECTED and first.record.decode_replica == "d0"
            driver, links = await another("d1")
            coordinator.join("d1", links)
            assert await tokens_of(waiting) == EXPECTED and waiting.record.decode_replica == "d1"
            await settle(coordinator)
            coordinator.leave("d0")
            coordinator.change(Plan(BOTH[1:]), {})
            assert set(coordinator.replicas) == {"p0", "d1"} and not coordinator.states.absent
            assert await tokens_of(coordinator.submit(PROMPT, sampling())) == EXPECTED
            driver.task.cancel()

    run(scenario)


def test_what_a_replica_does_not_finish_goes_on_elsewhere_with_the_same_tokens():
    async def scenario():
        async with serving(BOTH) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            requests = [coordinator.submit(PROMPT, sampling()) for _ in range(4)]
            assert {request.record.decode_replica for request in requests} == {"d0", "d1"}
            coordinator.change(Plan(BOTH), {})
            coordinator.retire(["d0"])
            await asyncio.sleep(0.05)
            coordinator.send_away("d0")
            for request in requests:
                assert await tokens_of(request) == EXPECTED
            assert {request.record.decode_replica for request in requests} == {"d1"}
            drivers["d0"].gate.set()
            await settle(coordinator)
            assert not drivers["d0"].held

    run(scenario)


def test_a_replica_that_does_not_start_fails_those_that_waited_for_it_alone():
    async def scenario():
        async with serving(OLD) as (coordinator, _):
            coordinator.change(Plan(BOTH), {"d1": coming("d1")})
            coordinator.retire(["d0"])
            waiting = coordinator.submit(PROMPT, sampling())
            coordinator.give_up("d1", "it did not start")
            with pytest.raises(Unavailable, match="replica d1 is lost"):
                await tokens_of(waiting)
            with pytest.raises(Unavailable, match="no replica is left"):
                coordinator.submit(PROMPT, sampling())
            assert set(coordinator.lost) == {"d1"}

    run(scenario)


def test_replicas_that_are_lost_for_good_are_forgotten():
    async def scenario():
        async with serving(BOTH) as (coordinator, _):
            coordinator._lose(coordinator.replicas["d1"], "killed")
            assert coordinator.states.absent == {"d1"}
            coordinator.change(Plan(OLD), {}, ["d1"])
            assert not coordinator.lost and set(coordinator.replicas) == {"p0", "d0"}
            assert await tokens_of(coordinator.submit(PROMPT, sampling())) == EXPECTED

    run(scenario)

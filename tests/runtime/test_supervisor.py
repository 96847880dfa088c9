"""How often a replica is started again: a row of deaths, or too many within an hour, and it stays lost."""

import asyncio
import socket

import pytest
from scripted import PAIR, PROMPT, FakeLead, run, sampling, serving, tokens_of

import runtime.supervisor
from cost_model.errors import HexGen2Error
from runtime.launcher.link import StreamLink
from runtime.refusals import Overloaded, Unavailable
from runtime.supervisor import ROWS_PER_HOUR, Supervisor


class Starter:
    """Starts a fake lead again once it may, or fails to."""

    def __init__(self, works=True):
        self.works, self.starts, self.leads = works, 0, []
        self.may, self.there = asyncio.Event(), asyncio.Event()
        self.may.set()
        self.there.set()

    def unreachable(self, workers):
        return [] if self.there.is_set() else list(workers)

    async def until_reachable(self, workers):
        await self.there.wait()

    async def restart(self, workers, report):
        self.starts += 1
        await self.may.wait()
        if not self.works:
            raise HexGen2Error("no such device")
        ours, theirs = socket.socketpair()
        lead = FakeLead(workers[0].removeprefix("n/"), await StreamLink.over(theirs))
        self.leads.append((lead, asyncio.create_task(lead.run())))
        return {workers[0]: await StreamLink.over(ours)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(runtime.supervisor, "FIRST_WAIT_S", 0.001)


async def until(what):
    while not what():
        await asyncio.sleep(0.005)


def supervised(coordinator, starter, limit, clock):
    said, stayed = [], []
    supervisor = Supervisor(coordinator, starter, limit, said.append, now_s=lambda: clock[0])
    supervisor.on_stays_lost(stayed.append)
    coordinator._on_lost = supervisor.lost
    return supervisor, said, stayed


def test_a_replica_that_dies_now_and_then_for_ever_stays_lost_within_the_hour():
    async def scenario():
        async with serving(PAIR) as (coordinator, _):
            starter, clock, limit = Starter(), [1e6], 2
            supervisor, said, stayed = supervised(coordinator, starter, limit, clock)
            for death in range(1, limit * ROWS_PER_HOUR + 1):
                coordinator._lose(coordinator.replicas["d0"], "killed")
                await until(lambda: not coordinator.lost)
                assert starter.starts == death and not stayed
                clock[0] += 120
            assert await tokens_of(coordinator.submit(PROMPT, sampling())) == [300, 301, 302, 303]
            coordinator._lose(coordinator.replicas["d0"], "killed")
            await until(lambda: stayed)
            assert said[-1] == f"replica d0 stays lost: it died {limit * ROWS_PER_HOUR} times within an hour"
            await supervisor.stop()

    run(scenario)


def test_a_replica_that_dies_once_in_an_hour_always_comes_back():
    async def scenario():
        async with serving(PAIR) as (coordinator, _):
            starter, clock = Starter(), [1e6]
            supervisor, _, stayed = supervised(coordinator, starter, 1, clock)
            for death in range(1, 9):
                coordinator._lose(coordinator.replicas["d0"], "killed")
                await until(lambda: not coordinator.lost)
                assert starter.starts == death and not stayed
                clock[0] += 1300
            await supervisor.stop()

    run(scenario)


def test_starts_that_fail_in_a_row_end_and_one_that_is_left_alone_is_not_started():
    async def scenario():
        async with serving([*PAIR]) as (coordinator, _):
            starter, clock = Starter(works=False), [1e6]
            supervisor, said, stayed = supervised(coordinator, starter, 3, clock)
            await supervisor.leave_alone(["p0"])
            coordinator._lose(coordinator.replicas["p0"], "killed")
            coordinator._lose(coordinator.replicas["d0"], "killed")
            await until(lambda: stayed)
            assert starter.starts == 3 and [each.replica_id for each in stayed] == ["d0"]
            assert said[-1] == "replica d0 stays lost: it died 3 times in a row"
            await supervisor.stop()

    run(scenario)


@pytest.mark.parametrize("lost", ["p0", "d0"])
@pytest.mark.parametrize("works", [True, False])
def test_requests_wait_for_the_only_replica_while_it_is_started_again(lost, works):
    """Those that it served, and new ones; if it does not come back, each ends with an error."""

    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            starter = Starter(works)
            starter.may.clear()
            supervisor, _, stayed = supervised(coordinator, starter, 2, [1e6])
            leads[lost].gate.clear()
            served = coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.02)
            coordinator._lose(coordinator.replicas[lost], "killed")
            later = coordinator.submit(PROMPT, sampling())
            pinned = coordinator.submit(PROMPT, sampling(), route=PAIR[0])
            waiting = [asyncio.create_task(tokens_of(each)) for each in (served, later, pinned)]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting) and coordinator.waiting == 3
            starter.may.set()
            found = await asyncio.gather(*waiting, return_exceptions=True)
            if works:
                assert found == [[300, 301, 302, 303]] * 3 and not stayed
            else:
                assert all(f"replica {lost} is lost" in str(error) for error in found) and stayed
                with pytest.raises(Unavailable, match=f"replica {lost} is lost"):
                    coordinator.submit(PROMPT, sampling())
            await supervisor.stop()

    run(scenario)


def test_nobody_waits_for_ever_for_a_replica_that_does_not_come_back():
    async def scenario():
        async with serving(PAIR, queue_timeout_s=0.2) as (coordinator, leads):
            starter = Starter()
            starter.may.clear()
            supervisor, _, _ = supervised(coordinator, starter, 2, [1e6])
            leads["d0"].gate.clear()
            served = coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.02)
            coordinator._lose(coordinator.replicas["d0"], "killed")
            with pytest.raises(Overloaded, match=r"taken it up again within 0\.2 s"):
                await tokens_of(served)
            await supervisor.stop()

    run(scenario)


def test_a_start_that_was_given_up_may_go_on():
    async def scenario():
        async with serving(PAIR) as (coordinator, _):
            starter = Starter()
            starter.may.clear()
            supervisor, _, _ = supervised(coordinator, starter, 3, [1e6])
            coordinator._lose(coordinator.replicas["d0"], "killed")
            await until(lambda: starter.starts)
            assert await supervisor.leave_alone(["p0", "d0"]) == ["d0"]
            starter.may.set()
            await asyncio.sleep(0.02)
            assert "d0" in coordinator.lost
            supervisor.go_on(["d0"])
            await until(lambda: not coordinator.lost)
            assert starter.starts == 2
            await supervisor.stop()

    run(scenario)


def test_a_replica_whose_machine_is_gone_waits_for_it_without_a_start_and_counts_as_lost():
    async def scenario():
        async with serving(PAIR) as (coordinator, _):
            starter = Starter()
            starter.there.clear()
            supervisor, said, stayed = supervised(coordinator, starter, 1, [1e6])
            coordinator._lose(coordinator.replicas["d0"], "its node is gone")
            await until(lambda: stayed)
            assert supervisor.staying_lost == {"d0"} and not starter.starts
            assert said == ["replica d0 waits for n/d0"]
            assert await supervisor.leave_alone(["d0"]) == ["d0"]
            starter.there.set()
            await asyncio.sleep(0.02)
            assert not starter.starts and "d0" in coordinator.lost
            starter.there.clear()
            supervisor.go_on(["d0"])
            await until(lambda: len(stayed) == 2)
            starter.there.set()
            await until(lambda: not coordinator.lost)
            assert starter.starts == 1 and not supervisor.staying_lost
            assert await tokens_of(coordinator.submit(PROMPT, sampling())) == [300, 301, 302, 303]
            await supervisor.stop()

    run(scenario)


def test_nobody_waits_at_the_end_for_a_machine_that_is_gone():
    async def scenario():
        async with serving(PAIR) as (coordinator, _):
            starter = Starter()
            starter.there.clear()
            supervisor, _, stayed = supervised(coordinator, starter, 1, [1e6])
            coordinator._lose(coordinator.replicas["d0"], "its node is gone")
            await until(lambda: stayed)
            async with asyncio.timeout(10):
                await supervisor.stop()

    run(scenario)

"""How often a replica is restarted: after several deaths in a row, or too many within an hour, it stays
lost."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from scripted import PAIR, PROMPT, Starter, run, sampling, serving, tokens_of, until

import runtime.frontend.supervisor
from runtime.frontend.supervisor import ROWS_PER_HOUR, Supervisor
from runtime.routing.refusals import Overloaded, Unavailable


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(runtime.frontend.supervisor, "FIRST_WAIT_S", 0.001)


class Scene:
    """A supervisor of a pair of replicas: what it logged, and which replicas stay lost. `now_s` is its
    clock."""

    def __init__(self, coordinator, drivers, starter, limit):
        self.coordinator, self.drivers, self.starter = coordinator, drivers, starter
        self.said, self.stayed, self.now_s = [], [], 1e6
        self.supervisor = Supervisor(coordinator, starter, limit, self.said.append, lambda: self.now_s)
        self.supervisor.on_stays_lost(self.stayed.append)
        coordinator._on_lost = self.supervisor.lost

    def submit(self, **options):
        return self.coordinator.submit(PROMPT, sampling(), **options)

    def lose(self, name="d0", reason="killed"):
        self.coordinator._lose(self.coordinator.replicas[name], reason)

    async def until_all_serve(self):
        await until(lambda: not self.coordinator.lost)

    async def lose_its_machine(self):
        """Lose the machine of d0, and wait until the supervisor waits for it."""
        self.starter.there.clear()
        self.lose(reason="its node is gone")
        await until(lambda: self.stayed)


@asynccontextmanager
async def supervised(limit, works=True, may_start=True, **options):
    async with serving(PAIR, **options) as (coordinator, drivers):
        scene = Scene(coordinator, drivers, Starter(works), limit)
        if not may_start:
            scene.starter.may.clear()
        try:
            yield scene
        finally:
            await scene.supervisor.stop()


def test_a_replica_that_dies_now_and_then_for_ever_stays_lost_within_the_hour():
    async def scenario():
        limit = 2
        async with supervised(limit) as scene:
            for death in range(1, limit * ROWS_PER_HOUR + 1):
                scene.lose()
                await scene.until_all_serve()
                assert scene.starter.starts == death and not scene.stayed
                scene.now_s += 120
            assert await tokens_of(scene.submit()) == [300, 301, 302, 303]
            scene.lose()
            await until(lambda: scene.stayed)
            died = f"it died {limit * ROWS_PER_HOUR} times within an hour"
            assert scene.said[-1] == f"replica d0 stays lost: {died}"

    run(scenario)


def test_a_replica_that_dies_once_in_an_hour_always_comes_back():
    async def scenario():
        async with supervised(limit=1) as scene:
            for death in range(1, 9):
                scene.lose()
                await scene.until_all_serve()
                assert scene.starter.starts == death and not scene.stayed
                scene.now_s += 1300

    run(scenario)


def test_starts_that_fail_in_a_row_end_and_one_that_is_left_alone_is_not_started():
    async def scenario():
        async with supervised(limit=3, works=False) as scene:
            await scene.supervisor.leave_alone(["p0"])
            scene.lose("p0")
            scene.lose("d0")
            await until(lambda: scene.stayed)
            assert scene.starter.starts == 3 and [each.replica_id for each in scene.stayed] == ["d0"]
            assert scene.said[-1] == "replica d0 stays lost: it died 3 times in a row"

    run(scenario)


@pytest.mark.parametrize("lost", ["p0", "d0"])
@pytest.mark.parametrize("works", [True, False])
def test_requests_wait_for_the_only_replica_while_it_is_started_again(lost, works):
    """Both its in-flight requests and new ones wait; if it does not come back, each ends with an error."""

    async def scenario():
        async with supervised(limit=2, works=works, may_start=False) as scene:
            scene.drivers[lost].gate.clear()
            served = scene.submit()
            await asyncio.sleep(0.02)
            scene.lose(lost)
            later = scene.submit()
            waiting = [asyncio.create_task(tokens_of(each)) for each in (served, later)]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting) and scene.coordinator.waiting == 2
            scene.starter.may.set()
            found = await asyncio.gather(*waiting, return_exceptions=True)
            if works:
                assert found == [[300, 301, 302, 303]] * 2 and not scene.stayed
            else:
                assert all(f"replica {lost} is lost" in str(error) for error in found) and scene.stayed
                with pytest.raises(Unavailable, match=f"replica {lost} is lost"):
                    scene.submit()

    run(scenario)


def test_nobody_waits_for_ever_for_a_replica_that_does_not_come_back():
    async def scenario():
        async with supervised(limit=2, may_start=False, queue_timeout_s=0.2) as scene:
            scene.drivers["d0"].gate.clear()
            served = scene.submit()
            await asyncio.sleep(0.02)
            scene.lose()
            with pytest.raises(Overloaded, match=r"taken it up again within 0\.2 s"):
                await tokens_of(served)

    run(scenario)


def test_a_start_that_was_given_up_may_go_on():
    async def scenario():
        async with supervised(limit=3, may_start=False) as scene:
            scene.lose()
            await until(lambda: scene.starter.starts)
            assert await scene.supervisor.leave_alone(["p0", "d0"]) == ["d0"]
            scene.starter.may.set()
            await asyncio.sleep(0.02)
            assert "d0" in scene.coordinator.lost
            scene.supervisor.resume(["d0"])
            await scene.until_all_serve()
            assert scene.starter.starts == 2

    run(scenario)


def test_a_replica_whose_machine_is_gone_waits_for_it_without_a_start_and_counts_as_lost():
    async def scenario():
        async with supervised(limit=1) as scene:
            supervisor, starter = scene.supervisor, scene.starter
            await scene.lose_its_machine()
            assert set(supervisor.staying_lost) == {"d0"} and not starter.starts
            assert scene.said == ["replica d0 waits for n/d0"]
            assert await supervisor.leave_alone(["d0"]) == ["d0"]
            starter.there.set()
            await asyncio.sleep(0.02)
            assert not starter.starts and "d0" in scene.coordinator.lost
            starter.there.clear()
            supervisor.resume(["d0"])
            await until(lambda: len(scene.stayed) == 2)
            starter.there.set()
            await scene.until_all_serve()
            assert starter.starts == 1 and not supervisor.staying_lost
            assert await tokens_of(scene.submit()) == [300, 301, 302, 303]

    run(scenario)


def test_nobody_waits_at_the_end_for_a_machine_that_is_gone():
    async def scenario():
        async with supervised(limit=1) as scene:
            await scene.lose_its_machine()
            async with asyncio.timeout(10):
                await scene.supervisor.stop()

    run(scenario)

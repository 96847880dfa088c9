"""The coordinator with more requests than it can hold: deadlines, shares, and the answers to each client."""

import asyncio

import pytest
from scripted import PAIR, PROMPT, run, sampling, serving, settle, tokens_of

from runtime.frontend.request import Origin
from runtime.routing.refusals import Overloaded, TimedOut, TooMany


def busy(coordinator, drivers):
    """One request takes all memory and is not answered until the gates open."""
    for driver in drivers.values():
        driver.gate.clear()
    return coordinator.submit(PROMPT, sampling(4))


def free(drivers):
    for driver in drivers.values():
        driver.gate.set()


def test_who_cannot_start_in_time_is_told_so_and_the_others_go_on():
    async def scenario():
        async with serving(PAIR, budget=7, queue_timeout_s=0.05) as (coordinator, drivers):
            first = busy(coordinator, drivers)
            late = coordinator.submit(PROMPT, sampling())
            with pytest.raises(Overloaded) as caught:
                await tokens_of(late)
            assert caught.value.retry_after_s >= 1
            assert late.record.outcome == "timeout" and coordinator.waiting == 0
            free(drivers)
            assert len(await tokens_of(first)) == 4
            await settle(coordinator)

    run(scenario)


def test_a_request_that_has_started_outlives_the_queue_timeout():
    async def scenario():
        async with serving(PAIR, budget=7, queue_timeout_s=0.01) as (coordinator, drivers):
            first = busy(coordinator, drivers)
            await asyncio.sleep(0.1)
            free(drivers)
            assert len(await tokens_of(first)) == 4

    run(scenario)


@pytest.mark.parametrize(("waits", "error"), [(True, Overloaded), (False, TimedOut)])
def test_the_clients_own_time_ends_a_request_in_any_phase(waits, error):
    async def scenario():
        async with serving(PAIR, budget=7) as (coordinator, drivers):
            others = [busy(coordinator, drivers)] if waits else []
            for driver in drivers.values():
                driver.gate.clear()
            mine = coordinator.submit(PROMPT, sampling(), origin=Origin("me", "mine", 0.05))
            with pytest.raises(error):
                await tokens_of(mine)
            assert mine.record.outcome == "timeout"
            free(drivers)
            for other in others:
                assert len(await tokens_of(other)) == 4
            await settle(coordinator)

    run(scenario)


def test_who_would_wait_too_long_is_refused_at_once():
    async def scenario():
        async with serving(PAIR, budget=7) as (coordinator, drivers):
            done = [coordinator.submit(PROMPT, sampling(), origin=Origin("a")) for _ in range(30)]
            for request in done:
                await tokens_of(request)
            busy(coordinator, drivers)
            waiting = [coordinator.submit(PROMPT, sampling(), origin=Origin("a")) for _ in range(20)]
            await asyncio.sleep(0.2)
            with pytest.raises(Overloaded) as caught:
                coordinator.submit(PROMPT, sampling(), origin=Origin("a", timeout_s=1e-4))
            assert "would wait" in str(caught.value) and caught.value.retry_after_s >= 1
            patient = coordinator.submit(PROMPT, sampling(), origin=Origin("a"))
            free(drivers)
            for request in [*waiting, patient]:
                assert len(await tokens_of(request)) == 4
            await settle(coordinator)

    run(scenario)


def test_clients_take_turns_and_the_greedy_one_makes_way():
    async def scenario():
        async with serving(PAIR, budget=7, queue_limit=4) as (coordinator, drivers):
            first = busy(coordinator, drivers)
            greedy = [coordinator.submit(PROMPT, sampling(), origin=Origin("greedy")) for _ in range(4)]
            modest = coordinator.submit(PROMPT, sampling(), origin=Origin("modest"))
            with pytest.raises(Overloaded):
                await tokens_of(greedy[3])
            with pytest.raises(Overloaded):
                coordinator.submit(PROMPT, sampling(), origin=Origin("greedy"))
            free(drivers)
            for request in [first, *greedy[:3], modest]:
                assert len(await tokens_of(request)) == 4
            starts = [each.record.routed_s for each in (greedy[0], modest, greedy[1])]
            assert starts == sorted(starts)
            await settle(coordinator)

    run(scenario)


def test_a_limit_for_each_client():
    async def scenario():
        async with serving(PAIR, budget=7, client_queue_limit=1) as (coordinator, drivers):
            running = [busy(coordinator, drivers)]
            running += [coordinator.submit(PROMPT, sampling(), origin=Origin(name)) for name in "ab"]
            with pytest.raises(TooMany):
                coordinator.submit(PROMPT, sampling(), origin=Origin("a"))
            free(drivers)
            for request in running:
                assert len(await tokens_of(request)) == 4

    run(scenario)


def test_below_the_high_water_mark_room_is_left():
    async def scenario():
        async with serving(PAIR, budget=40, growth_tokens=0) as (coordinator, drivers):
            for replica in coordinator.replicas.values():
                replica.high_water = 0.5
            busy(coordinator, drivers)
            [coordinator.submit(PROMPT, sampling()) for _ in range(9)]
            assert {replica.held_tokens for replica in coordinator.replicas.values()} == {18}
            free(drivers)

    run(scenario)

"""The coordinator with scripted drivers: order, cancellation, overload, accounting."""

import asyncio

import pytest
from scripted import PAIR, PROMPT, run, sampling, serving, settle, tokens_of

from runtime.protocol.to_workers import ReserveKv
from runtime.routing.refusals import Overloaded, Unavailable
from runtime.routing.router import Route


def test_a_request_goes_through_prefill_and_decode_in_order():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            request = coordinator.submit(PROMPT, sampling(5))
            assert await tokens_of(request) == [300, 301, 302, 303, 304]
            assert request.route == PAIR[0]
            assert drivers["p0"].kinds() == ["Prefill"] and drivers["p0"].received[0].target == "d0"
            assert drivers["d0"].kinds() == ["ReserveKv", "Decode"]
            assert drivers["d0"].received[0].capacity_tokens == 8
            await settle(coordinator)
            (record,) = coordinator.records
            assert (record.outcome, record.output_tokens, record.kv_bytes) == ("length", 5, 640)
            assert 0 < record.arrived_s <= record.routed_s <= record.first_token_s <= record.ended_s

    run(scenario)


def test_repeated_tokens_are_yielded_once():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            drivers["p0"].repeat = drivers["d0"].repeat = True
            assert await tokens_of(coordinator.submit(PROMPT, sampling(4))) == [300, 301, 302, 303]

    run(scenario)


def test_a_colocated_replica_does_both_phases():
    async def scenario():
        async with serving([Route("c0", "c0", 1.0)]) as (coordinator, drivers):
            assert await tokens_of(coordinator.submit(PROMPT, sampling(3))) == [300, 301, 302]
            assert drivers["c0"].kinds() == ["Prefill"] and drivers["c0"].received[0].target == ""
            await settle(coordinator)

    run(scenario)


def test_one_token_needs_no_decode_replica():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            request = coordinator.submit(PROMPT, sampling(1))
            assert await tokens_of(request) == [300]
            assert drivers["p0"].received[0].target == "" and drivers["d0"].received == []
            assert request.record.decode_replica == "p0"
            await settle(coordinator)

    run(scenario)


def test_an_end_at_the_first_token_frees_the_reservation():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            drivers["p0"].stop_at["r0"] = 0
            assert await tokens_of(coordinator.submit(PROMPT, sampling(9))) == [300]
            await settle(coordinator)
            assert drivers["d0"].kinds() == ["ReserveKv", "Cancel"] and not drivers["d0"].held
            assert drivers["p0"].kinds() == ["Prefill"]
            assert coordinator.records[0].outcome == "stop"

    run(scenario)


@pytest.mark.parametrize("stuck", ["p0", "d0"])
def test_cancel_frees_both_sides_and_only_once_they_say_so(stuck):
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            drivers[stuck].gate.clear()
            request = coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.05)
            coordinator.cancel(request)
            coordinator.cancel(request)
            assert [output async for output in request] == []
            await asyncio.sleep(0.05)
            assert coordinator.replicas["d0"].held or coordinator.replicas["p0"].held
            drivers[stuck].gate.set()
            await settle(coordinator)
            assert not drivers["p0"].held and not drivers["d0"].held
            assert [record.outcome for record in coordinator.records] == ["cancelled"]
            assert await tokens_of(coordinator.submit(PROMPT, sampling(2))) == [300, 301]

    run(scenario)


def test_cancel_while_waiting_leaves_the_queue():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            first, second = (coordinator.submit(PROMPT, sampling(6)) for _ in range(2))
            assert coordinator.waiting == 1
            coordinator.cancel(second)
            assert coordinator.waiting == 0 and second.route is None
            drivers["d0"].gate.set()
            assert len(await tokens_of(first)) == 6

    run(scenario)


def test_requests_wait_in_order_for_room_and_a_full_queue_refuses():
    async def scenario():
        async with serving(PAIR, budget=10, queue_limit=3) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            running = [coordinator.submit(PROMPT, sampling(6)) for _ in range(4)]
            with pytest.raises(Overloaded):
                coordinator.submit(PROMPT, sampling(6))
            drivers["d0"].gate.set()
            results = await asyncio.gather(*map(tokens_of, running))
            assert results == [[300, 301, 302, 303, 304, 305]] * 4
            expected = [each.request_id for each in drivers["d0"].received if isinstance(each, ReserveKv)]
            assert expected == ["r0", "r1", "r2", "r3"]

    run(scenario)


def test_many_requests_follow_the_weights_and_leave_nothing_behind():
    async def scenario():
        routes = [
            Route("p0", "d0", 3.0),
            Route("p1", "d0", 1.0),
            Route("p1", "d1", 2.0),
            Route("c0", "c0", 2.0),
        ]
        async with serving(routes, budget=1000, max_batch=100) as (coordinator, drivers):
            requests = [coordinator.submit([1] * (1 + n % 7), sampling(1 + n % 5)) for n in range(80)]
            results = await asyncio.gather(*map(tokens_of, requests))
            for number, tokens in enumerate(results):
                first = 100 * (1 + number % 7)
                assert tokens == list(range(first, first + 1 + number % 5))
            picked = [request.route for request in requests]
            assert [picked.count(route) for route in routes] == [30, 10, 20, 20]
            await settle(coordinator)
            assert not any(driver.held for driver in drivers.values())
            assert all(replica.held_tokens == 0 for replica in coordinator.replicas.values())
            assert not coordinator._in_flight.requests

    run(scenario)


def test_a_silent_worker_is_lost_and_a_slow_one_is_not():
    async def scenario():
        async with serving(PAIR, ping_every_s=0.02) as (coordinator, drivers):
            assert await tokens_of(coordinator.submit(PROMPT, sampling(3))) == [300, 301, 302]
            await asyncio.sleep(0.5)
            assert coordinator.lost == {} and "Ping" in drivers["d0"].kinds()
            drivers["d0"].gate.clear()
            with pytest.raises(Unavailable, match="worker n/d0 does not answer"):
                await tokens_of(coordinator.submit(PROMPT, sampling(3)))
            assert list(coordinator.lost) == ["d0"]

    run(scenario)

"""The coordinator against scripted lead workers: order, cancellation, overload, loss, accounting."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from runtime.coordinator import Coordinator
from runtime.generation import Overloaded, TooLong, Unavailable
from runtime.launcher.link import Link
from runtime.messages import (
    Cancel,
    Decode,
    Expect,
    Failed,
    KvMoved,
    Prefill,
    Released,
    RequestFailed,
    Reserved,
    Sampling,
    StepOutput,
    TokenOutput,
)
from runtime.replica import Replica
from runtime.router import Route, Router

PROMPT = [5, 6, 7]


class FakeLead:
    """The lead of a one-worker replica: request i's token n is 100 * prompt length + n.

    `held` has the requests that hold memory; `hold_back` stops it before a kind of message.
    """

    def __init__(self, replica_id, link):
        self.replica_id, self.link = replica_id, link
        self.received, self.held, self.gate = [], set(), asyncio.Event()
        self.gate.set()
        self.refusals, self.stop_at, self.repeat = 0, {}, False

    async def run(self):
        while (message := await self.link.receive()) is not None:
            self.received.append(message)
            await self.gate.wait()
            self.answer(message)

    def answer(self, message):
        match message:
            case Expect():
                self.refusals -= 1
                ok = self.refusals < 0
                self.held |= {message.request_id} if ok else set()
                self.link.send(Reserved(request_id=message.request_id, ok=ok))
            case Prefill():
                self.held.add(message.request_id)
                base = 100 * len(message.prompt)
                last = message.sampling.max_tokens if message.target == "" else 1
                self.emit(message.request_id, range(last), base, message.sampling.max_tokens)
                self.release(message.request_id)
            case Decode():
                self.link.send(KvMoved(request_id=message.request_id, bytes_received=640, seconds=0.001))
                base = message.last_token - message.index + 1
                tokens = range(message.index, message.sampling.max_tokens)
                self.emit(message.request_id, tokens, base, message.sampling.max_tokens)
                self.release(message.request_id)
            case Cancel():
                self.release(message.request_id)

    def emit(self, request_id, indices, base, max_tokens):
        for index in indices:
            reason = "length" if index + 1 == max_tokens else ""
            reason = "stop" if self.stop_at.get(request_id) == index else reason
            output = TokenOutput(request_id=request_id, index=index, token=base + index, finish_reason=reason)
            self.link.send(StepOutput(replica=self.replica_id, outputs=(output,) * (1 + self.repeat)))

    def release(self, request_id):
        self.held.discard(request_id)
        self.link.send(Released(request_id=request_id, replica=self.replica_id))

    def kinds(self):
        return [type(message).__name__ for message in self.received]


@asynccontextmanager
async def serving(routes, budget=100, max_batch=4, lead=FakeLead, **options):
    """A coordinator over fake leads for every replica that the routes name."""
    leads, replicas, tasks = {}, {}, []
    for name in dict.fromkeys(name for route in routes for name in (route.prefill, route.decode)):
        ours, theirs = socket.socketpair()
        leads[name] = lead(name, await Link.over(theirs))
        role = "colocated" if name.startswith("c") else "prefill" if name.startswith("p") else "decode"
        replicas[name] = Replica(
            name, role, f"n/{name}", {f"n/{name}": await Link.over(ours)}, budget, max_batch
        )
        tasks.append(asyncio.create_task(leads[name].run()))
    coordinator = Coordinator(Router(routes), replicas, **options)
    coordinator.start()
    try:
        yield coordinator, leads
    finally:
        await coordinator.stop()
        for task in tasks:
            task.cancel()


def run(scenario):
    async def limited():
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())


async def tokens_of(generation):
    return [output.token async for output in generation]


async def settle(coordinator):
    """Wait until no replica holds anything."""
    while any(replica.held for replica in coordinator.replicas.values()):
        await asyncio.sleep(0.005)


def sampling(max_tokens=4):
    return Sampling(max_tokens=max_tokens)


PAIR = [Route("p0", "d0", 1.0)]


def test_a_request_goes_through_prefill_and_decode_in_order():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            generation = coordinator.submit(PROMPT, sampling(5))
            assert await tokens_of(generation) == [300, 301, 302, 303, 304]
            assert generation.route == PAIR[0]
            assert leads["p0"].kinds() == ["Prefill"] and leads["p0"].received[0].target == "d0"
            assert leads["d0"].kinds() == ["Expect", "Decode"]
            assert leads["d0"].received[0].capacity_tokens == 8
            await settle(coordinator)
            (record,) = coordinator.records
            assert (record.outcome, record.output_tokens, record.kv_bytes) == ("length", 5, 640)
            assert 0 < record.arrived_s <= record.routed_s <= record.first_token_s <= record.ended_s

    run(scenario)


def test_repeated_tokens_are_yielded_once():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            leads["p0"].repeat = leads["d0"].repeat = True
            assert await tokens_of(coordinator.submit(PROMPT, sampling(4))) == [300, 301, 302, 303]

    run(scenario)


def test_a_colocated_replica_does_both_phases():
    async def scenario():
        async with serving([Route("c0", "c0", 1.0)]) as (coordinator, leads):
            assert await tokens_of(coordinator.submit(PROMPT, sampling(3))) == [300, 301, 302]
            assert leads["c0"].kinds() == ["Prefill"] and leads["c0"].received[0].target == ""
            await settle(coordinator)

    run(scenario)


def test_one_token_needs_no_decode_replica():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            generation = coordinator.submit(PROMPT, sampling(1))
            assert await tokens_of(generation) == [300]
            assert leads["p0"].received[0].target == "" and leads["d0"].received == []
            assert generation.record.decode_replica == "p0"
            await settle(coordinator)

    run(scenario)


def test_an_end_at_the_first_token_frees_the_reservation():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            leads["p0"].stop_at["r0"] = 0
            assert await tokens_of(coordinator.submit(PROMPT, sampling(9))) == [300]
            await settle(coordinator)
            assert leads["d0"].kinds() == ["Expect", "Cancel"] and not leads["d0"].held
            assert leads["p0"].kinds() == ["Prefill"]
            assert coordinator.records[0].outcome == "stop"

    run(scenario)


@pytest.mark.parametrize("stuck", ["p0", "d0"])
def test_cancel_frees_both_sides_and_only_once_they_say_so(stuck):
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            leads[stuck].gate.clear()
            generation = coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.05)
            coordinator.cancel(generation)
            coordinator.cancel(generation)
            assert [output async for output in generation] == []
            await asyncio.sleep(0.05)
            assert coordinator.replicas["d0"].held or coordinator.replicas["p0"].held
            leads[stuck].gate.set()
            await settle(coordinator)
            assert not leads["p0"].held and not leads["d0"].held
            assert [record.outcome for record in coordinator.records] == ["cancelled"]
            assert await tokens_of(coordinator.submit(PROMPT, sampling(2))) == [300, 301]

    run(scenario)


def test_cancel_while_waiting_leaves_the_queue():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, leads):
            leads["d0"].gate.clear()
            first, second = (coordinator.submit(PROMPT, sampling(6)) for _ in range(2))
            assert coordinator.waiting == 1
            coordinator.cancel(second)
            assert coordinator.waiting == 0 and second.route is None
            leads["d0"].gate.set()
            assert len(await tokens_of(first)) == 6

    run(scenario)


def test_requests_wait_in_order_for_room_and_a_full_queue_refuses():
    async def scenario():
        async with serving(PAIR, budget=10, queue_limit=3) as (coordinator, leads):
            leads["d0"].gate.clear()
            running = [coordinator.submit(PROMPT, sampling(6)) for _ in range(4)]
            with pytest.raises(Overloaded):
                coordinator.submit(PROMPT, sampling(6))
            leads["d0"].gate.set()
            results = await asyncio.gather(*map(tokens_of, running))
            assert results == [[300, 301, 302, 303, 304, 305]] * 4
            expected = [message.request_id for message in leads["d0"].received if isinstance(message, Expect)]
            assert expected == ["r0", "r1", "r2", "r3"]

    run(scenario)


def test_a_refused_reservation_is_tried_again_after_a_release():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            leads["d0"].gate.clear()
            first, second = coordinator.submit(PROMPT, sampling()), coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.02)
            answer, calls = leads["d0"].answer, []

            def refuse_the_second_once(message):
                calls.append(message)
                if len(calls) == 2:
                    return leads["d0"].link.send(Reserved(request_id=message.request_id, ok=False))
                answer(message)

            leads["d0"].answer = refuse_the_second_once
            leads["d0"].gate.set()
            assert await tokens_of(first) == await tokens_of(second) == [300, 301, 302, 303]
            expected = [message.request_id for message in leads["d0"].received if isinstance(message, Expect)]
            assert expected[:2] == ["r0", "r1"] and len(set(expected)) == 3

    run(scenario)


def test_a_refusal_by_an_empty_replica_is_an_error_not_a_loop():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            leads["d0"].refusals = 99
            with pytest.raises(Unavailable, match="no room"):
                await tokens_of(coordinator.submit(PROMPT, sampling()))

    run(scenario)


def test_a_refusal_that_crosses_a_cancel_frees_the_room():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            lead = leads["d0"]
            lead.refusals, lead.release = 1, lambda _: None  # it says Released of nothing it never held
            lead.gate.clear()
            generation = coordinator.submit(PROMPT, sampling())
            coordinator.cancel(generation)
            lead.gate.set()
            await settle(coordinator)
            assert not coordinator._requests

    run(scenario)


def test_a_request_that_ends_refused_lets_the_next_one_start():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, leads):
            leads["d0"].refusals = 1
            refused, waiting = (coordinator.submit(PROMPT, sampling(6)) for _ in range(2))
            with pytest.raises(Unavailable, match="no room"):
                await tokens_of(refused)
            assert len(await tokens_of(waiting)) == 6

    run(scenario)


class Failing(FakeLead):
    """Gives up the requests named in `gives_up` when a kind of message comes for them."""

    def __init__(self, replica_id, link):
        super().__init__(replica_id, link)
        self.gives_up = {}

    def answer(self, message):
        if isinstance(message, self.gives_up.get(message.request_id, ())):
            text = "sending KV cache to n/d0 failed"
            failed = RequestFailed(request_id=message.request_id, replica=self.replica_id, text=text)
            if isinstance(message, Prefill) and message.target:
                self.emit(message.request_id, range(1), 100 * len(message.prompt), 99)
            self.link.send(failed)
            self.release(message.request_id)
        else:
            super().answer(message)


@pytest.mark.parametrize(("name", "when"), [("p0", Prefill), ("d0", Decode), ("c0", Prefill)])
def test_a_request_that_a_replica_gives_up_fails_alone(name, when):
    async def scenario():
        routes = [Route("c0", "c0", 1.0)] if name == "c0" else PAIR
        async with serving(routes, lead=Failing) as (coordinator, leads):
            leads[name].gives_up = {"r0": when}
            failed, beside = coordinator.submit(PROMPT, sampling()), coordinator.submit(PROMPT, sampling())
            with pytest.raises(Unavailable, match=f"replica {name} gave up request r0: sending KV cache"):
                await tokens_of(failed)
            assert await tokens_of(beside) == [300, 301, 302, 303]
            await settle(coordinator)
            assert not any(lead.held for lead in leads.values()) and not coordinator._requests
            assert [record.outcome for record in coordinator.records] == ["failed", "length"]
            if name == "p0":
                assert Cancel(request_id="r0") in leads["d0"].received
            assert (
                coordinator.lost == {} and len(await tokens_of(coordinator.submit(PROMPT, sampling()))) == 4
            )

    run(scenario)


def test_a_failure_after_the_end_changes_nothing():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            generation = coordinator.submit(PROMPT, sampling())
            assert len(await tokens_of(generation)) == 4
            await settle(coordinator)
            for lead in leads.values():
                lead.link.send(RequestFailed(request_id="r0", replica=lead.replica_id, text="late"))
                lead.release("r0")
            assert len(await tokens_of(coordinator.submit(PROMPT, sampling()))) == 4
            await settle(coordinator)
            assert [record.outcome for record in coordinator.records] == ["length", "length"]
            assert all(replica.held_tokens == 0 for replica in coordinator.replicas.values())

    run(scenario)


def test_a_request_that_never_fits_is_refused_at_once():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, _):
            with pytest.raises(TooLong):
                coordinator.submit(PROMPT, sampling(8))
            assert await tokens_of(coordinator.submit(PROMPT, sampling(7)))

    run(scenario)


@pytest.mark.parametrize("lost", ["p0", "d0"])
@pytest.mark.parametrize("how", ["closes", "fails", "babbles"])
def test_a_lost_replica_fails_its_requests_and_the_others_serve(lost, how):
    async def scenario():
        routes = [Route("p0", "d0", 1.0), Route("p1", "d1", 1.0)]
        async with serving(routes) as (coordinator, leads):
            leads[lost].gate.clear()
            on_lost = coordinator.submit(PROMPT, sampling(), route=routes[0])
            await asyncio.sleep(0.02)
            if how == "closes":
                leads[lost].link.close()
            elif how == "babbles":
                leads[lost].link._writer.write(b"\x03\x00\x00\x00abc")
            else:
                leads[lost].link.send(Failed(worker=f"n/{lost}", kind="fault", text="broken"))
            with pytest.raises(Unavailable, match=f"replica {lost} is lost"):
                await tokens_of(on_lost)
            assert lost in coordinator.lost[lost]
            for _ in range(3):
                generation = coordinator.submit(PROMPT, sampling())
                assert len(await tokens_of(generation)) == 4
                assert generation.route == routes[1]
            await settle(coordinator)

    run(scenario)


def test_nothing_left_to_serve_is_an_error_for_those_who_wait_and_those_who_come():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, leads):
            leads["d0"].gate.clear()
            requests = [coordinator.submit(PROMPT, sampling(6)) for _ in range(3)]
            await asyncio.sleep(0.02)
            leads["d0"].link.close()
            for request in requests:
                with pytest.raises(Unavailable):
                    await tokens_of(request)
            with pytest.raises(Unavailable, match="no replica is left"):
                coordinator.submit(PROMPT, sampling())
            assert coordinator.waiting == 0

    run(scenario)


def test_a_prefill_replica_may_go_once_its_request_decodes():
    async def scenario():
        async with serving(PAIR) as (coordinator, leads):
            sent = asyncio.Event()
            emit = leads["d0"].emit

            def slowly(*arguments):
                asyncio.get_running_loop().call_later(0.1, emit, *arguments)
                sent.set()

            leads["d0"].emit, leads["d0"].release = slowly, lambda _: None
            generation = coordinator.submit(PROMPT, sampling())
            await sent.wait()
            leads["p0"].link.close()
            assert await tokens_of(generation) == [300, 301, 302, 303]

    run(scenario)


def test_stop_ends_every_stream():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, leads):
            leads["d0"].gate.clear()
            requests = [coordinator.submit(PROMPT, sampling(6)) for _ in range(2)]
            await coordinator.stop()
            for request in requests:
                with pytest.raises(Unavailable, match="stopping"):
                    await tokens_of(request)

    run(scenario)


def test_many_requests_follow_the_weights_and_leave_nothing_behind():
    async def scenario():
        routes = [
            Route("p0", "d0", 3.0),
            Route("p1", "d0", 1.0),
            Route("p1", "d1", 2.0),
            Route("c0", "c0", 2.0),
        ]
        async with serving(routes, budget=1000, max_batch=100) as (coordinator, leads):
            requests = [coordinator.submit([1] * (1 + n % 7), sampling(1 + n % 5)) for n in range(80)]
            results = await asyncio.gather(*map(tokens_of, requests))
            for number, tokens in enumerate(results):
                first = 100 * (1 + number % 7)
                assert tokens == list(range(first, first + 1 + number % 5))
            picked = [request.route for request in requests]
            assert [picked.count(route) for route in routes] == [30, 10, 20, 20]
            await settle(coordinator)
            assert not any(lead.held for lead in leads.values())
            assert all(replica.held_tokens == 0 for replica in coordinator.replicas.values())
            assert not coordinator._requests

    run(scenario)

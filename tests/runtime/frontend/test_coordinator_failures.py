"""The coordinator with scripted drivers that refuse, fail, give up or disappear."""

import asyncio
import random

import pytest
from scripted import PAIR, PROMPT, FakeDriver, run, sampling, serving, settle, tokens_of

from runtime.frontend.in_flight import RESUMES
from runtime.protocol.from_workers import Failed, KvMoved, RequestFailed, Reserved
from runtime.protocol.to_workers import Cancel, Decode, Prefill, ReserveKv
from runtime.routing.refusals import Broken, TooLong, Unavailable
from runtime.routing.router import Route


def test_a_refused_reservation_is_tried_again_after_a_release():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            first, second = coordinator.submit(PROMPT, sampling()), coordinator.submit(PROMPT, sampling())
            await asyncio.sleep(0.02)
            answer, calls = drivers["d0"].answer, []

            def refuse_the_second_once(message):
                calls.append(message)
                if len(calls) == 2:
                    return drivers["d0"].link.send(Reserved(request_id=message.request_id, ok=False))
                answer(message)

            drivers["d0"].answer = refuse_the_second_once
            drivers["d0"].gate.set()
            assert await tokens_of(first) == await tokens_of(second) == [300, 301, 302, 303]
            expected = [each.request_id for each in drivers["d0"].received if isinstance(each, ReserveKv)]
            assert expected[:2] == ["r0", "r1"] and len(set(expected)) == 3

    run(scenario)


def test_a_refusal_by_an_empty_replica_is_an_error_not_a_loop():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            drivers["d0"].refusals = 99
            with pytest.raises(Unavailable, match="no room"):
                await tokens_of(coordinator.submit(PROMPT, sampling()))

    run(scenario)


def test_a_refusal_that_crosses_a_cancel_frees_the_room():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            driver = drivers["d0"]
            driver.refusals, driver.release = 1, lambda _: None  # it sends no Released for what it never held
            driver.gate.clear()
            request = coordinator.submit(PROMPT, sampling())
            coordinator.cancel(request)
            driver.gate.set()
            await settle(coordinator)
            assert not coordinator._in_flight.requests

    run(scenario)


def test_a_request_that_ends_refused_lets_the_next_one_start():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, drivers):
            drivers["d0"].refusals = 1
            refused, waiting = (coordinator.submit(PROMPT, sampling(6)) for _ in range(2))
            with pytest.raises(Unavailable, match="no room"):
                await tokens_of(refused)
            assert len(await tokens_of(waiting)) == 6

    run(scenario)


class Failing(FakeDriver):
    """Gives up the requests named in `gives_up` when a kind of message arrives for them."""

    def __init__(self, replica_id, link):
        super().__init__(replica_id, link)
        self.gives_up, self.fault = {}, False

    def answer(self, message):
        if isinstance(message, self.gives_up.get(message.request_id, ())):
            text = "sending KV cache to n/d0 failed"
            failed = RequestFailed(
                request_id=message.request_id, replica=self.replica_id, text=text, fault=self.fault
            )
            if isinstance(message, Prefill) and message.target:
                self.emit(message.request_id, range(1), 100 * len(message.prompt), 99)
            self.link.send(failed)
            self.release(message.request_id)
        else:
            super().answer(message)


@pytest.mark.parametrize(("name", "when"), [("p0", Prefill), ("d0", Decode), ("c0", Prefill)])
def test_a_request_that_a_replica_gives_up_fails_alone(name, when, caplog):
    async def scenario():
        routes = [Route("c0", "c0", 1.0)] if name == "c0" else PAIR
        async with serving(routes, driver=Failing) as (coordinator, drivers):
            drivers[name].gives_up = {"r0": when}
            failed, beside = coordinator.submit(PROMPT, sampling()), coordinator.submit(PROMPT, sampling())
            with pytest.raises(Broken, match="failed at request r0"):
                await tokens_of(failed)
            assert f"replica {name} gave up request r0: sending KV cache" in caplog.text
            assert await tokens_of(beside) == [300, 301, 302, 303]
            await settle(coordinator)
            assert not any(driver.held for driver in drivers.values()) and not coordinator._in_flight.requests
            assert [record.outcome for record in coordinator.records] == ["failed", "length"]
            if name == "p0":
                assert Cancel(request_id="r0") in drivers["d0"].received
            assert (
                coordinator.lost == {} and len(await tokens_of(coordinator.submit(PROMPT, sampling()))) == 4
            )

    run(scenario)


@pytest.mark.parametrize(("name", "when"), [("p0", Prefill), ("d0", Decode), ("c0", Prefill)])
def test_a_request_that_a_fault_struck_is_resumed_where_it_was(name, when):
    async def scenario():
        routes = [Route("c0", "c0", 1.0)] if name == "c0" else PAIR
        async with serving(routes, driver=Failing) as (coordinator, drivers):
            drivers[name].gives_up, drivers[name].fault = {"r0": when}, True
            request = coordinator.submit(PROMPT, sampling())
            assert await tokens_of(request) == [300, 301, 302, 303]
            await settle(coordinator)
            assert not any(driver.held for driver in drivers.values()) and not coordinator._in_flight.requests
            (record,) = coordinator.records
            assert (record.outcome, record.resumes, record.output_tokens) == ("length", 1, 4)
            again = [m for m in drivers[routes[0].prefill].received if isinstance(m, Prefill)][-1]
            known = 0 if name == "c0" else 1
            assert again.request_id == "r1" and again.index == known
            assert list(again.prompt) == PROMPT + [300][:known]

    run(scenario)


def test_what_fails_everywhere_is_an_error_in_the_end():
    async def scenario():
        async with serving([Route("c0", "c0", 1.0), Route("c1", "c1", 1.0)], driver=Failing) as (
            coordinator,
            drivers,
        ):
            for driver in drivers.values():
                driver.gives_up, driver.fault = {f"r{number}": Prefill for number in range(9)}, True
            request = coordinator.submit(PROMPT, sampling())
            with pytest.raises(Unavailable, match="gave up request r3: sending KV cache"):
                await tokens_of(request)
            assert request.record.resumes == 3
            await settle(coordinator)

    run(scenario)


def test_a_failure_after_the_end_changes_nothing():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            request = coordinator.submit(PROMPT, sampling())
            assert len(await tokens_of(request)) == 4
            await settle(coordinator)
            for driver in drivers.values():
                driver.link.send(
                    RequestFailed(request_id="r0", replica=driver.replica_id, text="late", fault=True)
                )
                driver.release("r0")
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
def test_a_lost_replica_fails_a_request_that_was_resumed_often_and_the_others_serve(lost, how):
    async def scenario():
        routes = [Route("p0", "d0", 1.0), Route("p1", "d1", 1.0)]
        async with serving(routes) as (coordinator, drivers):
            drivers[lost].gate.clear()
            on_lost = coordinator.submit(PROMPT, sampling())
            on_lost.record.resumes = RESUMES
            await asyncio.sleep(0.02)
            if how == "closes":
                drivers[lost].link.close()
            elif how == "babbles":
                drivers[lost].link._writer.write(b"\x03\x00\x00\x00abc")
            else:
                drivers[lost].link.send(Failed(worker=f"n/{lost}", kind="fault", text="broken"))
            with pytest.raises(Unavailable, match=f"replica {lost} is lost"):
                await tokens_of(on_lost)
            assert lost in coordinator.lost[lost]
            for _ in range(3):
                request = coordinator.submit(PROMPT, sampling())
                assert len(await tokens_of(request)) == 4
                assert request.route == routes[1]
            await settle(coordinator)

    run(scenario)


@pytest.mark.parametrize("phase", ["reserving", "prefilling", "decoding"])
@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_requests_of_a_lost_replica_go_on_elsewhere(lost, phase):
    """Each token comes once, whatever the lost replica had sent; nothing stays accounted for."""

    async def scenario():
        routes = [Route("p0", "d0", 1.0), Route("p1", "d1", 1.0)]
        async with serving(routes) as (coordinator, drivers):
            d0 = drivers["d0"]
            if phase == "reserving":
                d0.gate.clear()
            elif phase == "prefilling":
                drivers["p0"].gate.clear()
            else:
                d0.emit = lambda *_: None
                d0.release = lambda _: None
            requests = [coordinator.submit(PROMPT, sampling()) for _ in range(4)]
            await asyncio.sleep(0.02)
            doomed = [request for request in requests if request.state.value != "ended"]
            assert {request.state.value for request in doomed} == {phase} and len(doomed) == 2
            drivers[lost].link.close()
            for request in requests:
                if lost == "p0" and phase == "decoding":
                    break  # they no longer need it, and d0 is silent
                assert await tokens_of(request) == [300, 301, 302, 303]
                assert request.record.resumes == (request in doomed)
            else:
                drivers["p0"].gate.set()
                d0.gate.set()
                d0.__dict__.pop("release", None)
                for request_id in list(d0.held):
                    d0.release(request_id)
                await settle(coordinator)
                assert not coordinator._in_flight.requests
                order = [request.record.routed_s for request in doomed]
                assert order == sorted(order)

    run(scenario)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_every_token_comes_once(seed):
    """Replicas refuse, fail requests or disappear at random, while one route stays intact."""
    rng = random.Random(seed)

    class Unreliable(FakeDriver):
        whole = False

        def answer(self, message):
            kind = rng.random() if not self.whole else 1.0
            if kind < 0.05:
                self.link.close()
            elif kind < 0.2 and isinstance(message, ReserveKv):
                self.link.send(Reserved(request_id=message.request_id, ok=False))
            elif kind < 0.3 and isinstance(message, (ReserveKv, Prefill, Decode)):
                self.emit_some(message)
                failed = RequestFailed(
                    request_id=message.request_id, replica=self.replica_id, text="fell over", fault=True
                )
                self.link.send(failed)
                self.release(message.request_id)
            else:
                super().answer(message)

        def emit_some(self, message):
            if isinstance(message, Decode):
                base = message.last_token - message.index + 1
                end = rng.randint(message.index, message.sampling.max_tokens - 1)
                self.emit(message.request_id, range(message.index, end), base, message.sampling.max_tokens)

    async def scenario():
        routes = [Route(f"p{i}", f"d{j}", 1.0) for i in range(2) for j in range(2)]
        routes += [Route("c0", "c0", 1.0), Route("c1", "c1", 1.0)]
        async with serving(routes, driver=Unreliable, queue_limit=99) as (coordinator, drivers):
            drivers["c1"].whole = True
            count = rng.randint(5, 40)
            lengths = [rng.randint(1, 9) for _ in range(count)]
            requests = []
            for length in lengths:
                requests.append(coordinator.submit(PROMPT, sampling(length)))
                await asyncio.sleep(rng.random() * 0.002)
            for request, length in zip(requests, lengths, strict=True):
                try:
                    tokens = await tokens_of(request)
                except Broken:
                    assert len(request.deaths) >= 2
                except Unavailable:
                    assert request.record.resumes == 3 or "no room" in str(request._events._queue[0])
                else:
                    assert tokens == list(range(300, 300 + length))
            await settle(coordinator)
            assert not coordinator._in_flight.requests and coordinator.waiting == 0
            assert all(replica.held_tokens == 0 for replica in coordinator.replicas.values())

    run(scenario)


def test_nothing_left_to_serve_is_an_error_for_those_who_wait_and_those_who_come():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            requests = [coordinator.submit(PROMPT, sampling(6)) for _ in range(3)]
            await asyncio.sleep(0.02)
            drivers["d0"].link.close()
            for request in requests:
                with pytest.raises(Unavailable):
                    await tokens_of(request)
            with pytest.raises(Unavailable, match="no replica is left"):
                coordinator.submit(PROMPT, sampling())
            assert coordinator.waiting == 0

    run(scenario)


def test_a_prefill_replica_may_go_once_its_request_decodes():
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            sent = asyncio.Event()
            emit = drivers["d0"].emit

            def slowly(*arguments):
                asyncio.get_running_loop().call_later(0.1, emit, *arguments)
                sent.set()

            drivers["d0"].emit, drivers["d0"].release = slowly, lambda _: None
            request = coordinator.submit(PROMPT, sampling())
            await sent.wait()
            drivers["p0"].link.close()
            assert await tokens_of(request) == [300, 301, 302, 303]

    run(scenario)


def test_a_prefill_replica_that_goes_with_the_first_token_is_missed_though_the_kv_cache_has_arrived():
    async def scenario():
        async with serving([Route("p0", "d0", 1.0), Route("p1", "d0", 0.1)]) as (coordinator, drivers):
            drivers["p0"].gate.clear()
            request = coordinator.submit(PROMPT, sampling())
            while "Prefill" not in drivers["p0"].kinds():
                await asyncio.sleep(0.005)
            moved = KvMoved(request_id=request.request_id, bytes_received=640, seconds=0.001)
            drivers["d0"].link.send(moved)
            while not request.record.kv_arrived:
                await asyncio.sleep(0.005)
            drivers["p0"].link.close()
            assert await tokens_of(request) == [300, 301, 302, 303]
            assert request.record.resumes == 1 and list(coordinator.lost) == ["p0"]
            drivers["p0"].gate.set()
            await settle(coordinator)

    run(scenario)


def test_stop_ends_every_stream():
    async def scenario():
        async with serving(PAIR, budget=10) as (coordinator, drivers):
            drivers["d0"].gate.clear()
            requests = [coordinator.submit(PROMPT, sampling(6)) for _ in range(2)]
            await coordinator.stop()
            for request in requests:
                with pytest.raises(Unavailable, match="stopping"):
                    await tokens_of(request)

    run(scenario)

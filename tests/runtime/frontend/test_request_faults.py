"""A request that fails by itself, in any part of the server, ends alone; one that kills replicas is resumed
only once."""

import asyncio
import os
import threading
import time

import httpx
import pytest
from scripted import PAIR, PROMPT, FakeDriver, run, sampling, serving, settle, tokens_of
from served import KEY, MODEL, ROOT, SECONDS, Server, until_idle

from benchmarks.serving.poison.seeds import AT_START, IN_SAMPLING, KILLS
from runtime.protocol.from_workers import StepOutput, TokenOutput
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Decode, Prefill, ReserveKv
from runtime.routing.refusals import Broken
from runtime.routing.router import Route

POISON = ROOT / "benchmarks" / "serving" / "poison"

TWO = [Route("c0", "c0", 1.0), Route("c1", "c1", 1.0)]
POISONOUS = Sampling(max_tokens=4, seed=13)


class Mortal(FakeDriver):
    """A driver that dies of requests with the seed 13, after `lives` of their tokens; the test starts a
    replacement."""

    after = 0

    def answer(self, message):
        if isinstance(message, Prefill) and message.sampling.seed == 13:
            base = 100 * (len(message.prompt) - message.index)
            first = message.index
            self.emit(message.request_id, range(first, min(first + self.after, 3)), base, 4)
            self.link.close()
        else:
            super().answer(message)


@pytest.mark.parametrize("after", [0, 1])
def test_a_request_that_kills_two_replicas_is_not_resumed_again(after, caplog):
    async def scenario():
        explained = []
        routes = [Route(f"c{number}", f"c{number}", 1.0) for number in range(4)]
        async with serving(routes, driver=Mortal) as (coordinator, drivers):
            coordinator._on_explained = explained.append
            for driver in drivers.values():
                driver.after = after
            poison = coordinator.submit(PROMPT, POISONOUS)
            with pytest.raises(Broken, match="failed at request r"):
                await tokens_of(poison)
            assert poison.record.resumes == 1 and len(coordinator.lost) == 2
            assert [set(coordinator.lost)] == explained
            assert "replicas died while serving it" in caplog.text
            assert await tokens_of(coordinator.submit(PROMPT, sampling())) == [300, 301, 302, 303]
            await settle(coordinator)
            assert not coordinator._in_flight.requests

    run(scenario)


def test_replicas_that_die_together_died_of_no_request():
    """A machine fails with several replicas, and a request is resumed on another of them before the front end
    notices."""

    async def scenario():
        routes = [Route(f"c{number}", f"c{number}", 1.0) for number in range(4)]
        async with serving(routes) as (coordinator, drivers):
            for name in ("c0", "c1", "c2"):
                drivers[name].answer = lambda _: None
            requests = [coordinator.submit(PROMPT, sampling(8)) for _ in range(8)]
            await asyncio.sleep(0.05)
            for name in ("c0", "c1", "c2"):
                drivers[name].link.close()
            for request in requests:
                assert await tokens_of(request) == list(range(300, 308))
            assert len(coordinator.lost) == 3

    run(scenario)


def test_those_who_made_progress_beside_it_are_resumed():
    """The poison and other requests are in flight when two replicas die, but only the poison never got a
    token."""

    class Slow(Mortal):
        """A driver that gives other requests one token at a time, and delays the effect of the poison."""

        def answer(self, message):
            if isinstance(message, Prefill):
                self.tasks = [*getattr(self, "tasks", ()), asyncio.create_task(self.later(message))]
            else:
                super().answer(message)

        async def later(self, message):
            if message.sampling.seed == 13:
                await asyncio.sleep(0.1)
                self.link.close()
                return
            base = 100 * (len(message.prompt) - message.index)
            for index in range(message.index, 8):
                self.emit(message.request_id, [index], base, 8)
                await asyncio.sleep(0.05)
            self.release(message.request_id)

    async def scenario():
        async with serving([*TWO, Route("c2", "c2", 1.0)], driver=Slow) as (coordinator, _):
            poison = coordinator.submit(PROMPT, POISONOUS)
            others = [coordinator.submit(PROMPT, sampling(8)) for _ in range(6)]
            results = await asyncio.gather(*map(tokens_of, [poison, *others]), return_exceptions=True)
            assert isinstance(results[0], Broken)
            assert results[1:] == [list(range(300, 308))] * 6
            assert len(coordinator.lost) == 2

    run(scenario)


@pytest.mark.parametrize("kind", [Prefill, ReserveKv, Decode])
def test_a_message_that_cannot_be_made_ends_its_request_and_no_other(kind):
    async def scenario():
        async with serving(PAIR) as (coordinator, drivers):
            for replica in coordinator.replicas.values():
                replica.links = {name: Picky(link, kind) for name, link in replica.links.items()}
            poison, sound = coordinator.submit([7] * 5, sampling()), coordinator.submit(PROMPT, sampling())
            with pytest.raises(Broken):
                await tokens_of(poison)
            assert await tokens_of(sound) == [300, 301, 302, 303]
            await settle(coordinator)
            assert not coordinator.lost and not coordinator._in_flight.requests
            assert not any(driver.held for driver in drivers.values())

    run(scenario)


class Picky:
    """A link that cannot write one kind of message for the first request."""

    def __init__(self, link, kind):
        self.link, self.kind = link, kind

    def send(self, message):
        if isinstance(message, self.kind) and message.request_id == "r0":
            raise OverflowError("can only serialize 64 bits")
        self.link.send(message)

    def __getattr__(self, name):
        return getattr(self.link, name)


def test_a_token_that_cannot_be_taken_in_ends_its_request_and_no_other():
    class Odd(FakeDriver):
        def emit(self, request_id, indices, base, max_tokens):
            if request_id != "r0":
                return super().emit(request_id, indices, base, max_tokens)
            output = TokenOutput(request_id=request_id, index=0, token=base, cached_tokens=3)
            self.link.send(StepOutput(replica=self.replica_id, outputs=(output,)))

    async def scenario():
        async with serving([Route("c0", "c0", 1.0)], driver=Odd) as (coordinator, _):
            poison, sound = coordinator.submit(PROMPT, sampling()), coordinator.submit(PROMPT, sampling())

            def fails(event, put=poison.put):
                if isinstance(event, TokenOutput):
                    raise RuntimeError("planted")
                put(event)

            poison.put = fails
            with pytest.raises(Broken):
                await tokens_of(poison)
            assert await tokens_of(sound) == [300, 301, 302, 303]
            assert not coordinator.lost

    run(scenario)


@pytest.fixture(scope="module")
def poisoned(model_folder, tmp_path_factory):
    """A fleet of real workers with planted faults, whose replicas restart."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(POISON), before]))
    server = Server(model_folder, tmp_path_factory.mktemp("poisoned"), key=KEY, restarts=5)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    try:
        yield server.until_serving()
    finally:
        server.close()


@pytest.fixture
def asking(poisoned):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=poisoned.url, headers=headers, timeout=SECONDS) as http:
        yield http


def body(prompt, seed=None, **more):
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "seed": seed, "temperature": 0} | more


def until_whole(http):
    deadline = time.monotonic() + SECONDS
    while (health := http.get("/health")).status_code != 200:
        assert time.monotonic() < deadline, health.text
        time.sleep(0.1)


@pytest.mark.parametrize("seed", [AT_START, IN_SAMPLING])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_a_worker_is_500_for_one_request_and_the_others_do_not_notice(
    asking, poisoned, seed, stream
):
    """Requests of all kinds run in the same steps; no replica is lost."""
    prompts = [[20 + k] * (5 + 3 * k) for k in range(8)]
    sound = [asking.post("/v1/completions", json=body(each)).json()["choices"][0]["text"] for each in prompts]
    found, answers = {}, []

    def ask(number):
        with httpx.Client(base_url=poisoned.url, headers=asking.headers, timeout=SECONDS) as own:
            found[number] = own.post("/v1/completions", json=body(prompts[number]))

    beside = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for number, thread in enumerate(beside):
        thread.start()
        if number % 2:
            poison = body([9] * 30, seed, temperature=1, stream=stream)
            name = {"X-Request-Id": f"poison-{seed}-{stream}-{number}"}
            answers.append(asking.post("/v1/completions", json=poison, headers=name))
    for thread in beside:
        thread.join()
    assert [found[number].json()["choices"][0]["text"] for number in range(len(prompts))] == sound
    for number, answer in enumerate(answers):
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "request_failed")
        name = f"poison-{seed}-{stream}-{2 * number + 1}"
        assert name in error["message"] and "planted" not in answer.text
        assert name in poisoned.log.read_text()
    assert asking.get("/health").json()["status"] == "ok"
    assert " is lost (" not in poisoned.log.read_text()
    until_idle(asking)


def test_a_request_that_kills_its_replicas_is_500_and_they_come_back(asking, poisoned):
    text = asking.post("/v1/completions", json=body("before")).json()["choices"][0]["text"]
    for number in range(3):
        name = {"X-Request-Id": f"killer-{number}"}
        answer = asking.post(
            "/v1/completions", json=body([9] * 30, KILLS, temperature=1), headers=name, timeout=2 * SECONDS
        )
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["code"] == "request_failed"
        assert poisoned.log.read_text().count(" is lost (") == 2 * (number + 1)
        assert f"request killer-{number} fails by itself" in poisoned.log.read_text()
    until_whole(asking)
    assert asking.post("/v1/completions", json=body("before")).json()["choices"][0]["text"] == text
    until_idle(asking)

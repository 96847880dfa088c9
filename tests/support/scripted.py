"""A coordinator over scripted drivers, without any model."""

import asyncio
import socket
from contextlib import asynccontextmanager

from cost_model.errors import HexGen2Error
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica
from runtime.launcher.worker_link import StreamLink
from runtime.protocol.from_workers import KvMoved, Pong, Released, Reserved, StepOutput, TokenOutput
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Cancel, Decode, Ping, Prefill, ReserveKv
from runtime.routing.router import Route, Router

PROMPT = [5, 6, 7]


class FakeDriver:
    """The driver of a one-worker replica: token n of request i is 100 * prompt length + n.

    `held` has the requests that hold memory; clearing `gate` holds back its answers.
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
            case ReserveKv():
                self.refusals -= 1
                ok = self.refusals < 0
                self.held |= {message.request_id} if ok else set()
                self.link.send(Reserved(request_id=message.request_id, ok=ok))
            case Prefill():
                self.held.add(message.request_id)
                base, first = 100 * (len(message.prompt) - message.index), message.index
                last = message.sampling.max_tokens if message.target == "" else first + 1
                self.emit(message.request_id, range(first, last), base, message.sampling.max_tokens)
                self.release(message.request_id)
            case Decode():
                self.link.send(KvMoved(request_id=message.request_id, bytes_received=640, seconds=0.001))
                base = message.last_token - message.index + 1
                tokens = range(message.index, message.sampling.max_tokens)
                self.emit(message.request_id, tokens, base, message.sampling.max_tokens)
                self.release(message.request_id)
            case Cancel():
                self.release(message.request_id)
            case Ping():
                self.link.send(Pong(worker=f"n/{self.replica_id}"))

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
async def serving(
    routes,
    budget=100,
    max_batch=4,
    driver=FakeDriver,
    growth_tokens=3,
    router=Router,
    instance=None,
    **options,
):
    """A coordinator over a fake driver for every replica that the routes name. `router` makes its router, and
    `instance` is what a scheduler knows of each replica."""
    drivers, replicas, tasks = {}, {}, []
    for name in dict.fromkeys(name for route in routes for name in (route.prefill, route.decode)):
        ours, theirs = socket.socketpair()
        drivers[name] = driver(name, await StreamLink.over(theirs))
        role = "colocated" if name.startswith("c") else "prefill" if name.startswith("p") else "decode"
        links = {f"n/{name}": await StreamLink.over(ours)}
        replicas[name] = Replica(name, role, f"n/{name}", links, budget, max_batch, growth_tokens)
        if instance is not None:
            replicas[name].know(instance)
        tasks.append(asyncio.create_task(drivers[name].run()))
    coordinator = Coordinator(router(routes), replicas, **options)
    coordinator.start()
    try:
        yield coordinator, drivers
    finally:
        await coordinator.stop()
        for task in tasks:
            task.cancel()


def run(scenario):
    async def limited():
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())


async def tokens_of(request):
    return [output.token async for output in request]


async def settle(coordinator):
    """Wait until no replica holds anything."""
    while any(replica.held for replica in coordinator.replicas.values()):
        await asyncio.sleep(0.005)


def sampling(max_tokens=4):
    return Sampling(max_tokens=max_tokens)


PAIR = [Route("p0", "d0", 1.0)]


class Starter:
    """Starts a fake driver again when the test allows it, or fails to."""

    def __init__(self, works=True):
        self.works, self.starts, self.drivers = works, 0, []
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
        driver = FakeDriver(workers[0].removeprefix("n/"), await StreamLink.over(theirs))
        self.drivers.append((driver, asyncio.create_task(driver.run())))
        return {workers[0]: await StreamLink.over(ours)}


async def until(what):
    while not what():
        await asyncio.sleep(0.005)

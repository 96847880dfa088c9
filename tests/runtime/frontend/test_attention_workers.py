"""The front end and the attention workers of a replica: what is promised follows those that are there."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from scripted import PROMPT, run, sampling, serving, settle, tokens_of, until

import runtime.frontend.supervisor
from runtime.frontend.attention_workers import AttentionWorkers
from runtime.frontend.supervisor import Supervisor
from runtime.launcher.worker_link import StreamLink
from runtime.liveness import PERIODS
from runtime.protocol.from_workers import Pong
from runtime.protocol.to_workers import HeadDevice, HeadLane
from runtime.routing.refusals import TooLong, Unavailable
from runtime.routing.router import Route

SIZE, OWN, WORKER = 4, "n/c0", "n/a"
PING_S = 0.1
PROFILE = (1e-6, 1e-9, 0.0, 0.0, 0.0)
LANE = HeadLane(
    worker=OWN,
    layers=2,
    heads=2,
    query_heads=1,
    head_bytes=8.0,
    devices=tuple(
        HeadDevice(worker=name, blocks=blocks, profile=PROFILE) for name, blocks in ((OWN, 10), (WORKER, 9))
    ),
)
ALL, WITHOUT = (36, 36), (20, 20)
"""Tokens of all requests together and of the longest: with the attention worker, and without."""


class Starter:
    """A launcher whose attention worker is a task that answers pings; it starts while `may` is set."""

    def __init__(self):
        self.links, self.tasks, self.may = [], [], asyncio.Event()
        self.may.set()

    async def restart(self, workers, report):
        assert workers == [WORKER]
        await self.may.wait()
        ours, theirs = socket.socketpair()
        self.links.append(await StreamLink.over(theirs))
        self.tasks.append(asyncio.create_task(answer_pings(self.links[-1])))
        return {WORKER: await StreamLink.over(ours)}

    def kill(self):
        self.tasks[-1].cancel()
        self.links[-1].close()


async def answer_pings(link):
    while await link.receive():
        link.send(Pong(worker=WORKER))


@asynccontextmanager
async def headwise(restarts):
    """A replica with one attention worker, and what starts that again."""
    routes = [Route("c0", "c0", 1.0)]
    async with serving(routes, growth_tokens=0, ping_every_s=PING_S) as (coordinator, drivers):
        starter, replica = Starter(), coordinator.replicas["c0"]
        links = await starter.restart([WORKER], None)
        replica.attention_workers = AttentionWorkers((LANE,), SIZE, links)
        replica.change_attention_workers(lambda _: None)
        supervisor = Supervisor(coordinator, starter, restarts, lambda _: None)
        coordinator._on_attention_worker_lost = supervisor.lost_attention_worker
        coordinator._listeners.listen_to(replica, WORKER)
        try:
            yield coordinator, drivers["c0"], replica, starter
        finally:
            await supervisor.stop()
            starter.kill()


def promised(replica):
    return replica.kv_budget_tokens, replica.largest_request_tokens


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(runtime.frontend.supervisor, "FIRST_WAIT_S", 0.001)


def test_without_an_attention_worker_less_is_promised_until_it_is_back():
    async def scenario():
        async with headwise(restarts=1) as (coordinator, _, replica, starter):
            assert promised(replica) == ALL
            starter.may.clear()
            starter.kill()
            await until(lambda: replica.attention_workers.away)
            assert promised(replica) == (WITHOUT[0], ALL[1])  # the longest may wait for it
            starter.may.set()
            await until(lambda: not replica.attention_workers.away)
            assert promised(replica) == ALL and replica.attention_workers.restarts == {WORKER: 1}
            await asyncio.sleep(2 * PING_S * PERIODS)  # nobody takes the old one's silence for its own
            assert not replica.attention_workers.away
            assert not coordinator.lost and replica.restarts == 0
            starter.kill()  # the new one is watched too
            await until(lambda: replica.attention_workers.given_up)

    run(scenario)


def test_requests_that_fit_only_with_a_worker_that_stays_lost_fail_and_others_go_on():
    async def scenario():
        async with headwise(restarts=0) as (coordinator, driver, replica, starter):
            driver.gate.clear()
            large, small = (coordinator.submit(PROMPT, sampling(tokens)) for tokens in (30, 4))
            starter.kill()
            with pytest.raises(Unavailable, match=f"without attention worker {WORKER}"):
                await tokens_of(large)
            assert promised(replica) == WITHOUT
            with pytest.raises(TooLong):
                coordinator.submit(PROMPT, sampling(30))
            driver.gate.set()
            assert len(await tokens_of(small)) == 4
            await settle(coordinator)

    run(scenario)


def test_a_replica_that_is_lost_listens_to_its_attention_workers_again_when_it_is_back():
    async def scenario():
        async with headwise(restarts=0) as (coordinator, _, replica, starter):
            coordinator._on_lost = lambda _: True
            coordinator._lose(replica, "killed")
            starter.kill()
            await asyncio.sleep(0)
            assert promised(replica) == ALL
            ours, theirs = socket.socketpair()
            coordinator.revive("c0", {OWN: await StreamLink.over(ours)})
            await until(lambda: promised(replica) == WITHOUT)
            assert not coordinator.lost
            theirs.close()

    run(scenario)

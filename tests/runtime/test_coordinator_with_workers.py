"""The coordinator over real worker processes: what fails ends as an error, and all room comes back."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from checkpoints import LAYERS, greedy, write_llama
from engine_harness import Cluster

from runtime.coordinator import Coordinator
from runtime.launcher.link import Link
from runtime.messages import Connect, Ready, Sampling
from runtime.refusals import Unavailable
from runtime.replica import Replica
from runtime.router import Route, Router

PROMPT = [5, 9, 200, 31, 8, 77, 120]
SHAPES = {"p": [(1, 0, 2), (1, 2, LAYERS)], "d": [(2, 0, LAYERS)], "e": [(1, 0, LAYERS)]}
TO_D, TO_E = Route("p", "d", 1.0), Route("p", "e", 1.0)
BUDGET = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("joined") / "llama")


@pytest.fixture(scope="module")
def answer(folder):
    return greedy(folder, [PROMPT], 32)[0]


@asynccontextmanager
async def joined(folder, **options):
    """A coordinator over the workers of one prefill and two decode replicas, and the links to them."""
    cluster = Cluster(folder, {}, kv_budget_tokens=BUDGET)
    try:
        workers = cluster.spawn(SHAPES)
        cluster.connect()
        for worker in workers:
            assert isinstance(cluster.controls[worker].receive(), Ready)
        links = {worker: await Link.over(cluster.controls[worker].stream) for worker in workers}
        replicas = {}
        for name, stages in cluster.stages.items():
            own = [worker for stage in stages for worker in stage.workers]
            role = "prefill" if name == "p" else "decode"
            replicas[name] = Replica(name, role, own[0], {each: links[each] for each in own}, BUDGET, 32)
        coordinator = Coordinator(Router([TO_D, TO_E]), replicas, **options)
        coordinator.start()
        yield coordinator, cluster, links
        await coordinator.stop()
    finally:
        cluster.kill()


def run(scenario):
    async def limited():
        async with asyncio.timeout(90):
            await scenario()

    asyncio.run(limited())


def ask(coordinator, route, max_tokens=32):
    return coordinator.submit(PROMPT, Sampling(max_tokens=max_tokens, ignore_eos=True), route)


async def tokens_of(generation):
    return [output.token async for output in generation]


async def settle(coordinator):
    while any(replica.held for replica in coordinator.replicas.values()):
        await asyncio.sleep(0.01)
    assert not coordinator._requests


def tell_addresses(cluster, links, **moved):
    """Connect to all of p's workers, with other ports for some."""
    ports = cluster.ports | moved
    peers = {worker: ("127.0.0.1", port) for worker, port in ports.items()}
    for worker in ("p/0", "p/1"):
        links[worker].send(Connect(peers=peers, replicas=cluster.stages, store_port=0))


def test_a_kv_transfer_that_breaks_fails_its_request_alone_and_frees_both_sides(folder, answer):
    async def scenario():
        async with joined(folder) as (coordinator, cluster, links):
            assert await tokens_of(ask(coordinator, TO_D)) == answer
            tell_addresses(cluster, links, **{"d/1": 1})
            for _ in range(4):  # more in all than a replica has room for, unless it comes back
                broken, beside = ask(coordinator, TO_D, 120), ask(coordinator, TO_E)
                with pytest.raises(
                    Unavailable, match=r"replica p gave up .* sending the KV cache to d/1 failed"
                ):
                    await tokens_of(broken)
                assert await tokens_of(beside) == answer
                await settle(coordinator)
            tell_addresses(cluster, links)
            assert await tokens_of(ask(coordinator, TO_D)) == answer
            await settle(coordinator)
            assert coordinator.lost == {}

    run(scenario)


def test_a_decode_worker_killed_while_kv_is_on_its_way_is_an_error_and_others_serve(folder, answer):
    async def scenario():
        async with joined(folder) as (coordinator, cluster, _):
            doomed = [ask(coordinator, TO_D) for _ in range(8)]
            while not any(generation.phase == "prefilling" for generation in doomed):
                await asyncio.sleep(0)
            cluster.processes["d/1"].kill()
            beside = ask(coordinator, TO_E)
            for generation in doomed:
                with pytest.raises(Unavailable, match=r"replica d is lost|replica p gave up"):
                    await tokens_of(generation)
            assert await tokens_of(beside) == answer
            await settle(coordinator)
            assert list(coordinator.lost) == ["d"]

    run(scenario)


def test_a_frozen_decode_worker_is_found_and_others_serve(folder, answer):
    async def scenario():
        async with joined(folder, ping_every_s=0.5) as (coordinator, cluster, _):
            assert await tokens_of(ask(coordinator, TO_D)) == answer
            pid = cluster.processes["d/1"].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            frozen, beside = ask(coordinator, TO_D), ask(coordinator, TO_E)
            assert await tokens_of(beside) == answer
            with pytest.raises(Unavailable, match=r"replica d is lost \(worker d/1 does not answer\)"):
                await tokens_of(frozen)
            assert await tokens_of(ask(coordinator, None)) == answer
            await settle(coordinator)
            assert list(coordinator.lost) == ["d"]

    run(scenario)

"""A coordinator with real worker processes: one prefill replica and two decode replicas."""

import asyncio
from contextlib import asynccontextmanager

from checkpoints import LAYERS
from engine_harness import Cluster
from pinned import PinningCoordinator

from runtime.frontend.replica import Replica
from runtime.launcher.worker_link import StreamLink
from runtime.protocol.from_workers import Ready
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Connect
from runtime.routing.router import Route, Router

PROMPT = [5, 9, 200, 31, 8, 77, 120]
SHAPES = {"p": [(1, 0, 2), (1, 2, LAYERS)], "d": [(2, 0, LAYERS)], "e": [(1, 0, LAYERS)]}
TO_D, TO_E = Route("p", "d", 1.0), Route("p", "e", 1.0)
BUDGET = 400


@asynccontextmanager
async def joined(folder, settings=None, **options):
    """The coordinator (with options), the workers (with their own settings), and the links to them."""
    cluster = Cluster(folder, {}, kv_budget_tokens=BUDGET, **(settings or {}))
    try:
        workers = cluster.spawn(SHAPES)
        cluster.connect()
        for worker in workers:
            assert isinstance(cluster.controls[worker].receive(), Ready)
        links = {worker: await StreamLink.over(cluster.controls[worker].stream) for worker in workers}
        replicas = {}
        for name, stages in cluster.stages.items():
            own = [worker for stage in stages for worker in stage.workers]
            role = "prefill" if name == "p" else "decode"
            replicas[name] = Replica(name, role, own[0], {each: links[each] for each in own}, BUDGET, 32)
        coordinator = PinningCoordinator(Router([TO_D, TO_E]), replicas, **options)
        coordinator.start()
        yield coordinator, cluster, links
        await coordinator.stop()
    finally:
        cluster.kill()


def run(scenario, limit_s=180):
    async def limited():
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(limited())


def ask(coordinator, route, max_tokens=32):
    return coordinator.submit(PROMPT, Sampling(max_tokens=max_tokens, ignore_eos=True), route)


async def tokens_of(request):
    return [output.token async for output in request]


async def settle(coordinator):
    while any(replica.held for replica in coordinator.replicas.values()):
        await asyncio.sleep(0.01)
    assert not coordinator._in_flight.requests


def tell_addresses(cluster, links, **moved):
    """Tell p the addresses of all workers, with other ports for some of them."""
    ports = cluster.ports | moved
    peers = {worker: ("127.0.0.1", port) for worker, port in ports.items()}
    for worker in ("p/0", "p/1"):
        links[worker].send(Connect(peers=peers, replicas=cluster.stages, store_port=0))

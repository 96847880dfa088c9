"""Real workers of mixed replicas give the same tokens as transformers, in all directions at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LAYERS, VOCAB, greedy, write_llama
from engine_harness import Cluster, Shape
from stage_shapes import replica_cells

from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica
from runtime.frontend.request import Request
from runtime.launcher.worker_link import StreamLink
from runtime.protocol.from_workers import Ready
from runtime.protocol.message import Sampling
from runtime.routing.router import Route, Router

SHAPES: dict[str, Shape] = {
    "m-tp2": [(2, 0, LAYERS)],
    "m-pp2": [(1, 0, 2), (1, 2, LAYERS)],
    "p-tp1": [(1, 0, LAYERS)],
    "d-tp1": [(1, 0, LAYERS)],
}
PAIRS = [
    ("m-tp2", "m-pp2"),
    ("m-pp2", "m-tp2"),
    ("m-tp2", "d-tp1"),
    ("m-pp2", "d-tp1"),
    ("p-tp1", "m-tp2"),
    ("p-tp1", "m-pp2"),
    ("m-tp2", "m-tp2"),
    ("m-pp2", "m-pp2"),
]
LENGTHS = [1, 3, 9, 20, 33, 47, 60]
TOKENS, KV_HEADS, HEAD_DIM = 32, 4, 16
BUDGET, BLOCK = 320, 8


def prompts() -> list[list[int]]:
    """Some of these begin like others."""
    rng = random.Random(8)
    texts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    return texts + [texts[-1][:length] + [rng.randrange(3, VOCAB) for _ in range(4)] for length in (16, 50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("mixed") / "llama", head_dim=HEAD_DIM)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[list[int]]:
    return greedy(folder, prompts(), TOKENS)


def test_all_directions_at_the_same_time_give_the_reference_tokens(
    folder: Path, reference: list[list[int]]
) -> None:
    rule = Sampling(max_tokens=TOKENS, ignore_eos=True)
    settings = {"role": "mixed", "max_prefill_tokens": 40, "max_mixed_tokens": 24}
    with Cluster(folder, SHAPES, **settings) as cluster:
        for wave, (number, prompt), (source, target) in product("ab", enumerate(prompts()), PAIRS):
            if wave == "b" and number == 0:  # the caches have all prompts by now
                cluster.finish(f"a {source}>{target}#{len(LENGTHS)}")
            cluster.submit(f"{wave} {source}>{target}#{number}", prompt, rule, source, target)
        for wave, (number, prompt), (source, target) in product("ab", enumerate(prompts()), PAIRS):
            outcome = cluster.finish(f"{wave} {source}>{target}#{number}")
            assert outcome.tokens == reference[number], (source, target, number)
            assert outcome.indices == list(range(TOKENS)) and not outcome.failures
            if source == target:
                assert outcome.moved is None
                continue
            cells = replica_cells(cluster.stages[target], KV_HEADS)
            sent = len(prompt) - outcome.already_there
            assert outcome.moved is not None
            assert outcome.moved.bytes_received == cells * 2 * HEAD_DIM * 4 * sent
        for source, target in PAIRS:
            own = [each for name, each in cluster.outcomes.items() if f" {source}>{target}#" in name]
            assert any(each.cached if source == target else each.already_there for each in own)


def test_mixed_replicas_of_sixteen_pairs_of_shapes_give_the_reference_tokens(
    folder: Path, reference: list[list[int]]
) -> None:
    """Each of four shapes prefills for all of them, itself included, and decodes for all at the same time."""
    shapes: dict[str, Shape] = {
        "tp1": [(1, 0, LAYERS)],
        "tp2": [(2, 0, LAYERS)],
        "pp2 uneven": [(1, 0, 1), (1, 1, LAYERS)],
        "tp2 then tp1": [(2, 0, 3), (1, 3, LAYERS)],
    }
    pairs, chosen = list(product(shapes, repeat=2)), (1, 4, 8)
    rule = Sampling(max_tokens=TOKENS, ignore_eos=True)
    settings = {"role": "mixed", "max_prefill_tokens": 40, "max_mixed_tokens": 24}
    with Cluster(folder, shapes, **settings) as cluster:
        for number, (source, target) in product(chosen, pairs):
            cluster.submit(f"{source}>{target}#{number}", prompts()[number], rule, source, target)
        for number, (source, target) in product(chosen, pairs):
            outcome = cluster.finish(f"{source}>{target}#{number}")
            assert outcome.tokens == reference[number], (source, target, number)
            assert not outcome.failures and (outcome.moved is None) == (source == target)


@asynccontextmanager
async def coordinated(folder: Path, **settings: Any) -> AsyncIterator[tuple[Coordinator, Cluster]]:
    """A coordinator with the workers of all shapes and routes for all pairs."""
    cluster = Cluster(folder, {}, kv_budget_tokens=BUDGET, block_tokens=BLOCK, **settings)
    try:
        workers = cluster.spawn(SHAPES)
        cluster.connect()
        for worker in workers:
            assert isinstance(cluster.controls[worker].receive(), Ready)
        links = {worker: await StreamLink.over(cluster.controls[worker].stream) for worker in workers}
        replicas = {}
        for name, stages in cluster.stages.items():
            own = {worker: links[worker] for stage in stages for worker in stage.workers}
            role = {"m": "mixed", "p": "prefill", "d": "decode"}[name[0]]
            rounding = BLOCK - 1 if role == "mixed" else 0
            replicas[name] = Replica(
                name, role, next(iter(own)), own, BUDGET, 6, growth_tokens=2, rounding_tokens=rounding
            )
        coordinator = Coordinator(Router([Route(*pair, 1.0) for pair in PAIRS]), replicas)
        coordinator.start()
        yield coordinator, cluster
        await coordinator.stop()
    finally:
        cluster.kill()


async def tokens_of(request: Request) -> list[int]:
    return [output.token async for output in request]


async def settle(coordinator: Coordinator) -> None:
    while any(replica.held for replica in coordinator.replicas.values()):
        await asyncio.sleep(0.01)
    assert not coordinator._in_flight.requests


def run(scenario: Any, limit_s: float = 180) -> None:
    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(limited())


def test_full_replicas_that_send_to_each_other_give_the_reference_tokens(
    folder: Path, reference: list[list[int]]
) -> None:
    """More requests than fit at a time, which grow by more than was kept free, so that some are preempted."""

    async def scenario() -> None:
        cramped = {"max_batch": 6, "max_prefill_tokens": 24, "max_mixed_tokens": 8, "steps_in_flight": 2}
        async with coordinated(folder, kv_transport="tcp", **cramped) as (coordinator, _):
            rule = Sampling(max_tokens=TOKENS, ignore_eos=True)
            asked = [(k, coordinator.submit(p, rule)) for _ in range(8) for k, p in enumerate(prompts())]
            for number, request in asked:
                assert await tokens_of(request) == reference[number]
                assert request.record.resumes == 0
            await settle(coordinator)
            used = {(r.record.prefill_replica, r.record.decode_replica) for _, r in asked}
            assert used == set(PAIRS)
            mixed = [replica for name, replica in coordinator.replicas.items() if name.startswith("m")]
            assert sum(replica.preemptions for replica in mixed) > 0
            assert all(replica.free_blocks == BUDGET // BLOCK for replica in coordinator.replicas.values())

    run(scenario)


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
def test_a_killed_mixed_replica_loses_no_token(folder: Path, reference: list[list[int]], when: str) -> None:
    """One of its workers is killed while it prefills for others, decodes for others and serves alone."""

    async def scenario() -> None:
        async with coordinated(folder) as (coordinator, cluster):
            rule = Sampling(max_tokens=TOKENS, ignore_eos=True)
            asked = [(k, coordinator.submit(p, rule)) for _ in range(4) for k, p in enumerate(prompts())]
            ends = ("prefill_replica", "decode_replica")

            def busy() -> bool:
                begun = [r for _, r in asked if r.state.value == when]
                routes = {tuple(getattr(r.record, end) for end in ends) for r in begun}
                own, others = ("m-tp2", "m-tp2") in routes, routes - {("m-tp2", "m-tp2")}
                return own and all("m-tp2" in {route[k] for route in others} for k in (0, 1))

            while not busy():
                await asyncio.sleep(0)
            cluster.processes["m-tp2/1"].kill()
            for number, request in asked:
                assert await tokens_of(request) == reference[number]
            assert any(request.record.resumes for _, request in asked)
            await settle(coordinator)
            assert list(coordinator.lost) == ["m-tp2"]

    run(scenario)

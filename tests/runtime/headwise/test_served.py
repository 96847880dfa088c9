"""Replicas with attention workers, in processes of their own: tokens are those of transformers while heads
are elsewhere, while they move, and after an attention worker was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import greedy, write_llama, write_opt
from headwise import REPLICA, headwise_placement, with_blocks
from live_fleet import LiveFleet, live_fleet
from one_process import decoded

from hexgen2.checks import violations
from runtime.frontend.request import Request
from runtime.protocol.from_workers import HeadCounts

LONG, SHORT = [k * 7 % 251 for k in range(3, 153)], [9, 8, 7, 6, 5]
OUTPUT = 60


@dataclass
class Served:
    """A fleet of one replica with two attention workers, for several tests; its event loop runs while they
    ask."""

    runner: asyncio.Runner
    fleet: LiveFleet
    folder: Path

    @property
    def counts(self) -> HeadCounts:
        return self.fleet.coordinator.replicas[REPLICA].attention_workers.counts

    def expected(self, *prompts: list[int]) -> list[list[int]]:
        return greedy(self.folder, list(prompts), OUTPUT)

    def answers(self, *prompts: list[int]) -> list[list[int]]:
        async def run() -> list[list[int]]:
            requests = [self.fleet.submit(prompt, OUTPUT) for prompt in prompts]
            found = await asyncio.gather(*(tokens_of(request) for request in requests))
            await self.fleet.settle()
            return found

        return self.runner.run(run())


async def tokens_of(request: Request) -> list[int]:
    return [output.token async for output in request]


def serve(
    folder: Path,
    stages: list[tuple[str, int]],
    *blocks: int,
    theta: float = 0.5,
    kv: str | None = None,
) -> Iterator[Served]:
    placement = headwise_placement(folder, stages, kv=kv)
    assert violations(placement) == []
    with asyncio.Runner() as runner:
        context = live_fleet(placement, folder, restarts=5, change=with_blocks(*blocks, theta=theta))
        fleet = runner.run(context.__aenter__())
        try:
            yield Served(runner, fleet, folder)
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def small_helper(llama):
    """One GPU with weights; the first attention worker has room for heads of short requests only."""
    yield from serve(llama, [("box/0", 5)], 60, 8, 60)


@pytest.fixture(scope="module")
def pipeline(llama):
    """Two stages, the first of two GPUs; heads move as soon as that makes attention any faster."""
    yield from serve(llama, [("box/0 box/1", 3), ("box/2", 2)], 60, 60, 60, theta=0.0)


def test_tokens_are_the_same_while_heads_are_elsewhere_and_move(small_helper):
    prompts = [LONG, SHORT, LONG[40:], SHORT[::-1]]
    before = small_helper.counts
    assert small_helper.answers(*prompts) == small_helper.expected(*prompts)
    counts = small_helper.counts
    assert before is None and min(counts.dispatched.values()) > 0
    assert counts.redispatches > 0 and counts.hauled_bytes > 0
    assert counts.recomputed == 0


def test_cancelling_frees_heads_on_all_devices(small_helper):
    async def run() -> None:
        fleet = small_helper.fleet
        requests = [fleet.submit(prompt, OUTPUT) for prompt in (LONG, SHORT)]
        await fleet.until(lambda: all(request.record.output_tokens > 2 for request in requests))
        for request in requests:
            fleet.coordinator.cancel(request)
        await fleet.settle()

    small_helper.runner.run(run())
    assert set(small_helper.counts.heads.values()) == {0}
    assert small_helper.counts.free_blocks == {"box/1": 8, "box/2": 60}
    assert small_helper.fleet.coordinator.replicas[REPLICA].free_blocks == (60 + 8 + 60) // 4


def test_a_killed_attention_worker_costs_its_requests_a_prefill_and_nothing_else(small_helper):
    fleet, recomputed = small_helper.fleet, small_helper.counts.recomputed
    replica = fleet.coordinator.replicas[REPLICA]
    stage, workers = fleet.pids["box/0"], replica.attention_workers

    async def run() -> list[list[int]]:
        requests = [fleet.submit(prompt, OUTPUT) for prompt in (LONG, SHORT)]
        reading = [asyncio.create_task(tokens_of(request)) for request in requests]
        await fleet.until(lambda: all(request.record.output_tokens > 2 for request in requests))
        fleet.kill("box/1")
        found = await asyncio.gather(*reading)
        assert [request.record.resumes for request in requests] == [0, 0]
        await fleet.settle()
        await fleet.until(lambda: not (workers.away or workers.counts.away))
        return found

    assert small_helper.runner.run(run()) == small_helper.expected(LONG, SHORT)
    assert small_helper.counts.recomputed == recomputed + 1  # the long one has no heads there
    assert (fleet.pids["box/0"], replica.restarts) == (stage, 0)
    there = small_helper.counts.dispatched["box/1"]
    assert small_helper.answers(LONG, SHORT) == small_helper.expected(LONG, SHORT)
    assert small_helper.counts.dispatched["box/1"] > there


def test_a_killed_worker_of_the_stage_costs_the_replica_and_the_attention_workers_stay(small_helper):
    fleet = small_helper.fleet
    helpers = {name: fleet.pids[name] for name in ("box/1", "box/2")}
    replica = fleet.coordinator.replicas[REPLICA]

    async def run() -> list[int]:
        request = fleet.submit(SHORT, OUTPUT)
        await fleet.until(lambda: request.record.output_tokens > 2)
        fleet.kill("box/0")
        return await tokens_of(request)

    assert [small_helper.runner.run(run())] == small_helper.expected(SHORT)
    assert {name: fleet.pids[name] for name in helpers} == helpers and replica.restarts == 1


def test_stages_and_tensor_parallel_ranks_have_heads_elsewhere(pipeline):
    prompts = [LONG, SHORT, LONG[40:]]
    assert pipeline.answers(*prompts) == pipeline.expected(*prompts)
    assert min(pipeline.counts.dispatched.values()) > 0 and pipeline.counts.redispatches > 0


def test_with_several_ranks_a_killed_attention_worker_is_not_noticed_by_clients(pipeline):
    fleet = pipeline.fleet

    async def run() -> list[list[int]]:
        requests = [fleet.submit(prompt, OUTPUT) for prompt in (LONG, SHORT)]
        reading = [asyncio.create_task(tokens_of(request)) for request in requests]
        await fleet.until(lambda: all(request.record.output_tokens > 2 for request in requests))
        fleet.kill("box/4")
        return await asyncio.gather(*reading)

    assert pipeline.runner.run(run()) == pipeline.expected(LONG, SHORT)
    assert pipeline.counts.recomputed > 0
    assert fleet.coordinator.replicas[REPLICA].restarts == 0


def test_opt_has_a_kv_head_for_every_query_head(tmp_path):
    served = serve(write_opt(tmp_path), [("box/0", 5)], 60, 60, 60)
    opt = next(served)
    try:
        assert opt.answers(LONG, SHORT) == opt.expected(LONG, SHORT)
        assert min(opt.counts.dispatched.values()) > 0
    finally:
        served.close()


def test_heads_in_8_bits_move_as_they_are(llama):
    """Tokens are those of a whole model with the same KV cache; heads that moved were not rounded again."""
    served = serve(llama, [("box/0", 5)], 60, 8, 60, kv="int8")
    packed = next(served)
    try:
        assert packed.answers(LONG, SHORT) == decoded(llama, [LONG, SHORT], OUTPUT, "int8")
        counts = packed.counts
        assert min(counts.dispatched.values()) > 0 and counts.hauled_bytes > 0 and counts.recomputed == 0
    finally:
        served.close()

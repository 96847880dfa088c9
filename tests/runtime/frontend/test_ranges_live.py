"""Overlapping ranges of layers on real workers: tokens, sampling, cancellation, little memory, losses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest
from checkpoints import VOCAB, WRITERS, greedy, write_llama, write_opt
from live_fleet import tokens_of
from range_fleet import range_fleet, ranges_placement

from cost_model.errors import HexGen2Error
from hexgen2.checks import violations
from runtime.routing.refusals import Unavailable

TOKENS = 32
OVERLAPPING = {"a": (0, 3), "b": (0, 2), "c": (2, 5), "d": (1, 4), "e": (3, 5)}
FLOWS = {("a", "c"): 0.5, ("a", "d"): 0.5, ("b", "c"): 0.5, ("b", "d"): 0.5, ("d", "e"): 1.0}
APART = {"a": (0, 2), "b": (0, 2), "c": (2, 5), "d": (2, 4), "e": (4, 5)}
APART_FLOWS = {("a", "c"): 0.5, ("a", "d"): 0.5, ("b", "c"): 0.5, ("b", "d"): 0.5, ("d", "e"): 1.0}
EVERY_SAMPLING = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 4,
    "presence_penalty": 0.6,
    "repetition_penalty": 1.2,
}


def run(scenario):
    async def limited():
        async with asyncio.timeout(600):
            await scenario()

    asyncio.run(limited())


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 50))] for _ in range(8)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


async def answers(fleet, prompts, tokens=TOKENS, **sampling):
    """All at the same time: their tokens, and the paths that they took."""
    requests = [fleet.submit(prompt, tokens, **sampling) for prompt in prompts]
    return [await tokens_of(request) for request in requests], [request.record.path for request in requests]


def test_requests_enter_ranges_where_they_are_and_survive_lost_workers(llama, prompts):
    """Partial inference, with one replica on two GPUs: the tokens are those of transformers, whatever the
    path; a killed worker's requests go on, it returns, and without a path requests fail."""
    expected = greedy(llama, prompts, TOKENS)
    placement = ranges_placement(llama, OVERLAPPING, FLOWS, True, gpus={"d": 2})
    assert violations(placement) == []

    async def scenario():
        async with range_fleet(placement, llama, restarts=1) as fleet:
            found, paths = await answers(fleet, prompts)
            assert found == expected
            assert set(paths) == {("a", "c"), ("a", "d", "e"), ("b", "c"), ("b", "d", "e")}
            await fleet.settle()
            await sampled_alike(fleet, prompts[0])
            await cancelled(fleet, prompts)

            requests = [fleet.submit(prompt, TOKENS) for prompt in prompts]
            await fleet.until(lambda: all(len(each.tokens) > len(each.prompt) + 5 for each in requests))
            fleet.kill("d")
            assert [await tokens_of(request) for request in requests] == expected
            resumed = [request for request in requests if request.record.resumes]
            assert resumed and not any("d" in request.record.path for request in resumed)
            await fleet.settle()
            left = fleet.coordinator.plan.placement(fleet.coordinator.states.absent or ["d"])
            assert [replica.id for replica in left.replicas] == ["a", "b", "c", "e"]
            assert violations(left) == []

            await fleet.until(lambda: not fleet.coordinator.lost)
            found, paths = await answers(fleet, prompts)
            assert found == expected and ("a", "d", "e") in paths
            await nothing_left(fleet, prompts)

    run(scenario)


async def sampled_alike(fleet, prompt):
    """With every rule of sampling, the same tokens and log probabilities on all paths."""
    outputs, paths = [], Counter()
    for _ in range(8):
        request = fleet.submit(prompt, 16, logprobs=2, **EVERY_SAMPLING)
        outputs.append([(output.token, output.logprobs) for output in [each async for each in request]])
        paths[request.record.path] += 1
    assert len(paths) == 4 and all(len(each) == 16 for each in outputs)
    for tokens in zip(*outputs, strict=True):
        assert len({token for token, _ in tokens}) == 1
        for _, detail in tokens:
            assert detail.chosen == pytest.approx(tokens[0][1].chosen, abs=1e-3) and len(detail.top) == 2


async def cancelled(fleet, prompts):
    """Requests cancelled anywhere on their way, and those that end at a stop token, leave nothing behind."""
    free = {name: each.free_blocks for name, each in fleet.coordinator.replicas.items()}
    requests = [fleet.submit(prompt, 300 - len(prompt)) for prompt in prompts]
    for number, request in enumerate(requests):
        await fleet.until(lambda request=request, number=number: len(request.tokens) >= number)
        fleet.coordinator.cancel(request)
    stop = (await tokens_of(fleet.submit(prompts[1], 12)))[7]
    ending = fleet.submit(prompts[1], 12, ignore_eos=False, stop_token_ids=(stop,))
    tokens = await tokens_of(ending)
    assert tokens[-1] == stop and tokens.index(stop) == len(tokens) - 1 and ending.record.outcome == "stop"
    await fleet.settle()
    assert {name: each.free_blocks for name, each in fleet.coordinator.replicas.items()} == free


async def nothing_left(fleet, prompts):
    """Both replicas with the last layer die, and are not started again: every request fails, none hangs."""
    fleet.supervisor._limit = 0
    requests = [fleet.submit(prompt, 300 - len(prompt)) for prompt in prompts]
    await fleet.until(lambda: all(len(each.tokens) > len(each.prompt) for each in requests))
    for name in ("c", "e"):
        fleet.kill(name)
    for request in requests:
        with pytest.raises(HexGen2Error):  # or Broken, for one that was on board both times
            await tokens_of(request)
    await fleet.until(lambda: {"c", "e"} <= fleet.coordinator.lost.keys())
    with pytest.raises(Unavailable, match="no replica is left to serve"):
        fleet.submit(prompts[0], 4)
    await fleet.settle()


def test_requests_share_little_memory_without_waiting_for_each_other(tmp_path, prompts):
    """An OPT in ranges that follow each other, with room for two requests or three: some give way and are
    computed again. The scheduler learns from times that workers report."""
    folder = write_opt(tmp_path / "opt")
    expected = greedy(folder, prompts, TOKENS + 20)
    placement = ranges_placement(folder, APART, APART_FLOWS, False, osl=4)
    assert violations(placement) == []

    async def scenario():
        async with range_fleet(placement, folder, kv_tokens=128, scheduler="swarm") as fleet:
            assert fleet.coordinator.context_tokens == 128
            found, paths = await answers(fleet, prompts, TOKENS + 20)
            assert found == expected
            assert len(set(paths)) > 1
            await fleet.settle()
            replicas = fleet.coordinator.replicas.values()
            assert sum(each.preemptions for each in replicas) > 0
            assert all(each.free_blocks == 8 for each in replicas if each.free_blocks is not None)
            policy = fleet.coordinator._admission.router._policy
            assert policy._took_s and all(seconds > 0 for seconds in policy._took_s.values())

    run(scenario)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_layers_with_a_window_keep_the_end_of_each_request(tmp_path, family):
    """All of a model's layers, or four of five: replicas with room for two of these requests, if such layers
    kept all tokens, run more of them at once, and no worker lacks blocks."""
    folder, rng = WRITERS[family](tmp_path / "model"), random.Random(2)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(150, 220))] for _ in range(10)]
    placement, most = ranges_placement(folder, OVERLAPPING, FLOWS, True), 0

    def short_of_memory(told):
        windowed = msgspec.structs.replace(told.windowed, kv_budget_tokens=480)
        small = {"max_prefill_tokens": 64, "max_mixed_tokens": 32, "kv_budget_tokens": 4800}
        return msgspec.structs.replace(told, windowed=windowed, **small)

    async def scenario():
        nonlocal most
        async with range_fleet(placement, folder, change=short_of_memory) as fleet:
            requests = [fleet.submit(prompt, 16) for prompt in prompts]
            asked = [asyncio.create_task(tokens_of(request)) for request in requests]
            replicas = fleet.coordinator.replicas.values()
            while not all(task.done() for task in asked):
                most = max(most, *(len(each.held) for each in replicas))
                await asyncio.sleep(0.002)
            assert [task.result() for task in asked] == greedy(folder, prompts, 16)
            assert not any(request.record.resumes for request in requests)
            assert {request.record.path for request in requests} > {("a", "c")}
            await fleet.settle()
            assert sum(each.preemptions for each in replicas) == 0
            assert all(each.free_blocks == 300 for each in replicas if each.free_blocks is not None)

    run(scenario)
    assert most >= 4

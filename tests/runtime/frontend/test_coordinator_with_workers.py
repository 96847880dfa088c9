"""The coordinator with real worker processes: failures end as errors, and all memory is freed."""

import asyncio
import os
import signal

import pytest
from checkpoints import greedy, write_llama
from joined import PROMPT, TO_D, TO_E, ask, joined, run, settle, tell_addresses, tokens_of

from runtime.protocol.message import Sampling
from runtime.routing.refusals import Unavailable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("joined") / "llama")


@pytest.fixture(scope="module")
def answer(folder):
    return greedy(folder, [PROMPT], 32)[0]


def test_a_kv_transfer_that_breaks_fails_its_request_alone_and_frees_both_sides(folder, answer):
    async def scenario():
        async with joined(folder) as (coordinator, cluster, links):
            assert await tokens_of(ask(coordinator, TO_D)) == answer
            tell_addresses(cluster, links, **{"d/1": 1})
            for _ in range(4):  # more in total than a replica holds, unless memory is freed
                unknown = [*PROMPT[1:], 3]  # d has cached none of it, so it needs the transfer
                sampling = Sampling(max_tokens=120, ignore_eos=True)
                broken, beside = coordinator.submit(unknown, sampling, TO_D), ask(coordinator, TO_E)
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


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7}])
@pytest.mark.parametrize("when", ["prefilling", "decoding"])
def test_requests_of_a_killed_replica_get_the_tokens_that_they_would_have_had(folder, when, options):
    async def scenario():
        sampling = Sampling(max_tokens=60, ignore_eos=True, **options)
        async with joined(folder) as (coordinator, cluster, _):
            expected = await tokens_of(coordinator.submit(PROMPT, sampling, TO_E))
            requests = [coordinator.submit(PROMPT, sampling) for _ in range(6)]
            on_d = [request for request in requests if request.route == TO_D]
            while not any(request.state.value == when and len(request.tokens) != 10 for request in on_d):
                await asyncio.sleep(0)
            cluster.processes["d/1"].kill()
            for request in requests:
                assert await tokens_of(request) == expected
            assert on_d and any(request.record.resumes for request in on_d)
            await settle(coordinator)
            assert list(coordinator.lost) == ["d"]

    run(scenario)


def test_a_decode_worker_killed_while_kv_is_on_its_way_is_an_error_and_others_serve(folder, answer):
    async def scenario():
        async with joined(folder) as (coordinator, cluster, _):
            doomed = [ask(coordinator, TO_D) for _ in range(8)]
            while not any(request.state.value == "prefilling" for request in doomed):
                await asyncio.sleep(0)
            cluster.processes["d/1"].kill()
            beside = ask(coordinator, TO_E)
            for request in doomed:
                with pytest.raises(Unavailable, match=r"replica d is lost|replica p gave up"):
                    await tokens_of(request)
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
            free = [ask(coordinator, None) for _ in range(4)]
            assert await tokens_of(beside) == answer
            with pytest.raises(Unavailable, match=r"replica d is lost \(worker d/1 does not answer\)"):
                await tokens_of(frozen)
            for request in free:
                assert await tokens_of(request) == answer
            assert sorted(request.record.resumes for request in free) == [0, 0, 1, 1]
            await settle(coordinator)
            assert list(coordinator.lost) == ["d"]

    run(scenario)

"""Links to vLLM with scripted servers in its place: streams, failures and cancellations, without any
model."""

from __future__ import annotations

import asyncio

import pytest
from scripted import run, settle, tokens_of
from scripted_vllm import PROMPT, following, serving
from served import make_placement
from vllm_fleet import write_fleet_model

from cost_model.errors import InputError
from hexgen2.export.vllm_command import check_vllm
from hexgen2.placement import Placement
from runtime.protocol.message import Sampling
from runtime.routing.router import Route
from runtime.vllm.requests import EngineError, completion, outputs_of

PAIR = [Route("p0", "d0", 1.0)]
BOTH_WAYS = [Route(*ends, 1.0) for ends in (("m0", "m1"), ("m1", "m0"), ("m0", "m0"), ("p0", "m1"))]
TWO = [Route("p0", "d0", 1.0), Route("p1", "d1", 1.0)]


def test_tokens_come_from_the_decode_side_with_the_cache_of_the_prefill_side():
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(8)]
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
                assert each.record.kv_bytes == 40 and each.record.kv_arrived
            await settle(coordinator)
            assert all(body["max_tokens"] == 1 for body in servers["p0"].bodies)
            assert not servers["p0"].kv

    run(scenario)


def test_mixed_replicas_send_to_each_other_and_serve_alone():
    async def scenario():
        async with serving(BOTH_WAYS) as (coordinator, servers, ends):
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(12)]
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
                sent = each.record.prefill_replica != each.record.decode_replica
                assert each.record.kv_arrived == sent
            assert {each.route for each in several} == set(BOTH_WAYS)
            await settle(coordinator)
            assert not any(server.kv for server in servers.values())
            servers["m0"].script = ["hang"]
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(12)]
            await servers["m0"].hung.wait()
            ends["m0"].set()
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
            assert "m0" in coordinator.lost

    run(scenario)


def test_a_single_token_needs_no_second_replica():
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            assert await tokens_of(coordinator.submit(PROMPT, Sampling(max_tokens=1))) == following(PROMPT, 1)
            await settle(coordinator)
            assert not servers["d0"].bodies

    run(scenario)


@pytest.mark.parametrize("what", ["500", "cut", "error"])
@pytest.mark.parametrize("where", ["p0", "d0"])
def test_what_vllm_fails_of_is_done_again_with_no_token_lost_or_repeated(what, where):
    async def scenario():
        async with serving(TWO) as (coordinator, servers, _):
            servers[where].script = [what]
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(4)]
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
            await settle(coordinator)

    run(scenario)


@pytest.mark.parametrize("where", ["p0", "d0"])
def test_a_cancelled_request_is_aborted_and_holds_nothing(where):
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            servers[where].script = ["hang"]
            request = coordinator.submit(PROMPT, Sampling(max_tokens=6))
            await servers[where].hung.wait()
            coordinator.cancel(request)
            await settle(coordinator)
            while len(servers[where].bodies) and servers[where].open > 0:  # the connection closes
                await asyncio.sleep(0.005)

    run(scenario)


def test_a_replica_whose_process_ends_takes_its_requests_elsewhere():
    async def scenario():
        async with serving(TWO) as (coordinator, servers, ends):
            servers["d0"].script = ["hang"]
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(4)]
            await servers["d0"].hung.wait()
            ends["d0"].set()
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
            assert "d0" in coordinator.lost

    run(scenario)


def test_the_rules_of_a_request_reach_vllm_from_where_it_goes_on():
    sampling = Sampling(
        temperature=0.5,
        top_k=7,
        logit_bias=((3, 1.5),),
        seed=2**64 - 1,
        min_tokens=5,
        max_tokens=20,
        stop_token_ids=(2, 9),
        logprobs=2,
    )
    body = completion("m", [1, 2, 3], sampling, 8, {"opaque": 1})
    assert body["max_tokens"] == 12 and body["min_tokens"] == 0 and body["logit_bias"] == {"3": 1.5}
    assert body["stop_token_ids"] == [2, 9] and body["ignore_eos"] and 0 <= body["seed"] < 2**63
    assert completion("m", [1], Sampling(stop_token_ids=(2,), ignore_eos=True), 0)["stop_token_ids"] == []


def test_logprobs_and_ends_of_a_stream():
    logprobs = {
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"token_id:4": -0.5, "token_id:9": -0.7}, {"token_id:1": -0.1, "token_id:8": -1.5}],
    }
    chunk = {"choices": [{"token_ids": [4, 8], "logprobs": logprobs, "finish_reason": "stop"}]}
    first, second = outputs_of(chunk, "r", 3, 1)
    assert (first.index, first.finish_reason, second.index, second.finish_reason) == (3, "", 4, "stop")
    assert first.logprobs.chosen == -0.5 and first.logprobs.top == ((4, -0.5),)
    assert second.logprobs.top == ((1, -0.1),)
    assert outputs_of({"choices": []}, "r", 0, -1) == []
    for bad in ({"error": {"message": "x"}}, {"choices": [{"token_ids": [], "finish_reason": "error"}]}):
        with pytest.raises(EngineError):
            outputs_of(bad, "r", 0, -1)


def test_on_cpus_a_replica_may_be_tensor_parallel_and_no_pipeline(tmp_path):
    write_fleet_model(tmp_path)
    placement = make_placement(tmp_path)

    def alone(name: str) -> Placement:
        replica = placement.replica(name).model_copy(update={"role": "colocated"})
        return placement.model_copy(update={"replicas": [replica], "routes": []})

    check_vllm(alone("decode-0"), "test")
    with pytest.raises(InputError, match=r"prefill-1.*pipelines on CPUs"):
        check_vllm(alone("prefill-1"), "test")

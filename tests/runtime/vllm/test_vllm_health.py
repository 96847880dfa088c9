"""How a vLLM that hangs, dies or is full is handled, with scripted servers in its place."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest
from scripted import run, settle, tokens_of
from scripted_vllm import PROMPT, FakeVllm, begin, following, serving
from served import alive

from runtime.api.metrics import Metrics
from runtime.protocol.message import Sampling
from runtime.routing.refusals import Unavailable
from runtime.routing.router import Route
from runtime.vllm import health
from runtime.vllm.guard import kill_rest
from runtime.vllm.link import VllmFleet

PAIR = [Route("p0", "d0", 1.0)]
TWO = [Route("p0", "d0", 1.0), Route("p1", "d1", 1.0)]
LIMIT_S = 60.0
FIGURES = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {use}
vllm:cache_config_info{{block_size="128",engine="0",num_gpu_blocks="200",num_cpu_blocks="None"}} 1.0
vllm:num_preemptions_total{{engine="0",model_name="m"}} 7.0
"""


def test_the_load_is_that_of_all_data_parallel_ranks():
    one, other = (FIGURES.format(waiting=2.0, use=use) for use in (0.2, 0.6))
    load, _ = health.load_of(one + other.replace('engine="0"', 'engine="1"'))
    assert (load.running, load.waiting, load.preemptions) == (6, 4, 14)
    assert load.kv_use == pytest.approx(0.4) and load.free_blocks == 240


@pytest.mark.parametrize("silence_s", [0.5, 30.0])
def test_a_server_that_answers_nobody_is_lost_once_patience_ends(monkeypatch, silence_s):
    monkeypatch.setattr(health, "SILENCE_S", silence_s)

    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            servers["d0"].script = ["hang"]
            request = coordinator.submit(PROMPT, Sampling(max_tokens=6))
            await servers["d0"].hung.wait()
            servers["d0"].server.close()
            if silence_s > 10:
                await asyncio.sleep(2)
                assert not coordinator.lost
                return
            with pytest.raises(Unavailable):
                await tokens_of(request)

    run(scenario)


def test_the_clocks_start_with_the_first_question(monkeypatch):
    """Not while vLLM starts, which takes longer than it may be silent or quiet afterwards."""
    now_s = [100.0]
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def scenario():
        server = FakeVllm(set())
        server.takes_s = LIMIT_S
        async with httpx.AsyncClient(base_url=await server.start(), trust_env=False) as http:
            watched = health.Health(http, "m", lambda: False, lambda load: None, lambda problem: None)
            now_s[0] += 200
            watched.ask()
            for later_s, good in [(0, True), (health.SILENCE_S - 1, True), (2, False)]:
                now_s[0] += later_s
                watched.ask()
                assert watched.good is good
            assert server.bodies == []
            watched.close()
        server.server.close()

    run(scenario)


def test_a_server_that_is_slow_to_answer_each_time_is_not_lost(monkeypatch):
    monkeypatch.setattr(health, "HEALTH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(health, "SILENCE_S", 1.5)

    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            servers["d0"].takes_s = 0.3
            while servers["d0"].answered < 20:
                assert not coordinator.lost
                await asyncio.sleep(0.01)

    run(scenario)


def test_a_vllm_that_dies_costs_a_request_one_attempt():
    """However long its process takes to end after its API is gone."""

    async def scenario():
        async with serving(PAIR, revives=True) as (coordinator, servers, ends):
            servers["p0"].server.close()
            request = coordinator.submit(PROMPT, Sampling(max_tokens=6))
            await asyncio.sleep(0.5)
            assert "p0" not in coordinator.lost and request.record.resumes == 0
            ends["p0"].set()
            while "p0" not in coordinator.lost:
                await asyncio.sleep(0.005)
            anew = await begin("p0", _fleet(coordinator), servers["d0"].kv, servers, ends)
            coordinator.revive("p0", anew)
            assert await tokens_of(request) == following(PROMPT, 6)
            assert request.record.resumes == 1
            await settle(coordinator)

    run(scenario)


def _fleet(coordinator) -> VllmFleet:
    return coordinator.replicas["d0"].links["n/d0"]._fleet


@pytest.mark.parametrize("busy", [False, True])
def test_a_vllm_whose_health_says_that_its_engine_died_is_lost(monkeypatch, busy):
    monkeypatch.setattr(health, "END_S", 0.5)

    async def scenario():
        async with serving(TWO) as (coordinator, servers, _):
            servers["d0"].health, servers["d0"].script = "503 X", ["error"] * 4
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(4 * busy)]
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
                assert each.record.resumes <= 1
            while "d0" not in coordinator.lost:
                await asyncio.sleep(0.005)
            assert "failed" in coordinator.lost["d0"]

    run(scenario)


def test_an_engine_that_hangs_while_it_is_idle_is_lost(monkeypatch):
    monkeypatch.setattr(health, "STALL_S", 1.0)
    monkeypatch.setattr(health, "PROBE_IDLE_AFTER_S", 0.3)

    async def scenario():
        async with serving(TWO) as (coordinator, servers, _):
            servers["d0"].stuck = True
            while not coordinator.lost:
                await asyncio.sleep(0.01)
            assert list(coordinator.lost) == ["d0"]

    run(scenario)


@pytest.mark.parametrize("stuck", [False, True])
def test_an_engine_that_computes_nothing_is_lost_and_one_that_waits_for_others_is_not(monkeypatch, stuck):
    """/health says 200 all the time; only a working engine answers another prompt."""
    monkeypatch.setattr(health, "STALL_S", 1.0)
    monkeypatch.setattr(health, "PROBE_AFTER_S", 0.3)

    async def scenario():
        async with serving(TWO) as (coordinator, servers, _):
            servers["d0"].script, servers["d0"].stuck = ["hang"], stuck
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(2)]
            await servers["d0"].hung.wait()
            if not stuck:
                await asyncio.sleep(4)
                assert not coordinator.lost
                return
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
            assert "does not answer" in coordinator.lost["d0"]

    run(scenario)


def test_a_vllm_that_is_full_by_its_own_account_gets_no_more_and_shows():
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            metrics, replica = Metrics(), coordinator.replicas["d0"]
            metrics.watch(coordinator)
            servers["d0"].script = ["hang"]
            coordinator.submit(PROMPT, Sampling(max_tokens=6))
            await servers["d0"].hung.wait()
            for waiting, use, full in [(2, 0.95, True), (0, 0.95, False), (2, 0.5, False), (1, 1.0, True)]:
                servers["d0"].figures = FIGURES.format(waiting=waiting, use=use)
                while replica.load is None or (replica.load.waiting, replica.load.kv_use) != (waiting, use):
                    await asyncio.sleep(0.01)
                assert replica.has_room(1, prefill_only=False) is not full
            shown = metrics.text().decode()
            for line in (
                'hexgen2_engine_kv_use_ratio{replica="d0"} 1.0',
                'hexgen2_engine_requests_running{replica="d0"} 3.0',
                'hexgen2_engine_requests_waiting{replica="d0"} 1.0',
                'hexgen2_kv_blocks_free{replica="d0"} 0.0',
                'hexgen2_preemptions_total{replica="d0"} 7.0',
            ):
                assert line in shown
            waits = coordinator.submit([*PROMPT, 1], Sampling(max_tokens=6))
            assert coordinator.waiting == 1
            servers["d0"].figures = FIGURES.format(waiting=0, use=0.1)
            assert await tokens_of(waits) == following([*PROMPT, 1], 6)

    run(scenario)


def test_nothing_of_a_command_outlives_its_guard():
    """Killed with `kill -9`, the guard leaves a process family, and one member has its own group."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '600'], process_group=0); time.sleep(600)"
    command = [sys.executable, "-m", "runtime.vllm.guard", sys.executable, "-c", code]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    family: list[psutil.Process] = []
    deadline = time.monotonic() + LIMIT_S
    while len(family) < 2:
        assert time.monotonic() < deadline
        family = psutil.Process(started.pid).children(recursive=True)
    started.kill()
    started.wait()
    assert len(alive(family)) == 2
    kill_rest(started.pid)
    assert not alive(family)

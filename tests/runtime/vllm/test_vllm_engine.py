"""`--engine vllm` with real vLLM on CPUs, where vLLM and NIXL are installed: one fleet, first used, then
broken in several ways."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from reference import Reference
from served import alive
from vllm_fleet import LIMIT_S, START_S, LaunchedVllm, pair, write_fleet_model

from runtime.vllm.launcher import vllm_command

TOKENS = 160


def has_nixl(command: str) -> bool:
    """Whether the Python beside vLLM's command has NIXL."""
    python = str(Path(command).with_name("python"))
    return subprocess.run([python, "-c", "import nixl"], capture_output=True).returncode == 0


VLLM = vllm_command()
pytestmark = [
    pytest.mark.skipif(VLLM is None, reason="vLLM is not installed"),
    pytest.mark.skipif(VLLM is not None and not has_nixl(VLLM), reason="vLLM has no NIXL"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("model")
    write_fleet_model(folder)
    return Reference(folder)


@pytest.fixture(scope="module")
def fleet(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedVllm]:
    """A prefill and a decode replica; nothing of them is left after Ctrl-C."""
    folder = Path(reference.model.name_or_path)
    started = LaunchedVllm(pair(folder), folder, tmp_path_factory.mktemp("fleet"))
    try:
        started.until_serving(START_S)
        yield started
        family = started.descendants()
        assert started.interrupt() == 0
        assert not alive(family)
    finally:
        started.close()


def stream(fleet: LaunchedVllm, prompt: list[int], seen: list[str]) -> list[str]:
    """The tokens of one streamed completion, as text, one by one; `seen` grows as they arrive."""
    body = {
        "model": "tiny-llama",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "stream": True,
    }
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    seen += (choice.get("logprobs") or {"tokens": []})["tokens"]
    return seen


def prompts(first: int, count: int) -> list[list[int]]:
    return [[first + k, *range(30, 60 + 5 * k)] for k in range(count)]


def texts(reference: Reference, prompt: list[int]) -> list[str]:
    return [reference.tokenizer.decode([token]) for token in reference.greedy(prompt, TOKENS)]


class Streams:
    """Several streams at once, each with its own prompt."""

    def __init__(self, fleet: LaunchedVllm, several: list[list[int]]) -> None:
        self.prompts, self.seen = several, [[] for _ in several]
        self._pool = ThreadPoolExecutor(len(several))
        self._futures: list[Future[list[str]]] = [
            self._pool.submit(stream, fleet, prompt, seen)
            for prompt, seen in zip(several, self.seen, strict=True)
        ]

    def until_under_way(self, count: int) -> None:
        """Wait until some streams have tokens and have not ended."""
        deadline = time.monotonic() + LIMIT_S
        while sum(0 < len(seen) < TOKENS for seen in self.seen) < count:
            assert time.monotonic() < deadline and not all(each.done() for each in self._futures)
            time.sleep(0.002)

    def check(self, reference: Reference) -> None:
        """Wait for the ends; every token must be the one that transformers chooses."""
        for prompt, future in zip(self.prompts, self._futures, strict=True):
            assert future.result(START_S) == texts(reference, prompt)
        self._pool.shutdown()


def test_vllm_prefills_on_one_and_decodes_on_the_other(fleet, reference):
    before = fleet.figure("decode-0", "prompt_tokens_by_source_total", source="external_kv_transfer")
    several = Streams(fleet, prompts(20, 4))
    several.check(reference)
    after = fleet.figure("decode-0", "prompt_tokens_by_source_total", source="external_kv_transfer")
    assert after - before >= sum(len(prompt) for prompt in several.prompts) / 2
    fleet.until_idle()
    fleet.tell_of_restarts()


def test_a_client_that_leaves_frees_the_blocks_on_both_sides(fleet):
    body = {"model": "tiny-llama", "max_tokens": 180, "ignore_eos": True, "stream": True}

    def cancelled() -> float:
        return fleet.figures_of(fleet.front_metrics(), "hexgen2_requests_total", outcome="cancelled")

    for tokens_read, attempt in itertools.product((0, 5), range(8)):
        if cancelled() > (tokens_read > 0):
            continue  # an earlier attempt left in time: on a busy machine, an answer may end before
        prompt = [90 + tokens_read, 3 + attempt, *range(30, 70)]
        with (
            httpx.Client(base_url=fleet.url, timeout=LIMIT_S) as http,
            http.stream("POST", "/v1/completions", json={**body, "prompt": prompt}) as response,
        ):
            lines = response.iter_lines()
            for _ in range(tokens_read):
                next(lines)
        fleet.until_idle()
    assert cancelled() == 2
    fleet.tell_of_restarts()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "left"), [("prefill-0", "decode-0"), ("decode-0", "prefill-0")])
def test_a_killed_side_comes_back_and_takes_no_token_along(fleet, reference, lost, left):
    survivor, killed, restarts = fleet.processes(left), fleet.processes(lost), fleet.restarts(lost)
    several = Streams(fleet, prompts(100 if lost == "prefill-0" else 200, 12))
    several.until_under_way(2)
    os.kill(fleet.server(lost).pid, signal.SIGKILL)
    several.check(reference)
    fleet.until_restarted(lost, restarts + 1)
    assert not alive(killed)
    assert sorted(alive(survivor), key=_pid) == sorted(survivor, key=_pid)
    fleet.until_idle()


@pytest.mark.slow
def test_a_dead_engine_and_a_frozen_one_are_replaced(fleet, reference):
    """Prefill: the engine's own process is killed. Decode: all of its processes are stopped."""
    before = [*fleet.processes("decode-0"), *fleet.processes("prefill-0")]
    restarts = {replica: fleet.restarts(replica) for replica in fleet.replicas}
    several = Streams(fleet, prompts(140, 12))
    several.until_under_way(2)
    for each in fleet.processes("decode-0")[1:]:
        each.suspend()
    fleet.engine("prefill-0").kill()
    several.check(reference)
    for replica, times in restarts.items():
        fleet.until_restarted(replica, times + 1)
    assert not alive(before)
    fleet.until_idle()


def _pid(process: psutil.Process) -> int:
    return process.pid

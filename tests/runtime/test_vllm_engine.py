"""`--engine vllm` with real vLLM on CPUs, where vLLM and NIXL are installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from reference import Reference
from served import Launched, alive, until_idle
from vllm_fleet import pair, write_fleet_model

from runtime.engine.vllm.launcher import vllm_command

START_S = 900.0
LIMIT_S = 300.0
CPU_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,sm,self",
}


def has_nixl(command: str) -> bool:
    """Whether the Python beside vLLM's command has NIXL."""
    python = str(Path(command).with_name("python"))
    return subprocess.run([python, "-c", "import nixl"], capture_output=True).returncode == 0


VLLM = vllm_command()
pytestmark = [
    pytest.mark.skipif(VLLM is None, reason="vLLM is not installed"),
    pytest.mark.skipif(VLLM is not None and not has_nixl(VLLM), reason="vLLM has no NIXL"),
]


def descendants(server: Launched) -> list[psutil.Process]:
    """Every process that it has started, vLLM's in sessions of their own, too."""
    return psutil.Process(server.process.pid).children(recursive=True)


def counters(server: Launched) -> dict[str, float]:
    """Prompt tokens by where vLLM's decode side has them from, by its own count."""
    for process in descendants(server):
        line = " ".join(process.cmdline())
        if "kv_consumer" in line and (port := re.search(r"--port (\d+)", line)):
            text = httpx.get(f"http://127.0.0.1:{port[1]}/metrics", trust_env=False, timeout=LIMIT_S).text
            found = re.findall(r'prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)', text)
            return {source: float(count) for source, count in found}
    raise AssertionError("no decode replica runs")


def test_vllm_prefills_on_one_and_decodes_on_the_other(tmp_path):
    """The tokens that transformers chooses; the decode side has most of the prompts from the prefill side."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_fleet_model(folder)
    reference = Reference(folder)
    how = ["--engine", "vllm", "--dtype", "float32"]
    server = Launched(pair(folder), folder, tmp_path, *how, **CPU_SETTINGS)
    try:
        server.until_serving(START_S)
        before = counters(server).get("external_kv_transfer", 0)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as http:
            prompts = [[20 + k, *range(30, 60 + 5 * k)] for k in range(4)]
            for prompt in prompts:
                body = {
                    "model": "tiny-llama",
                    "prompt": prompt,
                    "max_tokens": 16,
                    "temperature": 0,
                    "logprobs": 1,
                }
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                expected = [reference.tokenizer.decode([token]) for token in reference.greedy(prompt, 16)]
                assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected
            until_idle(http)
        moved = counters(server)["external_kv_transfer"] - before
        assert moved >= sum(len(prompt) for prompt in prompts) / 2
        family = descendants(server)
        assert server.interrupt() == 0
        assert not alive(family)
    finally:
        for each in descendants(server) if server.process.poll() is None else []:
            each.kill()
        server.close()

"""Short runs of chaos.py: workers and the front end die, links are cut, and every token stays right."""

import os
import re
import subprocess
import sys

import pytest

PROBES = 16
REPLICAS = {"emulated": 4, "mixed": 5, "torch": 4, "unlike": 4}
"""Replicas of each fleet."""
RUNS = {
    "emulated": ("--fleet", "emulated"),
    "mixed": ("--fleet", "mixed"),
    "mixed of experts": ("--fleet", "mixed", "--kind", "qwen3_moe"),
    "mixed of quantised experts": ("--fleet", "mixed", "--kind", "gpt_oss", "--weights", "mxfp4"),
    "torch with latent attention": ("--fleet", "torch", "--kind", "deepseek_v3"),
    "unlike of quantised experts": (
        *("--fleet", "unlike", "--kind", "qwen3_moe"),
        *("--weights", "compressed-tensors int4", "--kv", "int8"),
    ),
}
QUICK = ("--fleet", "unlike", "--kind", "qwen3_moe", "--weights", "AWQ", "--kv", "fp8", "--seed", "3")
DEADLINE_S = 900
GOOD = {
    "wrong: none: good",
    "all replicas serve at the end: True: good",
    "processes that outlived their front end for 5 s: 0: good",
    "processes left: none: good",
    "port in use: False: good",
    "shared memory left: none: good",
}
on_linux = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="connections are cut from outside on Linux only"
)


def chaos(requests: int, *options: str) -> str:
    """What a run prints about its faults; all else was as it should be."""
    command = [sys.executable, "-m", "benchmarks.serving.chaos", "--requests", str(requests), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    said, shown = run.stdout.splitlines(), run.stdout + run.stderr
    assert run.returncode == 0, shown
    assert {*GOOD, f"whole answers: {requests + PROBES}: good"} <= set(said), shown
    assert "BAD" not in run.stdout
    fleet = options[options.index("--fleet") + 1]
    assert sum(line.startswith("free blocks of ") for line in said) == REPLICAS[fleet], shown
    return next(line for line in said if "; faults: " in line)


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("name", RUNS)
def test_no_token_is_lost_while_workers_links_and_the_front_end_die(name):
    often = ("--seconds", "16", "--every", "2", "--front-end-deaths", "1", "--seed", "1")
    faults = chaos(60, *RUNS[name], *often)
    assert re.search(r"\d kill", faults) and re.search(r"\d cut", faults) and "1 front end" in faults


@on_linux
def test_no_token_of_quantised_experts_is_lost_while_workers_die():
    """Weights in 4 bits, KV caches in 8, and replicas of unlike shapes on both sides."""
    often = ("--seconds", "4", "--every", "1", "--front-end-deaths", "0")
    assert re.search(r"\d kill", chaos(16, *QUICK, *often))

"""A short run of chaos.py: workers and the front end die, links are cut, and every token stays right."""

import os
import re
import subprocess
import sys

import pytest

REQUESTS, PROBES = 60, 16
OPTIONS = ("--requests", str(REQUESTS), "--seconds", "16")
FLEETS = {"emulated": 4, "mixed": 5, "mixed of experts": 5, "torch with latent attention": 4}
"""Replicas of each."""
KINDS = {"mixed of experts": "qwen3_moe", "torch with latent attention": "deepseek_v3"}
FAULTS = ("--every", "2", "--front-end-deaths", "1", "--seed", "1")
DEADLINE_S = 900
GOOD = (
    "wrong: none: good",
    f"whole answers: {REQUESTS + PROBES}: good",
    "all replicas serve at the end: True: good",
    "processes that outlived their front end for 5 s: 0: good",
    "processes left: none: good",
    "port in use: False: good",
    "shared memory left: none: good",
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="connections are cut from outside on Linux only")
@pytest.mark.parametrize("name", FLEETS)
def test_no_token_is_lost_while_workers_links_and_the_front_end_die(name):
    fleet = ("--fleet", name.split()[0], "--kind", KINDS.get(name, "llama"))
    command = [sys.executable, "-m", "benchmarks.serving.chaos", *fleet, *OPTIONS, *FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    said = run.stdout.splitlines()
    shown = run.stdout + run.stderr
    assert run.returncode == 0, shown
    assert set(GOOD) <= set(said), shown
    assert "BAD" not in run.stdout
    assert sum(line.startswith("free blocks of ") for line in said) == FLEETS[name], shown
    faults = next(line for line in said if "; faults: " in line)
    assert re.search(r"\d kill", faults) and re.search(r"\d cut", faults) and "1 front end" in faults, shown

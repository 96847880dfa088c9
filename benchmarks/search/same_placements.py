"""Run the same commands in two checkouts: compare their output byte by byte, and their times.

    python -m benchmarks.search.same_placements --before CHECKOUT [--sample N] [--seed N] [--timeout 25]

The commands: `hexgen2 search` on every shipped cluster, with three models, three workloads and every
strategy; re-plans after a loss; simulations of the placements found; rentals; and searches for goodput, for
latency, for the least cost and with a certificate. --sample draws that many of them (with --seed; without it,
the seed is new in every run). Each command runs once in each checkout, in turns, in a process that is forked
after the imports; times in the output are ignored. Prints every command whose exit code or bytes differ, and
compares the seconds by kind of command. Commands that take the other checkout longer than --timeout seconds
are skipped.

The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.search.answers import LOST

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = Path(__file__).with_name("answers.py")
CLUSTERS = (
    *("hexgen2-case-study", "hexgen2-homogeneous", "huawei-v100-a800", "hetis-12", "local-cpu"),
    *(f"hexgen2-setting-{number}" for number in range(1, 6)),
    *("helix-single-24", "helix-geo-24", "helix-mixed-42", "hexgen2-offers"),
)
MODELS = ("llama-2-70b", "opt-30b", "llama-3-8b")
WORKLOADS = ("HPLD", "LPHD", "online")
STRATEGIES = (
    *("hexgen2", "hexgen2-paper", "random-swap", "genetic", "exact"),
    *("vllm", "splitwise", "distserve", "hexgen"),
)
TARGETS = ("--objective", "goodput", "--ttft", "900", "--tpot", "90")
LATENCY = ("--objective", "latency", "--request-rate", "4")
Command = list[str]


def search(cluster: str, model: str, workload: str, strategy: str, *more: str) -> Command:
    """`hexgen2 search` with seed 0."""
    load = ["--cluster", cluster, "--model", model, "--workload", workload, "--strategy", strategy]
    return ["search", *load, "--seed", "0", "--json", *more]


def chains() -> list[list[Command]]:
    """Everything to compare: chains of commands, where a later command may read what the first one wrote."""
    simulate = ["simulate", "placement.json", "--json", "--num-requests", "400"]
    found = []
    clusters = ("hetis-12", "hexgen2-setting-1", "hexgen2-case-study", "hexgen2-setting-5")
    loads = (("llama-2-13b", "HPHD"), ("opt-30b", "LPHD"))
    for cluster, load in itertools.product(clusters, loads):
        written = search(cluster, *load, "hexgen2", "-o", "placement.json")
        replan = ["search", "--from", "placement.json", "--lost", LOST, "--json"]
        open_loop = [
            [*simulate, "--request-rate", "8"],
            [*simulate, "--workload", "online", "--request-rate", "3"],
        ]
        found.append([written, replan, *open_loop, [*simulate, "--offline"]])
    for strategy in ("vllm", "hexgen", "distserve"):
        written = search("hexgen2-setting-1", "llama-2-13b", "online", strategy, "-o", "placement.json")
        found.append([written, [*simulate, "--request-rate", "8"], [*simulate, "--offline"]])
    offers = "hexgen2-offers"
    alone = [
        search(offers, "llama-2-13b", "HPLD", "hexgen2", "--budget", "6"),
        search(offers, "llama-2-70b", "LPHD", "hexgen2", "--budget", "14"),
        search(offers, "llama-3-8b", "online", "hexgen2", "--objective", "cost", "--request-rate", "4"),
        search(offers, "opt-30b", "HPLD", "hexgen2", "--frontier", "--budget", "12"),
        search("hetis-12", "llama-2-13b", "HPHD", "hexgen2", *TARGETS),
        search("hexgen2-setting-1", "llama-2-70b", "online", "hexgen2", *TARGETS),
        search("hexgen2-setting-4", "opt-30b", "HPLD", "hexgen2", "--certify"),
        search(
            "hexgen2-case-study",
            "llama-3-8b",
            "online",
            "hexgen2",
            "--objective",
            "latency",
            "--request-rate",
            "4",
        ),
        search("hexgen2-setting-5", "llama-2-13b", "HPLD", "hexgen2", "--cost-model", "table1"),
    ]
    return (
        found
        + [[each] for each in alone]
        + [[search(*each)] for each in itertools.product(CLUSTERS, MODELS, WORKLOADS, STRATEGIES)]
    )


class Side:
    """A process that answers chains of commands with the code of one checkout."""

    def __init__(self, checkout: Path, timeout_s: int) -> None:
        path = {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(ANSWERS), "--serve", str(timeout_s)],
            env={**os.environ, **path},
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, chain: list[Command]) -> list[dict[str, Any]] | None:
        """One answer per command (see answers.py); None if the chain took too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(chain) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def kind_of(command: Command) -> str:
    """The kind of a command, by which its times are grouped."""
    if command[0] != "search" or "--from" in command:
        return "re-plan" if "--from" in command else command[0]
    return f"search {command[command.index('--strategy') + 1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--timeout", type=int, default=25, help="time limit of each command in s")
    options = parser.parse_args()
    work = chains()
    if options.sample is not None:
        seed = secrets.randbits(16) if options.seed is None else options.seed
        work = random.Random(seed).sample(work, options.sample)
        print(f"{options.sample} chains of --seed {seed}")
    before, now = Side(options.before.resolve(), options.timeout), Side(ROOT, options.timeout)
    seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    compared = differ = slow = 0
    for chain in work:
        expected = before.ask(chain)
        if expected is None:
            slow += 1
            continue
        found = now.ask(chain) or [{"code": "took too long"}] * len(chain)
        for command, was, is_now in zip(chain, expected, found, strict=True):
            compared += 1
            if any(was.get(key) != is_now.get(key) for key in ("code", "printed", "written")):
                differ += 1
                print(f"DIFFERS {' '.join(command)}\n  {was}\n  {is_now}", flush=True)
            else:
                seconds[kind_of(command)].append((was["seconds"], is_now["seconds"]))
    for side in (before, now):
        side.close()
    print(f"{'':24}{'commands':>9}{'before s':>10}{'now s':>10}{'ratio':>8}{'worst':>8}")
    for kind, pairs in sorted(seconds.items()):
        was_s, now_s = (sum(times) for times in zip(*pairs, strict=True))
        ratios = [now / was for was, now in pairs]
        row = f"{was_s:10.2f}{now_s:10.2f}{statistics.median(ratios):8.2f}{max(ratios):8.2f}"
        print(f"{kind:24}{len(pairs):9}{row}")
    print(f"{compared} commands: {differ} differ; {slow} chains took longer than {options.timeout} s each")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())

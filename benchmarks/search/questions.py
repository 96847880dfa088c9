"""`hexgen2 search` with questions drawn at random: clusters of every family, models, goals and options.

    python -m benchmarks.search.questions [--count N] [--seed S] [--largest GPUS] [--limits 2,8,30]

Each question is a whole process. It is well answered by a placement that passes all checks, or by one line
that says why there is none (exit code 3), or what does not go together (2). Prints every question with its
exit code and how many seconds it took beyond its time limit, start-up included; what is wrong is marked, and
makes this script end with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

import hexgen2
from benchmarks.search.ordinary import COMMAND, FAMILIES, drawn
from hexgen2.checks import violations

SIZES = (4, 8, 12, 16, 24, 33, 50, 64, 90, 128, 192, 320)
MODELS = (
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "opt-30b", "llama-3-8b", "llama-3-70b"),
    *("qwen3-32b", "mixtral-8x7b"),
)
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD", "online")
STRATEGIES = (
    *("hexgen", "vllm", "distserve", "splitwise", "genetic", "helix", "petals", "swarm"),
    *("separate-pipelines", "hetis", "huawei", "hexgen2-paper"),
)
COST_MODELS = ("table1", "calibrated", "sglang", "trtllm")
ALLOWED_S = 0.5
"""Seconds beyond the limit that count as late, or a tenth of it if that is more."""


def question(rng: random.Random, cluster: Path, limits: list[float]) -> tuple[list[str], float]:
    """Options of a search on this cluster, and its time limit in seconds."""
    limit_s = rng.choice(limits)
    words = ["--cluster", str(cluster), "--model", rng.choice(MODELS), "--seed", str(rng.randrange(100))]
    lengths = ["--isl", str(rng.randint(1, 6000)), "--osl", str(rng.randint(1, 1500))]
    words += rng.choice((["--workload", rng.choice(WORKLOADS)], lengths))
    words += ["--time-limit", f"{limit_s:g}"]
    rate, ttft, tpot = (str(rng.choice(each)) for each in ((0.5, 3, 30), (300, 1000, 5000), (30, 80, 200)))
    words += rng.choices(
        (
            [],
            ["--objective", "goodput", "--request-rate", rate, "--ttft", ttft, "--tpot", tpot],
            ["--objective", "latency", "--request-rate", rate],
            ["--objective", "cost", "--request-rate", rate],
            ["--budget", str(rng.choice((10, 30, 60)))],
        ),
        (8, 5, 3, 2, 2),
    )[0]
    for chance, more in (
        (0.4, ["--phases", rng.choice(("flexible", "disaggregated", "colocated"))]),
        (0.15, ["--strategy", rng.choice(STRATEGIES)]),
        (0.1, ["--cost-model", rng.choice(COST_MODELS)]),
        (0.1, ["--engine", "vllm"]),
        (0.1, ["--certify"]),
        (0.1, ["--robust"]),
    ):
        if rng.random() < chance:
            words += more
    return words, limit_s


def fault_of(done: subprocess.CompletedProcess[str], output: Path) -> str:
    """What is wrong with an answer; nothing if it is well."""
    lines = done.stderr.strip().splitlines()
    if done.returncode == 0:
        found = violations(hexgen2.load_placement(output))
        return f"invalid: {found[0]}" if found else ""
    if done.returncode not in (2, 3):
        return lines[-1] if lines else "ended without a word"
    if len(lines) != 1:
        return f"{len(lines)} lines instead of one"
    return "blames the user for its own placement" if "the placement of" in lines[0] else ""


def main() -> int:
    """Ask all questions; 1 if one was badly answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--largest", type=int, default=320)
    parser.add_argument("--limits", default="2,8,30")
    given = parser.parse_args()
    rng, limits = random.Random(given.seed), [float(each) for each in given.limits.split(",")]
    print(f"seed {given.seed}")
    wrong, latest_s = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        cluster, output = Path(folder) / "cluster.yaml", Path(folder) / "placement.json"
        for _ in range(given.count):
            family = rng.choice(tuple(FAMILIES))
            size = rng.choice([size for size in SIZES if size <= given.largest])
            spec = drawn(family, size, rng.randrange(10**6))
            cluster.write_text(yaml.safe_dump(spec))
            words, limit_s = question(rng, cluster, limits)
            began = time.perf_counter()
            done = subprocess.run(
                [COMMAND, "search", *words, "--quiet", "-o", str(output)], capture_output=True, text=True
            )
            late_s = max(0.0, time.perf_counter() - began - limit_s)
            fault = fault_of(done, output)
            late = late_s > max(ALLOWED_S, 0.1 * limit_s)
            wrong, latest_s = wrong + bool(fault), max(latest_s, late_s)
            mark = "WRONG" if fault else "late" if late else ""
            print(done.returncode, f"{late_s:5.1f}", f"{mark:5}", spec["name"], *words[2:], fault, flush=True)
    print(f"{given.count} questions, {wrong} badly answered, latest {latest_s:.1f} s after its limit")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Check that a command with a given seed answers the same on every kind of machine that this one can imitate.

    python -m benchmarks.search.same_answer [--clusters 6] [--seed N] [--disturb 2]
        [--strategies NAME ...]

Covers shipped clusters and random ones (drawn with --seed; without it, the seed is new in every run). Prints
one row per command: a digest of the output bytes under each machine's libraries (OpenBLAS kernels, threads,
hash seeds, no vector instructions or fused multiply-add), then of the answer in six digits with the last bits
of every cost changed and other bases of eigenspaces. Rows whose digests differ are marked; the exit code is
how many there are.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.search.machines import answers, machines

STRATEGIES = ("hexgen2", "hexgen2-paper", "random-swap", "genetic", "hexgen", "vllm")
SHIPPED = ("hexgen2-setting-1", "hexgen2-setting-3", "hexgen2-setting-5")
CARDS = ("H100", "A100-80GB", "A100-40GB", "L40", "A6000", "L4")
MODELS = ("llama-2-13b", "llama-3-8b", "opt-30b", "llama-2-70b")


def random_cluster(draw: random.Random, folder: Path, number: int) -> str:
    """Write a cluster file with 3 to 8 nodes of few kinds, so that many are alike."""
    kinds = [(draw.choice(CARDS), draw.choice((1, 2, 4, 8))) for _ in range(draw.randint(1, 3))]
    nodes = []
    for node in range(draw.randint(3, 8)):
        card, count = draw.choice(kinds)
        interconnect = draw.choice(("nvlink", "pcie4"))
        nodes.append({"name": f"n{node}", "accelerators": f"{card}:{count}", "interconnect": interconnect})
    network = {"default": {"bandwidth_gbit_s": draw.choice((1, 10, 100)), "latency_us": 50}}
    path = folder / f"random-{number}.yaml"
    path.write_text(yaml.safe_dump({"name": path.stem, "nodes": nodes, "network": network}))
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=6)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--disturb", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    options = parser.parse_args()
    seed = secrets.randbits(16) if options.seed is None else options.seed
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        loads = [(cluster, "llama-2-70b", "HPLD") for cluster in SHIPPED]
        for number in range(options.clusters):
            cluster = random_cluster(draw, Path(folder), number)
            loads.append((cluster, draw.choice(MODELS), draw.choice(("HPLD", "LPHD", "online"))))
        rows = [(*load, strategy) for load in loads for strategy in options.strategies]
        keys = ("--cluster", "--model", "--workload", "--strategy")
        commands = [
            [
                "search",
                *(word for pair in zip(keys, row, strict=True) for word in pair),
                "--seed",
                "0",
                "--json",
            ]
            for row in rows
        ]
        found = {name: answers(commands, environment) for name, environment in machines().items()}
        for number in range(1, options.disturb + 1):
            found[f"disturbed {number}"] = answers(commands, {}, disturb=number)
    print(f"random clusters drawn with --seed {seed}")
    exact, rough = list(machines()), [name for name in found if name.startswith("disturbed")]
    print(f"{'':58}{'  '.join(f'{name:>11}' for name in (*exact, 'six digits', *rough))}")
    differ = 0
    for k, (cluster, model, workload, strategy) in enumerate(rows):
        bytes_of = [found[name][k]["printed"] for name in exact]
        digits = [found[name][k].get("roughly", bytes_of[0]) for name in (exact[0], *rough)]
        same = len(set(bytes_of)) == 1 == len(set(digits))
        differ += not same
        what = f"{Path(cluster).stem} {model} {workload} {strategy}"
        shown = "  ".join(f"{digest[:4]:>11}" for digest in (*bytes_of, *digits))
        print(f"{what:58}{shown}{'' if same else '  DIFFERS'}")
    print(f"{len(rows)} commands on {len(exact)} machines and {len(rough)} disturbed: {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())

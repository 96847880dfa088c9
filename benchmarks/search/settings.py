"""Time `hexgen2 search` as a user runs it on the paper's settings: whole processes, start-up included.

    python -m benchmarks.search.settings [--runs 3] [--certify] [--limits 1,2] [--rivals 3] [--settings 1,5]
           [--csv FILE]

Covers every setting of HexGen-2, both of its models and its four offline workloads. Prints requests/s, the
median seconds of a process, the gap to the bound with and without KV transfers, and whether all runs gave the
same bytes. --certify adds the same figures for `hexgen2 search --certify`, and --limits the share of those
requests/s that is found with `--time-limit` so many seconds, and what the process took. --rivals N adds the
best placement that any disaggregated strategy finds, including hexgen2 --certify with N other seeds, and the
answer's share of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.search.csv_file import write_csv

SETTINGS = ("hexgen2-homogeneous", *(f"hexgen2-setting-{k}" for k in range(1, 6)))
MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")
SEEDLESS = ("hexgen2-paper", "distserve", "splitwise")
SEEDED = ("genetic", "random-swap")
COMMAND = str(Path(sys.executable).with_name("hexgen2"))

Cell = tuple[str, str, str]


def search(cell: Cell, *options: str) -> tuple[dict, float]:
    """The placement (empty if there is none) and the seconds of the process."""
    setting, model, workload = cell
    arguments = ["search", "--cluster", setting, "--model", model, "--workload", workload, "--json", *options]
    started = time.perf_counter()
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr)
    return (json.loads(done.stdout) if done.returncode == 0 else {}), seconds


def measure(cell: Cell, runs: int, *options: str) -> dict:
    """Figures of the placement, and the median seconds of `runs` processes."""
    seconds, outputs = [], set()
    placement: dict = {}
    for _ in range(runs):
        placement, took = search(cell, *options)
        placement["search"].pop("seconds")
        seconds.append(took)
        outputs.add(json.dumps(placement))
    req_s, bound = placement["throughput"]["req_s"], placement["bound"]
    free = bound["kv_free_req_s"] or bound["req_s"]
    return {
        "req_s": round(req_s, 4),
        "gap": round(bound["gap"], 4),
        "kv_free_gap": round(1 - req_s / free, 4),
        "method": bound["method"],
        "seconds": round(statistics.median(seconds), 2),
        "same_bytes": len(outputs) == 1,
    }


def best_of_rivals(cell: Cell, seeds: int) -> tuple[float, str]:
    """The best requests/s of any strategy, and which strategy found it."""
    asked: list[tuple[str, ...]] = [("hexgen2", str(seed), "--certify") for seed in range(1, seeds + 1)]
    asked += [(name, "0") for name in SEEDLESS]
    asked += [(name, str(seed)) for name in SEEDED for seed in range(seeds)]
    found = []
    for strategy, seed, *options in asked:
        placement, _ = search(cell, "--strategy", strategy, "--seed", seed, *options)
        if placement:
            found.append((placement["throughput"]["req_s"], f"{strategy} seed {seed}"))
    return max(found)


def main() -> None:
    """Measure every setting and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--certify", action="store_true")
    parser.add_argument("--limits", default="", help="seconds, as in 1,2")
    parser.add_argument("--rivals", type=int, default=0)
    parser.add_argument("--settings", help="parts of their names, such as homogeneous,1")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    chosen = arguments.settings.split(",") if arguments.settings else [""]
    settings = [name for name in SETTINGS if any(name.endswith(end) for end in chosen)]
    rows: list[dict] = []
    for cell in itertools.product(settings, MODELS, WORKLOADS):
        row = dict(zip(("setting", "model", "workload"), cell, strict=True)) | measure(cell, arguments.runs)
        if arguments.certify:
            certified = measure(cell, 1, "--certify")
            row |= {f"certified_{key}": certified[key] for key in ("req_s", "gap", "method", "seconds")}
        for limit in filter(None, arguments.limits.split(",")):
            limited, took = search(cell, "--time-limit", limit)
            share = limited["throughput"]["req_s"] / row["req_s"] if limited else 0.0
            row |= {f"share_in_{limit}_s": round(share, 4), f"took_of_{limit}_s": round(took, 2)}
        if arguments.rivals:
            rival, whose = best_of_rivals(cell, arguments.rivals)
            best = max(rival, row["req_s"], row.get("certified_req_s", 0.0))
            row |= {"share_of_best": round(row["req_s"] / best, 4), "best": round(best, 4), "rival": whose}
        if not rows:
            print(*row, sep="\t")
        rows.append(row)
        print(*row.values(), sep="\t", flush=True)
    for key in rows[0]:
        values = [row[key] for row in rows]
        if key in ("seconds", "certified_seconds") or key.startswith("took_of"):
            print(f"{key}: median {statistics.median(values)}, worst {max(values)}")
        elif key.startswith("share_in"):
            print(f"{key}: mean {statistics.mean(values):.3f}, worst {min(values)}")
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()

"""Time re-planning (`hexgen2 search --from`) after losses and workload changes, and show what it trades.

    python -m benchmarks.search.replan [--runs 3] [--csv FILE]

Covers the paper's setting 1 (20 GPUs) and Helix's single cluster (24 GPUs), with both models. Prints one row
per change: requests/s before, after without re-planning, after re-planning, and of the best plan that ignores
the cost of moves; for the re-plan and for that plan, GB of weights to load and requests missed; and the
median seconds of the search and of a whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.search.csv_file import write_csv

CHANGES = {
    "hexgen2-setting-1": [
        [],
        ["--lost", "l40-2/1"],
        ["--lost", "a100-1/0"],
        ["--lost", "h100-1"],
        ["--lost", "l40-1"],
        ["--workload", "LPHD"],
    ],
    "helix-single-24": [
        [],
        ["--lost", "l4-03"],
        ["--lost", "a100-01"],
        ["--lost", "t4-05,t4-06"],
        ["--workload", "LPHD"],
    ],
}
MODELS = ("llama-2-70b", "opt-30b")
COMMAND = str(Path(sys.executable).with_name("hexgen2"))


def run(*arguments: str) -> tuple[dict, float]:
    """The placement that a process prints, and the seconds it took."""
    started = time.perf_counter()
    done = subprocess.run(
        [COMMAND, "search", "--json", *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout), time.perf_counter() - started


def measure(path: str, change: list[str], runs: int) -> dict:
    """One row, without its cluster and model columns."""
    done = [run("--from", path, *change) for _ in range(runs)]
    placement = done[0][0]
    migration = placement["migration"]
    chosen, free = migration["chosen"], migration["free"]
    return {
        "change": " ".join(change) or "nothing",
        "before_req_s": round(migration["before_req_s"], 3),
        "unchanged_req_s": round(migration["unchanged_req_s"], 3),
        "after_req_s": round(chosen["req_s"], 3),
        "free_req_s": round(free["req_s"], 3),
        "load_gb": round(chosen["load_bytes"] / 1e9, 1),
        "free_load_gb": round(free["load_bytes"] / 1e9, 1),
        "missed": round(chosen["missed_requests"]),
        "free_missed": round(free["missed_requests"]),
        "kept": sum(move["action"] == "keep" for move in placement["moves"]),
        "replicas": len(placement["replicas"]),
        "search_s": round(statistics.median(p["search"]["seconds"] for p, _ in done), 2),
        "process_s": round(statistics.median(seconds for _, seconds in done), 2),
    }


def main() -> None:
    """Measure every cluster, model and change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "placement.json")
        for cluster, changes in CHANGES.items():
            for model in MODELS:
                run("--cluster", cluster, "--model", model, "--workload", "HPHD", "-o", path)
                for change in changes:
                    row = {"cluster": cluster, "model": model} | measure(path, change, arguments.runs)
                    if not rows:
                        print(*row, sep="\t")
                    rows.append(row)
                    print(*row.values(), sep="\t", flush=True)
    for key in ("search_s", "process_s"):
        times = [row[key] for row in rows]
        print(f"{key}: median {statistics.median(times):.2f}, worst {max(times)}")
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()

"""Time `hexgen2 search` as a user meets it: whole processes, start-up included, on the paper's settings.

    python benchmarks/search_settings.py [--runs 3] [--csv FILE]

Every setting of HexGen-2, both of its models, its four offline workloads. Prints requests/s, the gap to
the bound, evaluations, and the median wall time of a process; and whether all runs gave the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = ("hexgen2-homogeneous", *(f"hexgen2-setting-{k}" for k in range(1, 6)))
MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")
COMMAND = str(Path(sys.executable).with_name("hexgen2"))


def measure(setting: str, model: str, workload: str, runs: int) -> dict:
    """One cell: the placement's figures and the median seconds of `runs` processes."""
    seconds, outputs = [], []
    for _ in range(runs):
        started = time.perf_counter()
        arguments = ["search", "--cluster", setting, "--model", model, "--workload", workload, "--json"]
        done = subprocess.run([COMMAND, *arguments], check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
        placement = json.loads(done.stdout)
        searched = placement["search"].pop("seconds")
        outputs.append(json.dumps(placement))
    return {
        "setting": setting,
        "model": model,
        "workload": workload,
        "req_s": round(placement["throughput"]["req_s"], 3),
        "gap": round(placement["bound"]["gap"], 4),
        "evaluations": placement["search"]["evaluations"],
        "search_s": round(searched, 2),
        "process_s": round(statistics.median(seconds), 2),
        "same_bytes": len(set(outputs)) == 1,
    }


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = []
    for setting in SETTINGS:
        for model in MODELS:
            for workload in WORKLOADS:
                row = measure(setting, model, workload, arguments.runs)
                rows.append(row)
                print(*row.values(), sep="\t", flush=True)
    times = [row["process_s"] for row in rows]
    print(f"process seconds: median {statistics.median(times)}, worst {max(times)}")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

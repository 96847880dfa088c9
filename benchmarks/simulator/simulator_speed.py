"""Time the simulator on an hour-long trace and on a million requests.

    python -m benchmarks.simulator.simulator_speed [--trace AZURE.csv] [--requests N]

Simulates a placement of llama-2-70b on hexgen2-setting-1 that the script searches first. Each row is `hexgen2
simulate` as a whole process, start-up and reading included: a trace in Azure's format (not part of this
repository: see https://github.com/Azure/AzurePublicDataset) at its own times, and N requests with random
classes of the conversation trace, at 80 % of the placement's throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("hexgen2"))
CLUSTER, MODEL, SHARE = "hexgen2-setting-1", "llama-2-70b", 0.8


def main() -> None:
    """Search a placement, then print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000)
    arguments = parser.parse_args()
    print(f"{'':24}{'requests':>10}{'wall s':>9}{'CPU s':>9}{'requests/s':>12}{'peak MB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.trace is not None:
            placement = searched(Path(folder) / "trace.json", str(arguments.trace))
            row("trace at its own times", placement, ["--workload", str(arguments.trace)])
        placement = searched(Path(folder) / "online.json", "online")
        rate = SHARE * json.loads(placement.read_text())["throughput"]["req_s"]
        asked = ["--request-rate", f"{rate:.6g}", "--num-requests", str(arguments.requests)]
        row(f"at random, {rate:.3g}/s", placement, asked)


def searched(path: Path, workload: str) -> Path:
    """A placement for a workload."""
    asked = ["--cluster", CLUSTER, "--model", MODEL, "--workload", workload, "--phases", "disaggregated"]
    subprocess.run([COMMAND, "search", *asked, "-o", str(path)], check=True, capture_output=True)
    return path


def row(name: str, placement: Path, options: list[str]) -> None:
    """Simulate in a separate process."""
    command = [COMMAND, "simulate", str(placement), *options, "--json"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _, _, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    count, cpu_s = found["completed"] + found["failed"], used.ru_utime + used.ru_stime
    figures = f"{count:>10}{wall_s:>9.2f}{cpu_s:>9.2f}{count / wall_s:>12.0f}{used.ru_maxrss / 1e3:>9.0f}"
    print(f"{name:24}{figures}", flush=True)


if __name__ == "__main__":
    main()

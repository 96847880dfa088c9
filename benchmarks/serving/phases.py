"""Emulated fleets under more load than they carry: all disaggregated, all colocated and flexible, measured.

    python -m benchmarks.serving.phases [--cluster NAME] [--model NAME] [--workload NAME] [--requests N]
        [--seed S]

Each choice of phases is searched for, launched with emulated engines at full scale (steps and transfers take
the predicted time), and measured with `hexgen2 bench`, the same requests for all, which arrive 1.15 times as
fast as the best of them is planned to serve, and wait. Prints requests/s planned, and simulated and measured
with the same requests, from the end of the first tenth of them to that of the ninth.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

import hexgen2
from benchmarks.serving.fleet import COMMAND, launched

BEYOND = 1.15


def main() -> None:
    """Print a row for each choice of phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cluster", default="hexgen2-setting-4")
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--workload", default="online")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    asked = {"cluster": options.cluster, "model": options.model, "workload": options.workload}
    found = {
        phases: hexgen2.search(**asked, phases=phases)
        for phases in ("disaggregated", "colocated", "flexible")
    }
    rate = BEYOND * max(placement.throughput.req_s for placement in found.values())
    print(f"{' '.join(asked.values())}, {options.requests} requests at {rate:.4g}/s, seed {options.seed}")
    print(f"{'phases':16}{'planned':>10}{'simulated':>11}{'measured':>10}{'failed':>8}  replicas")
    for phases, placement in found.items():
        load = {"request_rate": rate, "num_requests": options.requests, "seed": options.seed}
        simulated = hexgen2.simulate(placement, **load)
        measured = _measured(placement, options, rate)
        replicas = "".join(sorted(replica.role[0] for replica in placement.replicas))
        print(
            f"{phases:16}{placement.throughput.req_s:10.2f}{simulated.steady_request_throughput:11.2f}"
            f"{measured['steady_request_throughput']:10.2f}{measured['failed']:8}  {replicas}",
            flush=True,
        )
        for why, count in measured["failures"].items():
            print(f"{count} failed: {why}")


def _measured(placement: hexgen2.Placement, options: argparse.Namespace, rate: float) -> dict:
    """What `hexgen2 bench` prints of a fleet with this placement."""
    load = ["--workload", options.workload, "--request-rate", str(rate)]
    load += ["--num-requests", str(options.requests), "--seed", str(options.seed), "--json", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "placement.json"
        placement.save(path)
        # All requests come from one client, and none may be turned away.
        waiting = ["--queue-limit", str(options.requests), "--queue-timeout-s", "3600"]
        waiting += ["--max-connections", str(options.requests + 200)]
        waiting += ["--max-address-connections", str(options.requests + 100)]
        with launched(path, None, "--no-prefix-caching", *waiting) as (url, _):
            done = subprocess.run([COMMAND, "bench", url, *load], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()

"""Compare the simulator with a running fleet of CPU workers on this machine.

    python -m benchmarks.simulator.against_fleet [--seconds 60] [--attempts 3]

A random Llama of 55 million parameters is served by one prefill and one decode worker, then by one colocated
worker; each worker has one thread. A few requests measure each fleet's step times (step_profile.py), which
the simulator then uses; both get the same requests, at 30, 60 and 85 % of the peak rate that the simulator
predicts. Workers, front end and client share this machine: on two cores, the prefill and decode workers leave
no core to the others. Other programs also disturb the measurement, so their share of CPU time is printed;
where it is above 2 %, the profile or run is repeated up to --attempts times, and the least disturbed attempt
counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from benchmarks.serving.fleet import launched, make_model, make_placement
from benchmarks.simulator.step_profile import Profiled, profile
from hexgen2.bench.run import Load, bench
from hexgen2.placement import Placement
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import simulate
from hexgen2.workload.arrivals import LengthSource, offline, online

ISL, OSL = 160, 48
LOADS = (0.3, 0.6, 0.85)
QUIET = 0.02
SHOWN = {
    "request_throughput": "requests/s",
    "mean_ttft_ms": "mean TTFT ms",
    "p90_ttft_ms": "p90 TTFT ms",
    "mean_tpot_ms": "mean TPOT ms",
    "p90_tpot_ms": "p90 TPOT ms",
}
Found = TypeVar("Found")


def main(arguments: Sequence[str]) -> None:
    """Compare both fleets at all loads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the arrivals at each load")
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), Path(folder) / "model"
        make_model(model)
        for colocated in (False, True):
            path = make_placement(work, model, colocated, ISL, OSL)
            with launched(path, model, "--no-prefix-caching") as (url, server):
                compare(Placement.load(path), url, server, options)


def compare(placement: Placement, url: str, server: psutil.Process, options: argparse.Namespace) -> None:
    """Profile a fleet, then run and simulate it at each load."""
    seed = options.seed
    roles = " + ".join(f"1 {replica.role}" for replica in placement.replicas)
    print(f"\n{roles}, {ISL} tokens in and {OSL} out", flush=True)
    times, others = least_disturbed(lambda: profile(url), server, options.attempts)
    figures = ", ".join(f"{name} {_short(value)}" for name, value in asdict(times).items())
    print(f"profile: {figures}; other programs took {others:.0%} of the machine", flush=True)
    lengths = LengthSource(placement.workload)
    costs = Profiled(placement.model, placement.workload.lengths, times)
    simulated = Options(front_end_s=times.front_end_s)
    most = simulate(placement, offline(lengths, 2000, seed), simulated, costs=costs)
    peak = most.steady_request_throughput
    print(f"peak in the simulator: {peak:.3g} requests/s")
    print(f"{'load':>5} {'':14}" + "".join(f"{name:>14}" for name in SHOWN.values()))
    for load in LOADS:
        rate = load * peak
        requests = online(lengths, rate, max(20, round(rate * options.seconds)), seed)
        predicted = simulate(placement, requests, simulated, costs=costs).to_dict()
        run = partial(bench, Load(url), requests, {})
        result, others = least_disturbed(run, server, options.attempts)
        assert result.failed == 0, result.failures
        measured = result.to_dict()
        _print(f"{load:.0%}", "simulated", predicted)
        _print("", "measured", measured)
        errors = {key: 100 * (predicted[key] / measured[key] - 1) for key in SHOWN}
        row = "".join(f"{errors[key]:>+13.1f}%" for key in SHOWN)
        note = f"   {len(requests)} requests; other programs took {others:.0%} of the machine"
        print(f"{'':5} {'error':14}{row}{note}", flush=True)


def least_disturbed(
    action: Callable[[], Found], server: psutil.Process, attempts: int
) -> tuple[Found, float]:
    """The result of the attempt in which other programs used the least CPU time, and their share of it."""
    best: tuple[Found, float] | None = None
    while best is None or (best[1] > QUIET and attempts > 0):
        before = _cpu_s(server)
        found = action()
        others = _others(before, _cpu_s(server))
        if best is None or others < best[1]:
            best = found, others
        attempts -= 1
    return best


def _print(load: str, who: str, found: dict[str, Any]) -> None:
    print(f"{load:>5} {who:14}" + "".join(f"{found[key]:>14.4g}" for key in SHOWN), flush=True)


def _cpu_s(server: psutil.Process) -> tuple[float, float, float]:
    """CPU seconds of the fleet and this client, of all programs, and of the machine (idle time included)."""
    own = 0.0
    for process in (psutil.Process(), server, *server.children(recursive=True)):
        spent = process.cpu_times()
        own += spent.user + spent.system
    machine = psutil.cpu_times()
    total = sum(machine) - machine.guest - machine.guest_nice
    return own, total - machine.idle - machine.iowait, total


def _others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Other programs' share of the machine's CPU time."""
    own, busy, total = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, busy - own) / total


def _short(value: float | tuple[float, ...]) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "/".join(f"{each:.4g}" for each in value)


if __name__ == "__main__":
    main(sys.argv[1:])

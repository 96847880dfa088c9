"""Compare the simulator with running fleets on this machine.

    python -m benchmarks.simulator.against_fleet [--seconds 40] [--attempts 3] [--seed 0] [--fleets torch]

Two fleets compute: a random Llama of 55 million parameters is served by one prefill and one decode worker,
then by one colocated worker; each worker has one thread. A few requests measure each fleet's step times
(step_profile.py), which the simulator then uses. The two workers of the first fleet share memory and cores:
how much longer steps take while the other works is part of the profile. A machine's speed drifts by 10 or
20 % within minutes, so a few steps are measured again before and after each run, and scale the profile.

Two fleets are emulated at the paper's scale: a disaggregated placement and one without disaggregation, of
llama-2-70b on clusters drawn with --seed; their workers sleep for the times of the cost model, which the
simulator uses as well, so that any difference is one of scheduling or overhead. Fleet and simulator get the
same requests, at 30, 60, 85 and 95 % of the peak rate that the simulator predicts.

Workers, front end and client share this machine. A colocated worker has one core and leaves the others to
them; on two cores, the prefill and decode workers leave none. Other programs also disturb the measurement, so
their share of CPU time is printed; where it is above 2 %, the profile or run is repeated up to --attempts
times, and the least disturbed attempt counts.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from benchmarks.serving.fleet import COMMAND, launched, make_model, make_placement
from benchmarks.simulator.step_profile import Contention, Profiled, Speed, StepTimes, contention, profile
from hexgen2.bench.run import Load, bench
from hexgen2.placement import Placement
from hexgen2.results import SimulationResult
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import simulate
from hexgen2.workload.arrivals import LengthSource, offline, online
from hexgen2.workload.requests import Requests

ISL, OSL = 160, 48
LOADS = (0.3, 0.6, 0.85, 0.95)
QUIET = 0.02
PASSES = 3
CLUSTERS = tuple(f"hexgen2-setting-{number}" for number in range(1, 6))
MODEL, WORKLOAD = "llama-2-70b", "HPLD"
STRATEGIES = {"disaggregated": ("hexgen2",), "colocated": ("hexgen", "vllm")}
MEANS = {
    "request_throughput": "requests/s",
    "mean_ttft_ms": "TTFT ms",
    "mean_tpot_ms": "TPOT ms",
    "mean_itl_ms": "ITL ms",
}
P90S = {"p90_ttft_ms": "p90 TTFT", "p90_tpot_ms": "p90 TPOT", "p90_itl_ms": "p90 ITL"}
SHOWN = MEANS | P90S
Found = TypeVar("Found")
Errors = dict[str, float]
"""By the keys of SHOWN, in percent."""


def main(arguments: Sequence[str]) -> None:
    """Compare all fleets at all loads, and print the worst errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of the arrivals at each load")
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleets", default="torch,emulated", help="which of them, separated by commas")
    options = parser.parse_args(arguments)
    found: dict[str, list[Errors]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "torch" in options.fleets:
            found |= torch_fleets(Path(folder), options)
        if "emulated" in options.fleets:
            found |= emulated_fleets(Path(folder), options)
    print("\nworst errors")
    for fleet, errors in found.items():
        worst = {key: max((each[key] for each in errors), key=abs) for key in SHOWN}
        print(f"{fleet:20}" + "".join(f"{worst[key]:>+11.1f}%" for key in SHOWN))


def torch_fleets(work: Path, options: argparse.Namespace) -> dict[str, list[Errors]]:
    """The errors of a computing fleet with and without disaggregation."""
    model = work / "model"
    make_model(model)
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, list[Errors]] = {}
    for colocated in (False, True):
        path = make_placement(work, model, colocated, ISL, OSL)
        placement = Placement.load(path)
        # With as many cores as workers, each has one thread.
        taken = cores[: len(placement.replicas)]
        with launched(path, model, "--no-prefix-caching", cores=taken) as (url, server):
            rest = cores[len(taken) :] or cores
            for thread in (*server.threads(), *psutil.Process().threads()):
                os.sched_setaffinity(thread.id, rest)
            roles = " + ".join(f"1 {replica.role}" for replica in placement.replicas)
            print(f"\n{roles}, {ISL} tokens in and {OSL} out", flush=True)
            action = partial(profile, url, colocated)
            times, others = least_disturbed(action, server, options.attempts)
            figures = ", ".join(f"{name} {_short(value)}" for name, value in asdict(times).items())
            print(f"profile: {figures}; other programs took {others:.0%} of the machine")
            both = None if colocated else contention(url, times)
            if both is not None:
                ratios = f"prompts take {both.prompt:.3f} times as long, decodes {both.decode:.3f}"
                print(f"while the other replica works, {ratios}", flush=True)
            simulated = Options(front_end_s=times.front_end_s)
            speed = Speed.now(url, times.front_end_s)
            measured = Measured(times, both, speed)
            found[roles] = compare(placement, url, server, options, simulated, measured)
        os.sched_setaffinity(0, cores)
    return found


def emulated_fleets(work: Path, options: argparse.Namespace) -> dict[str, list[Errors]]:
    """The errors of a placement of each kind."""
    rng = random.Random(options.seed)
    found: dict[str, list[Errors]] = {}
    for kind, strategies in STRATEGIES.items():
        cluster, strategy = rng.choice(CLUSTERS), rng.choice(strategies)
        path = work / f"{kind}.json"
        asked = ["--cluster", cluster, "--model", MODEL, "--workload", WORKLOAD, "--strategy", strategy]
        command = [COMMAND, "search", *asked, "--seed", str(options.seed), "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        placement = Placement.load(path)
        count = sum(len(replica.gpus) for replica in placement.replicas)
        print(f"\n{kind}: {strategy} on {cluster}, {count} GPUs, {MODEL}, {WORKLOAD}, emulated", flush=True)
        with launched(path, None, "--no-prefix-caching") as (url, server):
            found[kind] = compare(placement, url, server, options, Options())
    return found


def compare(
    placement: Placement,
    url: str,
    server: psutil.Process,
    options: argparse.Namespace,
    simulated: Options,
    measured: Measured | None = None,
) -> list[Errors]:
    """Run and simulate a fleet at each load."""
    lengths = LengthSource(placement.workload)
    most = predict(placement, offline(lengths, 2000, options.seed), simulated, measured)
    peak = most.steady_request_throughput
    print(f"peak in the simulator: {peak:.3g} requests/s")
    print(f"{'load':>5} {'':14}" + "".join(f"{name:>12}" for name in SHOWN.values()))
    found = list[Errors]()
    for load in LOADS:
        rate = load * peak
        requests = online(lengths, rate, max(20, round(rate * options.seconds)), options.seed)
        before = Speed.now(url, measured.times.front_end_s) if measured is not None else None
        run = partial(bench, Load(url), requests, {})
        result, others = least_disturbed(run, server, options.attempts)
        now = measured
        if measured is not None and before is not None:
            after = Speed.now(url, measured.times.front_end_s)
            now = measured.at_the_speed_of(before, after)
            speeds = ", ".join(str(each) for each in (measured.speed, before, after))
            print(f"      speed when profiled, before and after: {speeds}")
        predicted = predict(placement, requests, simulated, now).to_dict()
        seen = result.to_dict()
        _print(f"{load:.0%}", "simulated", predicted)
        _print("", "measured", seen)
        errors = {key: 100 * (predicted[key] / seen[key] - 1) for key in SHOWN}
        found.append(errors)
        row = "".join(f"{errors[key]:>+11.1f}%" for key in SHOWN)
        failed = f", {result.failed} failed" if result.failed else ""
        note = f"   {len(requests)} requests{failed}; other programs took {others:.0%} of the machine"
        print(f"{'':5} {'error':14}{row}{note}", flush=True)
    return found


@dataclass(frozen=True)
class Measured:
    """The profile of a computing fleet, how its replicas disturb each other, if it has two, and how fast the
    machine was when it was made."""

    times: StepTimes
    contention: Contention | None
    speed: Speed

    def at_the_speed_of(self, before: Speed, after: Speed) -> Measured:
        """The profile as it would have been made at the mean of two other speeds."""
        return replace(self, times=self.speed.over(before, after, self.times))


def predict(
    placement: Placement, requests: Requests, options: Options, measured: Measured | None
) -> SimulationResult:
    """Simulate; where replicas disturb each other, again with the shares of the time for which they work."""
    if measured is None:
        return simulate(placement, requests, options)

    def run(times: StepTimes) -> SimulationResult:
        costs = Profiled(placement.model, placement.workload.lengths, times)
        return simulate(placement, requests, options, costs=costs)

    found = run(measured.times)
    if measured.contention is not None:
        for _ in range(PASSES):
            busy = {r.role: min(1.0, found.replicas[r.id]["utilisation"]) for r in placement.replicas}
            found = run(measured.contention.slowed(measured.times, busy["prefill"], busy["decode"]))
    return found


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
    print(f"{load:>5} {who:14}" + "".join(f"{found[key]:>12.4g}" for key in SHOWN), flush=True)


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

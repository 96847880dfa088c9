"""One prefill and one decode replica against one colocated replica on the same cores of this machine.

    python -m benchmarks.serving.disaggregation [--seconds 60] [--rounds 3] [--attempts 1] [--plot FILE]

A random Llama of 55 million parameters is launched twice: half of the cores prefill and half decode, or all
of them do both. The two fleets take turns at the same requests:

- at three loads, as shares of the requests/s that the slower fleet reaches with many requests at once: TTFT
  and TPOT, as medians over rounds of the means and of the 90th percentiles;
- while a few requests decode, long prompts arrive one after the other: the times between tokens (ITL) of the
  decoding requests, before and after the first long prompt. This is the interference that disaggregation
  avoids; --plot shows it over time (needs matplotlib).

Front end and client share the cores. Where other programs took more than 2 % of the CPU time, a run is
repeated up to --attempts times and the least disturbed one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.serving.fleet import launched, make_model, make_placement
from benchmarks.simulator.against_fleet import least_disturbed
from hexgen2.bench.completions import complete, find_dialect, find_model, request_body
from hexgen2.bench.http import Address, Server
from hexgen2.bench.measurements import Measurements
from hexgen2.bench.run import Load, bench
from hexgen2.placement import Placement
from hexgen2.workload.arrivals import LengthSource, offline, online
from hexgen2.workload.requests import Requests

ISL, OSL = 160, 48
LOADS = (0.3, 0.6, 0.85)
AT_ONCE = 48
KEYS = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "p90_tpot_ms", "p99_itl_ms")
DECODES, DECODED_ISL, DECODED_OSL = 4, 32, 480
LONG_ISL, LONG_OSL, LONG_EVERY_S, CALM_S = 896, 8, 3.0, 4.0


@dataclass(frozen=True)
class Fleet:
    """A launched placement."""

    name: str
    url: str
    process: psutil.Process
    lengths: LengthSource


@dataclass(frozen=True)
class Interference:
    """Tokens of decoding requests while long prompts arrive; time counts from the first long prompt.

    Attributes
    ----------
    at_s, gap_s : [tokens] when a token arrived, and the time since the previous one of the same request
    long_at_s, long_ttft_s : [prompts] when a long prompt was sent, and its TTFT
    """

    at_s: np.ndarray
    gap_s: np.ndarray
    long_at_s: np.ndarray
    long_ttft_s: np.ndarray

    def gaps_ms(self, disturbed: bool) -> np.ndarray:
        """The gaps before the first long prompt, or those after it."""
        return 1e3 * self.gap_s[(self.at_s > 0) == disturbed]


Results = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Launch both fleets, measure them in turns, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the arrivals at each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work, model = Path(folder), Path(folder) / "model"
        make_model(model)
        fleets = []
        for name, colocated in (("disaggregated", False), ("colocated", True)):
            path = make_placement(work, model, colocated, ISL, OSL)
            lengths = LengthSource(Placement.load(path).workload)
            fleets.append(Fleet(name, *stack.enter_context(launched(path, model)), lengths))
        under_load = compare_loads(fleets, options)
        interference = compare_interference(fleets, options)
    if options.plot:
        plot(under_load, interference, options.plot)


def compare_loads(fleets: list[Fleet], options: argparse.Namespace) -> dict[float, Results]:
    """TTFT and TPOT of both fleets at each load."""
    seeds = itertools.count()  # new prompts each time, so that no cache holds them
    peaks = {}
    for fleet in fleets:
        burst = offline(fleet.lengths, AT_ONCE, 0)
        peaks[fleet.name] = _bench_now(fleet.url, burst, seeds)["request_throughput"]
    print(f"{ISL} tokens in, {OSL} out; {AT_ONCE} requests at once:", end=" ")
    print(", ".join(f"{name} {peak:.3g} requests/s" for name, peak in peaks.items()))
    print(f"{'load':>5} {'requests/s':>11} {'':14}" + "".join(f"{key:>14}" for key in (*KEYS, "others")))
    found: dict[float, Results] = {}
    for load in LOADS:
        rate = load * min(peaks.values())
        results: Results = {fleet.name: [] for fleet in fleets}
        worst = dict.fromkeys(results, 0.0)
        for turn in range(options.rounds):
            requests = online(fleets[0].lengths, rate, max(20, round(rate * options.seconds)), turn)
            for fleet in in_turn(fleets, turn):
                run = partial(_bench_now, fleet.url, requests, seeds)
                result, others = least_disturbed(run, fleet.process, options.attempts)
                assert result["failed"] == 0, result["failures"]
                results[fleet.name].append(result)
                worst[fleet.name] = max(worst[fleet.name], others)
        for name, runs in results.items():
            row = "".join(f"{median(runs, key):>14.1f}" for key in KEYS)
            print(f"{load:>5.0%} {rate:>11.3g} {name:14}{row}{worst[name]:>14.0%}", flush=True)
        found[load] = results
    return found


def _bench_now(url: str, requests: Requests, seeds: Iterator[int]) -> dict[str, Any]:
    return bench(Load(url, seed=next(seeds)), requests, {}).to_dict()


def compare_interference(fleets: list[Fleet], options: argparse.Namespace) -> dict[str, list[Interference]]:
    """ITL of running decodes in both fleets, before and while long prompts arrive."""
    found: dict[str, list[Interference]] = {fleet.name: [] for fleet in fleets}
    worst, rng = dict.fromkeys(found, 0.0), random.Random(0)
    for turn in range(options.rounds):
        for fleet in in_turn(fleets, turn):
            run = partial(_interfere_now, fleet.url, rng)
            seen, others = least_disturbed(run, fleet.process, options.attempts)
            found[fleet.name].append(seen)
            worst[fleet.name] = max(worst[fleet.name], others)
    what = f"prompts of {LONG_ISL} tokens arrive every {LONG_EVERY_S:g} s"
    print(f"\n{DECODES} requests decode; {what}; ITL in ms")
    titles = ("tokens", "mean", "median", "p90", "p99", "most", "long TTFT", "others")
    print(f"{'':14} {'long prompts':14}" + "".join(f"{title:>11}" for title in titles))
    for name, runs in found.items():
        ttft = f"{1e3 * np.median(np.concatenate([run.long_ttft_s for run in runs])):>11.0f}"
        for disturbed in (False, True):
            gaps = np.concatenate([run.gaps_ms(disturbed) for run in runs])
            figures = (gaps.mean(), *np.percentile(gaps, (50, 90, 99)), gaps.max())
            row = "".join(f"{value:>11.1f}" for value in figures)
            last = f"{ttft}{worst[name]:>11.0%}" if disturbed else ""
            print(f"{name:14} {'yes' if disturbed else 'no':14}{len(gaps):>11}{row}{last}", flush=True)
    return found


def _interfere_now(url: str, rng: random.Random) -> Interference:
    return asyncio.run(interfere(url, rng))


async def interfere(url: str, rng: random.Random) -> Interference:
    """Decode a few requests; after a while, send long prompts one after the other until the first decode is
    done."""
    server = Server(Address.parse(url))
    model = await find_model(server, None)
    dialect = await find_dialect(server, model)
    begun = time.perf_counter()

    def start(isl: int, osl: int) -> tuple[Measurements, asyncio.Task[None]]:
        seen = Measurements(Requests(np.zeros(1), np.array([isl]), np.array([osl]), "interference"))
        body = request_body(model, dialect, isl, osl, rng)
        asked = complete(server, body, 0, seen, lambda: time.perf_counter() - begun)
        return seen, asyncio.create_task(asked)

    decodes = [start(DECODED_ISL, DECODED_OSL) for _ in range(DECODES)]
    running = asyncio.wait([task for _, task in decodes], return_when=asyncio.FIRST_COMPLETED)
    over = asyncio.create_task(running)
    await asyncio.wait([over], timeout=CALM_S)
    longs = []
    while not over.done():
        longs.append(start(LONG_ISL, LONG_OSL))
        await asyncio.wait([over], timeout=LONG_EVERY_S)
    await asyncio.gather(*(task for _, task in decodes + longs))
    failed = [reason for seen, _ in decodes + longs for reason in seen.failed.values()]
    if failed or not longs:
        raise SystemExit(f"requests failed on the fleet at {url}: {failed}")
    sent = np.array([seen.sent_s[0] for seen, _ in longs])
    first = np.array([seen.first_s[0] for seen, _ in longs])
    at_s = [seen.first_s[0] + np.cumsum(seen.gap_s) for seen, _ in decodes]
    gap_s = [np.array(seen.gap_s) for seen, _ in decodes]
    return Interference(np.concatenate(at_s) - sent[0], np.concatenate(gap_s), sent - sent[0], first - sent)


def in_turn(fleets: list[Fleet], turn: int) -> list[Fleet]:
    """The fleets in rotating order: a different one goes first in every round."""
    first = turn % len(fleets)
    return fleets[first:] + fleets[:first]


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def plot(under_load: dict[float, Results], interference: dict[str, list[Interference]], path: Path) -> None:
    """Plot the ITL of decodes over time in the last round, and mean TTFT and TPOT by load."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(14, 8))
    top = 1.05e3 * max(run[-1].gap_s.max() for run in interference.values())
    for axis, (name, runs) in zip(axes[0], interference.items(), strict=True):
        axis.plot(runs[-1].at_s, 1e3 * runs[-1].gap_s, ".", markersize=3)
        for at_s in runs[-1].long_at_s:
            axis.axvline(at_s, color="tab:red", linewidth=0.8, alpha=0.6)
        title = f"{name}: {DECODES} decodes while prompts of {LONG_ISL} tokens arrive (red)"
        axis.set(title=title, xlabel="seconds since the first long prompt", ylabel="ITL, ms", ylim=(0, top))
    for axis, figure_name in zip(axes[1], ("TTFT", "TPOT"), strict=True):
        for name in interference:
            key = f"mean_{figure_name.lower()}_ms"
            values = [median(results[name], key) for results in under_load.values()]
            axis.plot([100 * load for load in under_load], values, "o-", label=name)
        axis.set(xlabel="load, %", ylabel=f"mean {figure_name}, ms", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()

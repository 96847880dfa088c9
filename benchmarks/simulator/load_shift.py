"""Placements whose requests become longer or shorter than planned, with and without moving shares.

    python -m benchmarks.simulator.load_shift [--cells CLUSTER:WORKLOAD,...] [--model M] [--seeds N]
                                              [--seed S] [--requests N] [--few] [--trace FILE]

For each cluster and workload, `hexgen2 search --phases flexible` makes a placement. Then requests with 1.5
and 0.67 times the prompt or output tokens arrive: first at a rate that no shares could serve, then at 80 % of
what the planned shares served. Each row shows steady requests/s beyond capacity, and P90 TTFT and P90 TPOT in
ms at 80 %, without and with moving shares, means over fresh seeds; the most moves in a run; and the gain in
requests/s, its mean and its least. The last line has the least of all. With --trace, a recorded trace is
replayed, too, stretched to the planned means: how often shares move when lengths only vary as they do there,
at its own times and in random order.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import hexgen2
from hexgen2.placement import Placement
from hexgen2.prediction.other_lengths import with_lengths
from hexgen2.results import SimulationResult
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import TURNS, simulate
from hexgen2.workload.arrivals import LengthSource, online, replay
from hexgen2.workload.requests import Requests
from runtime.routing.reflow import Reflow

CELLS = tuple(f"hexgen2-setting-{n}:{w}" for n in (1, 2, 3, 4, 5) for w in ("HPLD", "online"))
FACTORS = ((1.0, 1.0), (1.5, 1.0), (0.67, 1.0), (1.0, 1.5), (1.0, 0.67))
BEYOND, BELOW = 1.3, 0.8


@dataclass(frozen=True)
class Sides:
    """Results without and with moving shares."""

    planned: SimulationResult
    moved: SimulationResult

    @classmethod
    def of(cls, placement: Placement, requests: Requests) -> Sides:
        return cls(*(simulate(placement, requests, Options(shift_load=s)) for s in (False, True)))


def main() -> None:
    """Print a row for each placement and change of lengths, and the least gain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS), help="CLUSTER:WORKLOAD, separated by commas")
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, with other requests")
    parser.add_argument("--requests", type=int, default=20_000, help="of a run, at most")
    parser.add_argument("--few", action="store_true", help="only the first change of lengths")
    parser.add_argument("--trace", type=Path, help="a trace with arrival times")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    print(
        f"{'cluster, workload':28}{'replicas':9}{'prompts':>8}{'outputs':>8}{'req/s':>16}{'P90 TTFT':>16}"
        f"{'P90 TPOT':>14}{'moves':>6}{'gain':>8}{'least':>8}"
    )
    least = []
    for cell in options.cells.split(","):
        cluster, workload = cell.split(":")
        placement = hexgen2.search(
            cluster=cluster, model=options.model, workload=workload, phases="flexible", seed=options.seed
        )
        for factors in FACTORS[: 2 if options.few else None]:
            least.append(row(cell.removeprefix("hexgen2-"), placement, factors, options))
        if options.trace is not None:
            vary(cell.removeprefix("hexgen2-"), placement, options)
    print(f"least gain {min(least):+.1%}")


def row(name: str, placement: Placement, factors: tuple[float, float], options: argparse.Namespace) -> float:
    """Print a row; the least gain in requests/s."""
    planned = placement.workload
    longer = with_lengths(placement, planned.isl * factors[0], planned.osl * factors[1])
    carried = sum(route.weight for route in Reflow(placement).moved((), Reflow(longer)))
    lengths, count = LengthSource(longer.workload), min(options.requests, max(2000, TURNS * placement.places))
    seeds = range(options.seed, options.seed + options.seeds)
    beyond = [Sides.of(placement, online(lengths, BEYOND * carried, count, seed)) for seed in seeds]
    served = [(s.planned.steady_request_throughput, s.moved.steady_request_throughput) for s in beyond]
    rate = BELOW * min(without for without, _ in served)
    below = [Sides.of(placement, online(lengths, rate, count, seed)) for seed in seeds]
    gains = [after / without - 1 for without, after in served]
    replicas = "".join(sorted(replica.role[0] for replica in placement.replicas))
    shown = [
        f"{mean([s.planned for s in sides], value):8.4g}{mean([s.moved for s in sides], value):8.4g}"
        for sides, value in (
            (beyond, lambda found: found.steady_request_throughput),
            (below, lambda found: found.p90_ttft_ms),
            (below, lambda found: found.p90_tpot_ms),
        )
    ]
    most = max(moves(sides.moved) for sides in (*beyond, *below))
    print(
        f"{name:28}{replicas:9}{factors[0]:8.2f}{factors[1]:8.2f}{''.join(shown)}"
        f"{most:6}{sum(gains) / len(gains):+8.1%}{min(gains):+8.1%}",
        flush=True,
    )
    return min(gains)


def vary(name: str, placement: Placement, options: argparse.Namespace) -> None:
    """Print how often shares move under a trace that the placement's lengths are the means of."""
    source = LengthSource.load(options.trace)
    assert source.trace is not None
    asked = placement.workload
    scaled = replace(
        source.trace,
        isl=_scaled(source.trace.isl, asked.isl),
        osl=_scaled(source.trace.osl, asked.osl),
    )
    rate = BELOW * placement.throughput.req_s
    drawn = online(LengthSource(asked, scaled), rate, len(scaled), options.seed)
    for kind, requests in (("at its own times", replay(scaled, rate)), ("in random order", drawn)):
        sides = Sides.of(placement, requests)
        print(
            f"{name:28}{options.trace.stem} {kind}: {moves(sides.moved)} moves, P90 TTFT "
            f"{sides.planned.p90_ttft_ms:.4g} {sides.moved.p90_ttft_ms:.4g}, P90 TPOT "
            f"{sides.planned.p90_tpot_ms:.4g} {sides.moved.p90_tpot_ms:.4g}",
            flush=True,
        )


def _scaled(tokens: np.ndarray, mean_tokens: float) -> np.ndarray:
    return np.maximum(1, np.round(tokens * (mean_tokens / tokens.mean()))).astype(np.int64)


def mean(results: Sequence[SimulationResult], value: Callable[[SimulationResult], float]) -> float:
    """The mean of a figure."""
    return sum(map(value, results)) / len(results)


def moves(result: SimulationResult) -> int:
    """How often shares moved."""
    found = [line.split()[4] for line in result.assumptions if line.startswith("shares of routes moved")]
    return int(found[0]) if found else 0


if __name__ == "__main__":
    main()

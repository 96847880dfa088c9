"""Compare predicted times of published runs of serving engines with what was measured.

    python -m benchmarks.simulator.serving_accuracy --runs runs.csv.gz [--rank] [--held-out] [--jobs N]

The file has the columns of `hexgen2 estimate --runs` (docs/simulate.md) with measured_ttft_ms and
measured_tpot_ms. The error is |predicted - measured| / measured, the bias is the same with its sign; both are
in per cent, over the rows that can be predicted.

--rank asks whether the predictions choose between deployments as the measurements do. A deployment is all
runs of one model in one format, on one GPU type, by one engine, with the same lengths and the same shape (TP,
attention groups, or workers of both sides), under different numbers of clients. Throughput per GPU is output
tokens/s by Little's law, clients / (TTFT + TPOT x (osl - 1)) x osl / GPUs. For each pair of deployments that
differ in shape, both throughputs are interpolated at times per output token that both reach, measured and
predicted each on their own; a pair is right if the deployment that is measured to be better is predicted to
be. The weighted share counts each pair by the logarithm of the measured ratio.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulator.serving_runs import for_fitting
from cost_model.errors import InputError
from hexgen2.calibration.runs import measured_runs, seconds
from hexgen2.estimation.prediction import Prediction
from hexgen2.estimation.run import Run, run_of
from hexgen2.estimation.runs import predictions, read_runs

BANDS = ((4, "1-4"), (16, "5-16"), (64, "17-64"), (math.inf, "65+"))
SAME_MS = 0.25, 0.5, 0.75
"""Where between the times per token that both deployments reach, throughputs are compared."""


@dataclass(frozen=True)
class Compared:
    """A row with its run, and its times in ms."""

    cells: dict[str, str]
    run: Run
    predicted: Prediction
    ttft_ms: float
    tpot_ms: float

    def error(self, kind: str) -> float:
        """Predicted over measured, less 1."""
        measured = self.ttft_ms if kind == "ttft" else self.tpot_ms
        predicted = self.predicted.ttft_ms if kind == "ttft" else self.predicted.tpot_ms
        assert predicted is not None
        return predicted / measured - 1

    @property
    def clients(self) -> str:
        """The band of its number of clients."""
        return next(name for most, name in BANDS if self.run.concurrency <= most)


GROUPS: dict[str, Callable[[Compared], str]] = {
    "engine": lambda row: row.run.engine,
    "GPU": lambda row: row.run.gpu.name,
    "model": lambda row: row.run.model.name,
    "format": lambda row: row.run.model.weight_type,
    "mode": lambda row: "aggregated" if row.run.colocated else "disaggregated",
    "clients": lambda row: row.clients,
    "lengths": lambda row: f"{row.run.isl}/{row.run.osl}",
}


def compared(rows: list[dict[str, str]], jobs: int | None) -> Iterator[Compared]:
    """The rows that were measured and can be predicted."""
    for cells, predicted in zip(rows, predictions(rows, jobs), strict=True):
        times = [1e3 * seconds(cells.get(f"measured_{kind}_ms", "")) for kind in ("ttft", "tpot")]
        if predicted.ttft_ms is not None and all(times):
            yield Compared(cells, run_of(cells), predicted, *times)


def errors_of(rows: list[Compared]) -> list[str]:
    """Rows, and mean error, median error and bias of TPOT and of TTFT."""
    cells = [str(len(rows))]
    for kind in ("tpot", "ttft"):
        off = np.array([row.error(kind) for row in rows])
        cells += [f"{100 * np.abs(off).mean():.1f}", f"{100 * np.median(np.abs(off)):.1f}"]
        cells.append(f"{100 * np.median(off):+.0f}")
    return cells


def accuracy(rows: list[Compared]) -> Table:
    """A table with a line per group."""
    table = Table(title="TPOT and TTFT: mean error, median error, median bias (%)", padding=(0, 1))
    for heading in ("", "", "rows", "TPOT", "median", "bias", "TTFT", "median", "bias"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("all", "", *errors_of(rows))
    for kind, label in GROUPS.items():
        for name, own in sorted(grouped(rows, label).items(), key=_order):
            table.add_row(kind, name, *errors_of(own))
    return table


def worst(rows: list[Compared], count: int = 25) -> Table:
    """The groups of engine, model, format, GPU, shape and lengths that add most to the mean errors."""
    table = Table(title="Groups that add most to the errors", padding=(0, 1))
    for heading in ("group", "rows", "TPOT", "median", "bias", "TTFT", "median", "bias"):
        table.add_column(heading, justify="left" if heading == "group" else "right")

    def weight(item: tuple[str, list[Compared]]) -> float:
        return -sum(abs(row.error("tpot")) + 0.5 * min(2.0, abs(row.error("ttft"))) for row in item[1])

    def label(row: Compared) -> str:
        run = row.run
        return f"{run.engine} {run.model.name} {run.model.weight_type} {run.gpu.name} {run.isl}/{run.osl}"

    for name, own in sorted(grouped(rows, label).items(), key=weight)[:count]:
        table.add_row(name, *errors_of(own))
    return table


def _order(group: tuple[str, list[Compared]]) -> tuple[int, str]:
    """Numbers by their size, names by their letters."""
    name = group[0]
    return int(re.match(r"\d*", name)[0] or 0), name  # type: ignore[index]


def grouped(rows: Iterable[Compared], label: Callable[[Compared], str]) -> dict[str, list[Compared]]:
    groups: dict[str, list[Compared]] = defaultdict(list)
    for row in rows:
        groups[label(row)].append(row)
    return groups


Curve = list[tuple[float, float]]
"""(ms per output token, log of output tokens/s per GPU), by rising time."""


@dataclass(frozen=True)
class Pair:
    """Two deployments at one time per token: logarithms of the ratio of their throughputs per GPU."""

    names: tuple[str, str]
    measured: float
    predicted: float


def pairs(rows: list[Compared]) -> Iterator[Pair]:
    """All pairs of deployments that can be compared."""
    for alike in grouped(rows, _question).values():
        shapes = grouped(alike, _shape)
        curves = {name: [_curve(own, measured) for measured in (True, False)] for name, own in shapes.items()}
        for a, b in combinations(sorted(curves), 2):
            measured = _ratios(curves[a][0], curves[b][0])
            predicted = _ratios(curves[a][1], curves[b][1])
            if measured and predicted:
                for left, right in zip(measured, predicted, strict=True):
                    yield Pair((a, b), left, right)


def _question(row: Compared) -> str:
    """What two deployments must have in common."""
    run = row.run
    return f"{run.engine} {run.model.name} {run.model.weight_type} {run.gpu.name} {run.isl}/{run.osl}"


def _shape(row: Compared) -> str:
    return " + ".join(f"{kind.count} x {kind.shape}" for kind in row.run.workers)


def _curve(rows: list[Compared], measured: bool) -> Curve:
    """Throughput per GPU over the time per token, from its smallest number of clients on; of several runs
    with one number of clients, the mean."""
    by_clients: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        ttft, tpot = (row.ttft_ms, row.tpot_ms) if measured else row.predicted[:2]
        by_clients[row.run.concurrency].append((ttft, tpot))  # type: ignore[arg-type]
    run = rows[0].run
    gpus = sum(kind.count * kind.shape.gpus for kind in run.workers)
    points = []
    for clients, times in by_clients.items():
        ttft, tpot = (float(mean) for mean in np.mean(times, axis=0))
        tokens = 0.9 * run.osl
        points.append((tpot, math.log(clients * tokens / (ttft + tpot * (tokens - 1)) / gpus)))
    return sorted(points)


def _ratios(a: Curve, b: Curve) -> list[float]:
    """Logarithms of a's throughput over b's, where the times per token of both overlap."""
    low, high = max(a[0][0], b[0][0]), min(a[-1][0], b[-1][0])
    if len(a) < 2 or len(b) < 2 or low >= high:
        return []
    at = [low + share * (high - low) for share in SAME_MS]
    ya, yb = (
        np.interp(at, [ms for ms, _ in curve], [throughput for _, throughput in curve]) for curve in (a, b)
    )
    return [float(value) for value in ya - yb]


def ranking(rows: list[Compared]) -> str:
    """How many pairs are ranked as measured."""
    found = list(pairs(rows))
    if not found:
        return "no pairs of deployments to rank"
    right = np.array([pair.measured * pair.predicted > 0 for pair in found])
    weight = np.array([abs(pair.measured) for pair in found])
    lines = [
        f"{len(found)} comparisons of deployments at equal time per token: {right.mean():.1%} as measured, "
        f"{(right * weight).sum() / weight.sum():.1%} weighted by the difference"
    ]
    for least in (0.05, 0.1, 0.25):
        clear = weight >= math.log1p(least)
        if clear.any():
            lines.append(f"  {clear.sum()} with at least {least:.0%} between them: {right[clear].mean():.1%}")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="CSV file with measured runs")
    parser.add_argument("--held-out", action="store_true", help="only runs that engines were not fitted to")
    parser.add_argument("--rank", action="store_true", help="rank pairs of deployments")
    parser.add_argument("--jobs", type=int, help="processes; one per processor if not given")
    arguments = parser.parse_args()
    try:
        _, rows = read_runs(arguments.runs)
    except InputError as error:
        parser.error(str(error))
    if arguments.held_out:
        rows = [row for row in rows if not any(map(for_fitting, measured_runs([row])))]
    known = list(compared(rows, arguments.jobs))
    console = Console(width=150)
    if not known:
        parser.error(f"{arguments.runs} has no row that is measured and can be predicted")
    console.print(accuracy(known), worst(known))
    console.print(f"{len(known)} of {len(rows)} rows ({len(known) / len(rows):.1%}) predicted and measured")
    if arguments.rank:
        console.print(ranking(known))


if __name__ == "__main__":
    main()

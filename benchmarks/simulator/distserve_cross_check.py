"""Compare this simulator with DistServe's own, and with DistServe's measurements: OPT-13B on A100s.

    python -m benchmarks.simulator.distserve_cross_check --distserve PATH [--python PATH/.venv/bin/python]
        [--backend distserve|vllm] [--gpus 2|3] [--rates 1.5,3,4.5] [--requests 1000] [--workload NAME|FILE]
        [--measured FILE|FOLDER ...]

PATH is a checkout of https://github.com/LLMServe/DistServe: `git clone` it, and install simpy, numpy and
pandas for the interpreter that --python names. No GPU is needed. Both simulators run the placement that our
strategy of the backend's name finds for DistServe's targets: one prefill and one decode instance of one GPU
each; on three GPUs, a prefill instance of two (DistServe's own planner finds the same); or one GPU that does
both ("vllm"). Both get the same requests: Poisson arrivals, with the lengths of the ShareGPT requests in
DistServe's measurements (in PATH), or those of --workload. Our simulator runs with its own cost model, which
has not been fitted to any of these data, and with DistServe's profile as its cost model, which leaves
scheduling as the only difference.

Near saturation the two differ by design. Our simulator, like this project's runtime, starts a prefill only
once the decode instance has memory for the prompt, and for all requests there to grow by half a mean answer,
so waiting shows in TTFT. DistServe's simulator prefills at once and lets requests wait between their tokens.

--measured replays the requests of DistServe's measured runs instead (*.exp files from real A100s, in PATH
under simdistserve/benchmarks/alignment/data-ground-truth/opt-13b-sharegpt). From a folder, it takes the runs
with tensor-parallel degrees 2 and 1 (c21d11, see align_with_real.py there), and those that do not state their
degrees. We conclude that the latter have the same degrees: single prompts of more than 1300 tokens are
computed at 276 to 307 TFLOP/s, close to the peak of 312 of one A100, and as fast as in the runs that state
c21d11.

Attainment counts requests that meet both of DistServe's targets for OPT-13B and ShareGPT
(simdistserve/README.md). Times are in milliseconds, with the difference from the first row in brackets.
DistServe's CPU time includes its event tables, but not its start-up.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator.distserve_command import DistServe
from benchmarks.simulator.distserve_profile import DistServeProfile, read_fits
from cluster_specs.loader import resolve
from cost_model.base import CostModel
from cost_model.calibrated import Calibrated
from cost_model.errors import HexGen2Error, InputError
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal, make_goal
from hexgen2.placement import Placement
from hexgen2.results import summarise
from hexgen2.search.problem import make_problem
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.arrivals import LengthSource, online
from hexgen2.workload.classes import workload_of_trace
from hexgen2.workload.requests import Requests

MODEL, THEIR_MODEL = "opt-13b", "facebook/opt-13b"
TARGETS_MS = {"ttft": 200.0, "tpot": 100.0}
GPUS = {"distserve": (2, 3), "vllm": (1, 1)}
"""GPU counts by backend: default for generated requests, and the count of the measured runs."""
SHAREGPT = "simdistserve/benchmarks/alignment/data-ground-truth/opt-13b-sharegpt-workload/distserve-300-3.exp"
COLUMNS = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "p90_tpot_ms")
NEEDS = (
    "give --distserve a checkout of https://github.com/LLMServe/DistServe, or --measured its measured runs"
)


@dataclass(frozen=True)
class Row:
    """The latencies of the requests, and how many were simulated per second of CPU time."""

    name: str
    figures: dict[str, Any]
    speed: float | None = None


def row_of(
    name: str, requests: Requests, first_s: np.ndarray, end_s: np.ndarray, cpu_s: float | None = None
) -> Row:
    """The figures that `hexgen2 simulate` reports, from times [n] of any source."""
    none = np.empty(0), np.empty(0, dtype=np.int64)
    asked = requests.arrival_s, first_s, end_s, requests.isl, requests.osl
    return Row(name, summarise(*asked, none, TARGETS_MS).to_dict(), len(requests) / cpu_s if cpu_s else None)


# -- ours


def place(backend: str, gpus: int, requests: Requests) -> Placement:
    """OPT-13B on A100s of one node, for requests with these mean lengths."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "a100.yaml"
        node = f"{{name: a, accelerators: 'A100-80GB:{gpus}', interconnect: nvlink}}"
        cluster.write_text(f"name: a100\nnodes: [{node}]\n")
        lengths = float(requests.isl.mean()), float(requests.osl.mean())
        targets = None, TARGETS_MS["ttft"], TARGETS_MS["tpot"]
        goal = make_goal("goodput", *targets) if backend == "distserve" else Goal()
        problem = make_problem(str(cluster), MODEL, None, *lengths, Calibrated.name, goal=goal)
    return find_strategy(backend)(problem, SearchOptions())


def shape(placement: Placement) -> str:
    """For example "prefill tp2, decode tp1"."""
    return ", ".join(f"{replica.role} {replica.shape}" for replica in placement.replicas)


def ours(name: str, placement: Placement, requests: Requests, costs: CostModel | None = None) -> Row:
    """The result of this project's simulator. The vllm engine prefills first, as in DistServe's model of
    vLLM."""
    began = time.process_time()
    records = Records(requests)
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    Simulation(placement, cluster, records, Options(policy="prefill-first"), costs).run()
    return row_of(name, requests, records.first_s, records.end_s, time.process_time() - began)


# -- requests


def sharegpt(distserve: Path) -> LengthSource:
    """Lengths of the ShareGPT requests in DistServe's measurements."""
    asked = json.loads((distserve / SHAREGPT).read_text())
    isl, osl = (np.array([r[key] for r in asked]) for key in ("prompt_len", "output_len"))
    trace = Requests(
        np.zeros(len(asked)), isl, np.maximum(osl, 1), f"lengths of {len(asked)} ShareGPT requests"
    )
    return LengthSource(workload_of_trace(trace, "sharegpt"), trace)


@dataclass(frozen=True)
class Measured:
    """A run of a real system: its requests, and the seconds at which each got its first and last token."""

    requests: Requests
    first_s: np.ndarray
    end_s: np.ndarray


def read_measured(path: Path) -> Measured:
    """Read an *.exp file of DistServe: its first line lists the requests, with their times in seconds.

    Raises
    ------
    InputError : the file is something else
    """
    keys = "issue_time", "first_token_time", "complete_time", "prompt_len", "output_len"
    try:
        listed = ast.literal_eval(path.read_text().splitlines()[0])
        rows = np.array(sorted([r[key] for key in keys] for r in listed), dtype=float)
        issued, first, end, isl, osl = rows.T
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, IndexError) as error:
        remedy = "give a measured run of DistServe (*.exp)"
        raise InputError(str(path), "", "lists no requests with times", remedy) from error
    lengths = isl.astype(np.int64), osl.astype(np.int64)
    return Measured(Requests(issued - issued[0], *lengths, path.stem), first - issued[0], end - issued[0])


def measured_files(paths: Sequence[Path], backend: str) -> list[Path]:
    """The given files, and from folders the runs of this backend and its degrees, by request rate."""
    found = []
    for path in paths:
        runs = {p: re.fullmatch(rf"{backend}(?:-c21d11)?-\d+-([\d.]+)", p.stem) for p in path.glob("*.exp")}
        own = {p: float(match[1]) for p, match in runs.items() if match}
        found += sorted(own, key=lambda p: (own[p], p.name)) if path.is_dir() else [path]
    return found


# -- side by side


def table(title: str, rows: Sequence[Row]) -> None:
    """A Markdown table with differences from the first row."""
    print(f"\n{title}\n")
    print("| | attainment | mean TTFT | p90 TTFT | mean TPOT | p90 TPOT | requests per CPU second |")
    print("|---|---|---|---|---|---|---|")
    first = rows[0].figures
    slowest = min((row.speed for row in rows if row.speed), default=0.0)
    for row in rows:
        cells = [f"{row.figures['attainment']:.1%}"]
        for key in COLUMNS:
            change = "" if row is rows[0] else f" ({row.figures[key] / first[key] - 1:+.0%})"
            cells.append(f"{row.figures[key]:.1f}{change}")
        cells.append(f"{row.speed:.0f} ({row.speed / slowest:.1f}x)" if row.speed else "")
        print(f"| {row.name} | " + " | ".join(cells) + " |", flush=True)


@dataclass(frozen=True)
class Theirs:
    """DistServe's simulator, and its step times by tensor-parallel degree."""

    command: DistServe
    fits: dict[str, Any]

    def row(self, requests: Requests, placement: Placement) -> Row:
        """The result of DistServe's simulator."""
        phases = [replica for replica in placement.replicas if replica.role != "colocated"]
        degrees = {str(replica.role): replica.stages[0].tensor_parallel for replica in phases}
        first_s, last_s, cpu_s = self.command.simulate(requests, degrees)
        times = requests.arrival_s + first_s, requests.arrival_s + last_s
        return row_of("DistServe's simulator", requests, *times, cpu_s)

    def costs(self, placement: Placement) -> DistServeProfile:
        """DistServe's step times as a cost model."""
        return DistServeProfile(placement.model, placement.workload.lengths, self.fits)


def compare(
    requests: Requests, placement: Placement, theirs: Theirs | None, measured: Row | None = None
) -> None:
    """Print the measurements, and the results of DistServe's simulator and ours."""
    rows = [] if measured is None else [measured]
    if theirs is not None:
        rows.append(theirs.row(requests, placement))
    rows.append(ours("ours", placement, requests))
    if theirs is not None:
        rows.append(ours("ours, DistServe's profile", placement, requests, theirs.costs(placement)))
    table(f"{requests.source}: {len(requests)} requests; {shape(placement)}", rows)


def run(arguments: argparse.Namespace) -> None:
    """Run the comparison that the command line asks for."""
    backend, folder = arguments.backend, arguments.distserve
    if folder is None and not arguments.measured:
        raise InputError("--distserve", "", "is missing", NEEDS)
    theirs = None
    if folder is not None:
        fits = read_fits(folder, backend, THEIR_MODEL)
        theirs = Theirs(DistServe(folder, arguments.python, backend, THEIR_MODEL), fits)
    gpus = arguments.gpus or GPUS[backend][bool(arguments.measured)]
    for path in measured_files(arguments.measured, backend):
        measured = read_measured(path)
        requests = measured.requests
        row = row_of("measured", requests, measured.first_s, measured.end_s)
        compare(requests, place(backend, gpus, requests), theirs, row)
    if arguments.measured:
        return
    lengths = LengthSource.load(arguments.workload) if arguments.workload else sharegpt(folder)
    for rate in map(float, arguments.rates.split(",")):
        requests = online(lengths, rate, arguments.requests, arguments.seed)
        compare(requests, place(backend, gpus, requests), theirs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--distserve", type=Path, help="checkout of DistServe")
    parser.add_argument("--python", default=sys.executable, help="interpreter with simpy, numpy and pandas")
    parser.add_argument("--backend", choices=list(GPUS), default="distserve")
    parser.add_argument("--gpus", type=int, choices=(2, 3), help="number of GPUs, for backend distserve")
    parser.add_argument("--rates", default="1.5,3,4.5", help="requests/s")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--workload", help="request lengths; default: those of DistServe's ShareGPT requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=[], help="measured runs, or a folder of them"
    )
    try:
        run(parser.parse_args(argv))
    except HexGen2Error as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

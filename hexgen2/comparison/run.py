"""Compares strategies: each plans by its own rules, and all are simulated with the same requests.

Offline, all requests arrive at once, and the peak throughput is measured between the first and the last tenth
of them. Online, requests arrive at random: at a share of each contender's own peak to measure its throughput
and latencies, and at the same share of the smallest peak, which all can carry, to measure SLO attainment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster_specs.loader import resolve
from cost_model.architecture import ModelArchitecture
from cost_model.errors import InfeasibleError
from cost_model.registry import CostSource
from hexgen2.cluster import Cluster
from hexgen2.comparison.contenders import Contender
from hexgen2.comparison.phases import WithinTarget, goodput_by_target
from hexgen2.comparison.reference import Reference
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.results import SimulationResult
from hexgen2.search.problem import Phases, Problem, make_problem
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import results, simulation_of, steady_requests
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy, phases_of
from hexgen2.workload.arrivals import LengthSource, offline, online
from hexgen2.workload.lengths import Workload
from hexgen2.workload.requests import Requests

SLO_SCALES = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
ATTAINMENT = 0.9

_ROW_KEYS = (
    *("request_throughput", "output_throughput"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "p90", "p99")),
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How all contenders are measured.

    Attributes
    ----------
    ttft_ms, tpots_ms : targets within which to list the goodput of each choice of phases
    share : rate of online arrivals as a share of the peak
    seconds : approximate length of a simulation, which has FEWEST to MOST requests
    """

    model: str | Path | ModelArchitecture
    seed: int = 0
    share: float = 0.75
    seconds: float = 300.0
    cost_model: str | CostSource | None = None
    pipeline: str = "pipelined"
    links: str = "shared"
    time_limit_s: float | None = None
    ttft_ms: float | None = None
    tpots_ms: tuple[float, ...] = ()

    @property
    def model_name(self) -> str:
        """As the user wrote it."""
        return self.model.name if isinstance(self.model, ModelArchitecture) else str(self.model)


FEWEST, MOST = 1000, 20_000
"""Offline requests per place in the batches: enough that filling and draining them hardly matter."""


@dataclass
class Entry:
    """One contender under one workload; without a placement, only `why` is set."""

    contender: Contender
    workload: str
    why: str = ""
    placement: Placement | None = None
    offline: SimulationResult | None = None
    online: SimulationResult | None = None
    same_rate: SimulationResult | None = None
    attainment: list[float] = field(default_factory=list)
    scale_needed: float | None = None

    @property
    def peak_req_s(self) -> float:
        """Requests/s at full load."""
        return self.offline.steady_request_throughput if self.offline else 0.0

    @property
    def peak_tok_s(self) -> float:
        """Output tokens/s at full load."""
        if self.offline is None or not self.offline.completed:
            return 0.0
        return self.peak_req_s * self.offline.total_output_tokens / self.offline.completed

    def row(self) -> dict[str, Any]:
        """A flat record for tables."""
        row: dict[str, Any] = {
            "workload": self.workload,
            "strategy": self.contender.strategy,
            "policy": self.contender.policy,
            "cluster": self.contender.cluster,
            "infeasible": self.why,
        }
        if self.placement is not None:
            row |= {
                "price_per_hour": self.placement.price_per_hour,
                "replicas": len(self.placement.replicas),
                "predicted_req_s": self.placement.throughput.req_s,
                "peak_req_s": self.peak_req_s,
                "peak_tok_s": self.peak_tok_s,
            }
        for kind, result in (("online", self.online), ("same_rate", self.same_rate)):
            if result is not None:
                row |= {f"{kind}_{key}": getattr(result, key) for key in _ROW_KEYS}
        row["slo_scale"] = self.scale_needed
        return row


@dataclass(frozen=True)
class Comparison:
    """Every contender under every workload, workload by workload; and the goodput of each choice of phases
    within the targets asked for, on the first contender's cluster."""

    settings: Settings
    entries: list[Entry]
    within: list[WithinTarget] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """One flat record for each contender and workload: the rows of the CSV file."""
        return [entry.row() for entry in self.entries]


def compare(
    contenders: Sequence[Contender],
    workloads: Sequence[str | Path | Workload],
    settings: Settings,
    progress: Progress,
) -> Comparison:
    """Run every contender under every workload, workload by workload.

    Raises
    ------
    InputError : unknown cluster, model or workload, or a strategy that does not support the settings
    """
    entries = []
    # All problems are built first, so that wrong inputs are reported before anything takes time.
    lengths_of = {w.name if isinstance(w, Workload) else str(w): LengthSource.load(w) for w in workloads}
    problems = {
        (c, name): _problem(c, lengths.workload, settings)
        for c in contenders
        for name, lengths in lengths_of.items()
    }
    for name, lengths in lengths_of.items():
        row = [_offline(c, problems[c, name], name, lengths, settings, progress) for c in contenders]
        entries += row
        peaks = [entry.peak_req_s for entry in row if entry.peak_req_s > 0]
        for entry in row:
            if entry.peak_req_s > 0:
                progress(f"{name}: {entry.contender.name}, online")
                _online(entry, lengths, settings, settings.share * min(peaks))
    within = []
    for name, lengths in lengths_of.items():
        within += _within_targets(contenders[0], name, lengths.workload, settings, progress)
    return Comparison(settings, entries, within)


def _problem(
    contender: Contender,
    workload: Workload,
    settings: Settings,
    goal: Goal | None = None,
    phases: Phases | None = None,
) -> Problem:
    asked = settings.model, workload, None, None, settings.cost_model, settings.pipeline, goal
    phases = phases or contender.phases or phases_of(contender.strategy)
    return make_problem(contender.spec or contender.cluster, *asked, links=settings.links, phases=phases)


def _within_targets(
    contender: Contender, name: str, workload: Workload, settings: Settings, progress: Progress
) -> list[WithinTarget]:
    """The goodput of each choice of phases on the contender's cluster, within each target."""

    def problem_of(goal: Goal, phases: Phases) -> Problem:
        return _problem(contender, workload, settings, goal, phases)

    options = SearchOptions(seed=settings.seed, time_limit_s=settings.time_limit_s)
    targets = settings.ttft_ms, settings.tpots_ms
    return goodput_by_target(problem_of, name, *targets, find_strategy("hexgen2"), options, progress)


def _offline(
    contender: Contender,
    problem: Problem,
    workload: str,
    lengths: LengthSource,
    settings: Settings,
    progress: Progress,
) -> Entry:
    entry = Entry(contender, workload)
    progress(f"{workload}: {contender.name}, search")
    try:
        options = SearchOptions(seed=settings.seed, time_limit_s=settings.time_limit_s)
        entry.placement = find_strategy(contender.strategy)(problem, options)
    except InfeasibleError as error:
        entry.why = str(error)
        return entry
    progress(f"{workload}: {contender.name}, offline")
    count = max(_count(entry.placement.throughput.req_s, settings), steady_requests(entry.placement))
    requests = offline(lengths, count, settings.seed)
    entry.offline = _simulate(entry, requests)[0]
    return entry


def _online(entry: Entry, lengths: LengthSource, settings: Settings, common_rate: float) -> None:
    rate = settings.share * entry.peak_req_s
    entry.online = _simulate(entry, online(lengths, rate, _count(rate, settings), settings.seed))[0]
    requests = online(lengths, common_rate, _count(common_rate, settings), settings.seed)
    entry.same_rate, records = _simulate(entry, requests)
    placement = entry.placement
    assert placement is not None
    reference = Reference.of(placement.costs())
    if reference is None:
        return
    e2el_s = records.end_s - requests.arrival_s
    scales = e2el_s / reference.e2el_s(requests.isl, requests.osl)
    entry.attainment = [float((scales <= scale).mean()) for scale in SLO_SCALES]
    reached = np.sort(np.where(np.isnan(scales), np.inf, scales))
    needed = float(reached[int(np.ceil(ATTAINMENT * len(reached))) - 1])
    entry.scale_needed = needed if np.isfinite(needed) else None


def _count(rate: float, settings: Settings) -> int:
    return int(min(MOST, max(FEWEST, rate * settings.seconds)))


def _simulate(entry: Entry, requests: Requests) -> tuple[SimulationResult, Records]:
    placement = entry.placement
    assert placement is not None
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    records = Records(requests)
    options = Options(policy=entry.contender.policy, scheduler=entry.contender.scheduler)
    simulation_of(placement, cluster, records, options).run()
    return results(placement, records), records

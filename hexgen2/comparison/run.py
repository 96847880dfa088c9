"""Strategies side by side under the same requests: planned each by its own rules, simulated all alike.

Offline, all requests are there at once and the throughput is that between the first and the last tenth of
them. Online they arrive at random: at a share of each contender's own peak, for its throughput and its
latencies; and at the same share of the smallest peak, so that all can carry it, for SLO attainment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cluster_specs.loader import resolve
from cost_model.errors import InfeasibleError
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.comparison.contenders import Contender
from hexgen2.comparison.reference import Reference
from hexgen2.placement import Placement
from hexgen2.results import SimulationResult
from hexgen2.search.problem import Problem, make_problem
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import results
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.arrivals import LengthSource, offline, online
from hexgen2.workload.requests import Requests

SLO_SCALES = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
ATTAINMENT = 0.9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How all are measured.

    share : of the peak at which requests arrive online
    seconds : of full load that a simulation lasts about, within FEWEST and MOST requests
    """

    model: str
    seed: int = 0
    share: float = 0.75
    seconds: float = 300.0
    cost_model: str = "calibrated"
    pipeline: str = "pipelined"
    links: str = "shared"
    time_limit_s: float | None = None


FEWEST, MOST = 1000, 20_000
TURNS = 10
"""Offline, requests for each place in the running batches, so that filling and emptying them weigh little."""


@dataclass
class Entry:
    """One contender under one workload; without a placement only `why`."""

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


def compare(
    contenders: Sequence[Contender], workloads: Sequence[str], settings: Settings, progress: Progress
) -> list[Entry]:
    """Every contender under every workload, workload by workload.

    Raises
    ------
    InputError : a cluster, model or workload that is not there, or a strategy that cannot be run so
    """
    entries = []
    # All of them first, so that what is wrong is said before anything takes time.
    lengths_of = {name: LengthSource.load(name) for name in workloads}
    problems = {(c, name): _problem(c, name, settings) for c in contenders for name in workloads}
    for name, lengths in lengths_of.items():
        row = [_offline(c, problems[c, name], name, lengths, settings, progress) for c in contenders]
        entries += row
        peaks = [entry.peak_req_s for entry in row if entry.peak_req_s > 0]
        for entry in row:
            if entry.peak_req_s > 0:
                progress(f"{name}: {entry.contender.name}, online")
                _online(entry, lengths, settings, settings.share * min(peaks))
    return entries


def _problem(contender: Contender, workload: str, settings: Settings) -> Problem:
    asked = contender.cluster, settings.model, workload, None, None, settings.cost_model, settings.pipeline
    return make_problem(*asked, links=settings.links)


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
    places = sum(r.max_batch for r in entry.placement.replicas if r.role != "prefill")
    count = max(_count(entry.placement.throughput.req_s, settings), min(MOST, TURNS * places))
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
    costs = make_cost_model(placement.cost_model.name, placement.model, placement.workload.lengths)
    reference = Reference.of(costs)
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
    Simulation(placement, cluster, records, Options(policy=entry.contender.policy)).run()
    return results(placement, records), records

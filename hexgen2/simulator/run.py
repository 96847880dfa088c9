"""Runs a simulation and computes its results, with the same keys as `hexgen2 bench`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from cluster_specs.loader import resolve
from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.layer_ranges import range_of
from hexgen2.placement import Placement
from hexgen2.results import SimulationResult, summarise
from hexgen2.simulator.options import Options
from hexgen2.simulator.ranges.simulation import RANGE_ASSUMPTIONS, RangeSimulation
from hexgen2.simulator.records import Records, ReplicaRecord, RouteRecord
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.requests import Requests

ASSUMPTIONS = [
    "times are those of the cost model; the front end and the network's own delays take none",
    "steps of a decode pipeline go round evenly, a request joins at the next turn",
    "routes that share a link have equal shares of it, unless something else limits them",
    "KV cache is counted in tokens, not in blocks; prompts have no common beginnings",
]

TURNS = 10
"""A run shows a steady state if so many times the requests that are decoded at a time end in it: equal
requests that begin together end together, and only over several turns does that even out."""
FEWEST, MOST = 2000, 20_000
"""Requests of a run that is not told how many."""
BUSY = 0.5
"""Where never more than this share of all places was taken, the load decides and not the steady state."""


def steady_requests(placement: Placement) -> int:
    """How many requests show the placement in its steady state, within FEWEST and MOST."""
    return min(MOST, max(FEWEST, TURNS * placement.places))


def simulation_of(
    placement: Placement,
    cluster: Cluster,
    records: Records,
    options: Options | None = None,
    costs: CostModel | None = None,
) -> Simulation | RangeSimulation:
    """The kind of simulation that a placement takes.

    Raises
    ------
    InputError : see there
    """
    kind = Simulation if placement.layer_ranges is None else RangeSimulation
    return kind(placement, cluster, records, options, costs)


def simulate(
    placement: Placement,
    requests: Requests,
    options: Options | None = None,
    stream: TextIO | None = None,
    progress: Callable[[Simulation], None] | None = None,
    costs: CostModel | None = None,
) -> SimulationResult:
    """Run requests through a placement; the same arguments give the same result.

    Parameters
    ----------
    stream : receives a CSV row for each request that ends
    progress : called every few hundred events
    costs : replaces the placement's cost model

    Raises
    ------
    InputError : see Simulation
    """
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    records = Records(requests, stream=stream)
    simulation_of(placement, cluster, records, options, costs).run(progress)
    return results(placement, records)


def results(placement: Placement, records: Records) -> SimulationResult:
    """The results of a finished simulation: totals, and figures per replica and route."""
    requests, goal = records.requests, placement.goal
    targets = {"ttft": goal.ttft_ms, "tpot": goal.tpot_ms}
    itl = np.frombuffer(records.gap_s, dtype=float), np.frombuffer(records.gaps, dtype=np.int64)
    found = summarise(
        records.sent_s,
        records.first_s,
        records.end_s,
        requests.isl,
        requests.osl,
        itl,
        {name: value for name, value in targets.items() if value is not None},
    )
    duration = found.duration_s or 1.0
    return SimulationResult(
        placement=placement.strategy,
        cluster=placement.cluster.name,
        model=placement.model.name,
        requests=requests.source,
        predicted_req_s=placement.throughput.req_s,
        **vars(found),
        replicas={name: _replica(record, duration) for name, record in records.replicas.items()},
        routes=[_route(*ends, record, duration) for ends, record in records.routes.items()],
        failures=dict(Counter(records.failed.values())),
        assumptions=[
            *(ASSUMPTIONS if placement.layer_ranges is None else RANGE_ASSUMPTIONS),
            *_too_few(placement, records),
            *_moved(records),
        ],
    )


def _too_few(placement: Placement, records: Records) -> list[str]:
    """Says where a busy placement has too few requests for a steady state."""
    ended, places = int(np.count_nonzero(~np.isnan(records.end_s))), placement.places
    counted = placement.replicas
    if placement.layer_ranges is not None:  # Each request is on several replicas, one of which begins.
        counted = [replica for replica in counted if range_of(replica)[0] == 0]
    running = sum(records.replicas[replica.id].peak_running for replica in counted)
    if ended >= TURNS * places or running < BUSY * places:
        return []
    return [
        f"{ended} requests are few for a steady state: up to {places} are decoded at a time; give "
        f"{TURNS * places} or more"
    ]


def _moved(records: Records) -> list[str]:
    """Says where requests were not as planned, so that shares of routes moved."""
    if not records.moved:
        return []
    at_s, why = records.moved[-1]
    return [f"shares of routes moved {len(records.moved)} times, at last after {at_s:.0f} s: {why}"]


def _route(source: str, target: str, record: RouteRecord, duration_s: float) -> dict[str, Any]:
    after_s = record.after_s / record.requests if record.requests else 0.0
    return {
        "from": source,
        "to": target,
        "requests": record.requests,
        "bytes": record.bytes,
        "utilisation": record.requests / duration_s / record.capacity_req_s,
        "mean_after_prefill_ms": after_s * 1e3,
    }


def _replica(record: ReplicaRecord, duration_s: float) -> dict[str, float]:
    served = record.requests or 1
    moved = {"redispatches": record.redispatches, "hauled_bytes": record.hauled_bytes}
    return {
        "requests": record.requests,
        "utilisation": record.busy_s / duration_s,
        "mean_wait_ms": record.waited_s / served * 1e3,
        "mean_queue": record.waited_s / duration_s,
        "mean_running": record.running_s / duration_s,
        "peak_running": record.peak_running,
        "preemptions": record.preemptions,
        **(moved if record.redispatches else {}),
    }

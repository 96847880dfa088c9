"""Requests/s of a placement at full load: what the simulator reaches in its steady state.

Formulas add up mean steps. They know nothing of answers that end together and start the next ones together,
of prompts that wait for room, or of routes whose queues differ; where that matters, the simulator's figure
counts.
"""

from __future__ import annotations

from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise.trial import SEEDS
from hexgen2.results import steady_rate
from hexgen2.simulator.fleet import Fleet
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.arrivals import LengthSource, online

BEYOND = 1.15
"""So many times the requests/s that are planned arrive."""
REACHED = 0.97
"""A fleet that serves this share of all arrivals may be faster still."""
RUNS = 4


def full_load_req_s(placement: Placement, cluster: Cluster, seed: int, requests: int) -> float:
    """Requests/s in the steady state while more arrive than the placement can serve."""
    fleet = Fleet(placement, cluster, Options())
    rate = found = placement.throughput.req_s
    for run in range(RUNS):
        rate = found * BEYOND
        asked = online(LengthSource(placement.workload), rate, requests, (SEEDS, seed, run))
        records = Records(asked)
        Simulation(placement, cluster, records, Options(), fleet=fleet).run()
        found = steady_rate(records.end_s)
        if found < REACHED * rate:
            break
    return found

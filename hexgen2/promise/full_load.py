"""Requests/s of a placement at full load: what the simulator reaches in its steady state.

Formulas add up mean steps, and are within 3 % of that where requests are alike. They know nothing of long
requests that wait at the head of the queue while others would fit, of KV caches that wait for a full link and
hold room in decode replicas meanwhile, or of prompts that stay in phase in a colocated pipeline, since equal
answers that begin together end together; and of mixed replicas they know the region, but not how evenly work
for others comes.
"""

from __future__ import annotations

from collections.abc import Callable

from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise.trial import Trials

BEYOND = 1.15
"""So many times the requests/s that are planned arrive."""
REACHED = 0.95
"""A fleet that serves this share of all arrivals may be faster still."""
TOLERATED = 0.02
"""Formulas that are off by less are not corrected."""
TURNS = 8
"""Requests of a run for each that is decoded at a time, at most."""
FEWEST, MOST = 400, 16_000
"""Requests of a run at least; fleets that would need more than that are not simulated."""
_RUNS = 3


def formulas_do(placement: Placement) -> bool:
    """Whether formulas are known to be close: all requests are alike, on replicas that do one phase or have
    one stage and work for themselves."""
    in_phase = any(r.role == "colocated" and len(r.stages) > 1 for r in placement.replicas)
    mixed = any(r.role == "mixed" for r in placement.replicas)
    return not (in_phase or mixed or len(placement.workload.classes) > 1)


def simulated_factor(
    placement: Placement, cluster: Cluster, seed: int, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """The requests/s of the placement in the simulator's steady state over those planned, as far as runs go
    until it is time to stop; None where they have shown nothing yet. 1 where the fleet holds more requests
    than are worth simulating."""
    if TURNS * placement.places > MOST:
        return 1.0
    count = max(FEWEST, TURNS * placement.places)
    planned = placement.throughput.req_s
    trials = Trials(placement, cluster, placement.goal, seed, stop=stop)
    rate, served = planned, 0.0
    for draw in range(_RUNS):
        rate *= BEYOND
        found = trials.served_req_s(rate, count, draw, TURNS)
        served = found or served
        if served < REACHED * rate or stop():
            break
    if served <= 0:
        return None if stop() else 1.0
    return served / planned

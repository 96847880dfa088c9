"""Planned requests/s against the simulator at full load, with requests that the search has not seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hexgen2
from hexgen2.checks import violations
from hexgen2.cluster import Cluster
from hexgen2.promise.full_load import TOLERATED, simulated_factor
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import FEWEST, MOST, TURNS, steady_requests
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.arrivals import LengthSource, online

CASES = (
    ("hexgen2-case-study", "llama-2-13b", "online", "hexgen2"),
    ("hexgen2-setting-2", "llama-2-70b", "LPLD", "vllm"),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[-1])
def placement(request) -> hexgen2.Placement:
    cluster, model, workload, strategy = request.param
    return hexgen2.search(cluster=cluster, model=model, workload=workload, strategy=strategy, time_limit_s=10)


def test_mixtures_and_pipelines_of_both_phases_are_planned_as_simulated(placement):
    found = hexgen2.simulate(
        placement,
        request_rate=1.15 * placement.throughput.req_s,
        num_requests=TURNS * placement.places,
        seed=99,
    )
    # What is tolerated, and the luck of one run.
    assert found.steady_request_throughput == pytest.approx(placement.throughput.req_s, rel=TOLERATED + 0.02)


def test_corrected_placements_pass_the_checkers_and_keep_below_their_bound(placement):
    assert not violations(placement)
    assert placement.throughput.req_s <= placement.bound.req_s * (1 + 1e-9)
    gap = 1 - placement.throughput.req_s / placement.bound.req_s
    assert placement.bound.gap == pytest.approx(gap, abs=1e-8)


def test_runs_are_long_enough_for_a_steady_state_unless_told_otherwise(placement):
    enough = steady_requests(placement)
    assert FEWEST <= enough <= MOST and (enough == MOST or enough >= TURNS * placement.places)
    rate = 1.2 * placement.throughput.req_s
    assert hexgen2.simulate(placement, request_rate=rate).completed == enough
    few = hexgen2.simulate(placement, request_rate=rate, num_requests=placement.places * 2)
    assert any("few for a steady state" in each for each in few.assumptions)
    idle = hexgen2.simulate(placement, request_rate=rate / 20, num_requests=200)
    assert not any("few for a steady state" in each for each in idle.assumptions)


def test_a_run_that_has_to_stop_says_what_it_has_shown(placement):
    cluster = Cluster.from_spec(placement.cluster)
    whole = simulated_factor(placement, cluster, 0)
    assert whole is not None
    shown = {}
    for looks in (2, 1000, 2000):
        left = itertools.count(looks, -1)
        shown[looks] = simulated_factor(placement, cluster, 0, lambda left=left: next(left) < 0)
    assert shown[2] is None
    told = [factor for factor in shown.values() if factor is not None]
    assert told and all(factor == pytest.approx(whole, rel=0.1) for factor in told)


def test_served_tokens_are_those_of_the_requests_that_ended_and_a_share_of_those_that_run(placement):
    cluster = Cluster.from_spec(placement.cluster)
    requests = online(LengthSource(placement.workload), 1.2 * placement.throughput.req_s, 600, (7,))
    records = Records(requests)
    seen = list[tuple[float, float]]()

    def look(simulation: Simulation) -> None:
        prompts, answers = simulation.served_tokens()
        ended, begun = ~np.isnan(records.end_s), ~np.isnan(records.first_s)
        for served, lengths in ((prompts, requests.isl), (answers, requests.osl)):
            assert lengths[ended].sum() <= served <= lengths[begun].sum()
        assert answers > requests.osl[ended].sum() or not simulation.ended < np.count_nonzero(begun)
        seen.append((prompts, answers))

    simulation = Simulation(placement, cluster, records)
    simulation.run(look, 100)
    look(simulation)
    assert seen == sorted(seen) and len(seen) > 10
    assert seen[-1] == (requests.isl.sum(), requests.osl.sum())

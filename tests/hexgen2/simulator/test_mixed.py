"""Mixed replicas in the simulator: they keep what the plan says of them, and lose nothing."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
from placements import one_of_each_role

from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.other_lengths import with_lengths
from hexgen2.promise.trial import Trials
from hexgen2.search.problem import make_problem
from hexgen2.simulator.options import Failure, Options
from hexgen2.simulator.pipelined_replica import PipelinedReplica
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import simulate
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.hexgen2 import search
from hexgen2.workload.arrivals import LengthSource, online

CASES = [("hexgen2-homogeneous", "llama-2-70b", "LPHD"), ("hexgen2-setting-4", "llama-2-70b", "HPHD")]


@functools.cache
def placement_of(cluster: str, model: str, workload: str) -> Placement:
    problem = make_problem(cluster, model, workload, phases="flexible")
    found = search(problem, SearchOptions(simulated=False))
    assert any(replica.role == "mixed" for replica in found.replicas)
    return found


def run(placement: Placement, share: float, count: int, options: Options | None = None):
    """The finished simulation of so many requests at a share of the planned rate, and its records."""
    requests = online(LengthSource(placement.workload), share * placement.throughput.req_s, count, (5,))
    records = Records(requests)
    simulation = Simulation(placement, Cluster.from_spec(placement.cluster), records, options or Options())
    simulation.run()
    return simulation, records


@pytest.mark.parametrize("case", CASES)
def test_the_planned_rate_is_reached_at_full_load(case):
    placement = placement_of(*case)
    trials = Trials(placement, Cluster.from_spec(placement.cluster), placement.goal, 3)
    served = trials.served_req_s(1.2 * placement.throughput.req_s, 10 * placement.places, 0)
    assert served == pytest.approx(placement.throughput.req_s, rel=0.08)


@pytest.mark.parametrize("case", CASES)
def test_every_request_ends_routes_carry_their_shares_and_all_memory_is_free_again(case):
    placement = placement_of(*case)
    simulation, records = run(placement, 0.8, 3000)
    assert not records.failed and not np.isnan(records.end_s).any()
    assert (records.first_s <= records.end_s).all() and (records.first_s > records.sent_s).all()
    for name, budget in simulation.kv_budgets.items():
        assert not budget.held and budget.held_tokens == 0, name
    for name, replica in simulation._colocated_replicas.items():
        if isinstance(replica, PipelinedReplica):
            assert replica._free_tokens == simulation.kv_budgets[name].kv_budget_tokens
        else:
            assert replica._held_tokens == 0 and not replica._outgoing
    taken = Counter(zip(records.prefill, records.decode, strict=True))
    for route in placement.routes:
        share = route.flow_req_s / placement.throughput.req_s
        assert taken[route.from_, route.to] / 3000 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_with_a_mixed_replica(case):
    placement = placement_of(*case)
    mixed = [replica.id for replica in placement.replicas if replica.role == "mixed"]
    at_s = 400 / placement.throughput.req_s
    simulation, records = run(placement, 0.5, 1500, Options(failures=[Failure(at_s, mixed[0])]))
    assert not records.failed and not np.isnan(records.end_s).any()
    late = np.flatnonzero(records.sent_s > at_s)
    assert mixed[0] not in {records.prefill[k] for k in late} | {records.decode[k] for k in late}
    for name, budget in simulation.kv_budgets.items():
        assert name == mixed[0] or not budget.held


def test_shares_move_with_longer_outputs_and_more_is_served():
    placement = one_of_each_role()
    planned = placement.workload
    longer = with_lengths(placement, planned.isl, 1.5 * planned.osl).workload
    requests = online(LengthSource(longer), placement.throughput.req_s, 6000, (5,))
    moved, kept = (simulate(placement, requests, Options(shift_load=shift)) for shift in (True, False))
    assert moved.completed == kept.completed == 6000
    assert moved.steady_request_throughput > kept.steady_request_throughput
    assert any("shares of routes moved" in line for line in moved.assumptions)
    assert not any("shares of routes moved" in line for line in kept.assumptions)


def test_shares_stay_while_no_request_waits():
    placement = one_of_each_role()
    longer = with_lengths(placement, placement.workload.isl, 1.5 * placement.workload.osl).workload
    requests = online(LengthSource(longer), 0.5 * placement.throughput.req_s, 2000, (5,))
    moved, kept = (simulate(placement, requests, Options(shift_load=shift)) for shift in (True, False))
    assert moved.to_dict() == kept.to_dict()


@pytest.mark.parametrize("case", CASES)
def test_lengths_as_planned_give_the_same_results_whether_shares_may_move_or_not(case):
    placement = placement_of(*case)
    requests = online(LengthSource(placement.workload), 1.2 * placement.throughput.req_s, 3000, (6,))
    moved, kept = (simulate(placement, requests, Options(shift_load=shift)) for shift in (True, False))
    assert moved.to_dict() == kept.to_dict()


def test_shares_move_after_a_loss_too():
    placement = one_of_each_role()
    longer = with_lengths(placement, placement.workload.isl, 2 * placement.workload.osl).workload
    requests = online(LengthSource(longer), placement.throughput.req_s, 2500, (7,))
    lost = next(replica.id for replica in placement.replicas if replica.role == "prefill")
    found = simulate(placement, requests, Options(failures=[Failure(20.0, lost)]))
    assert found.completed == 2500 and not found.failures
    assert any("shares of routes moved" in line for line in found.assumptions)

"""Placements with attention workers, simulated: all tokens come, memory holds, steps take what they must."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from cost_model.base import Work
from cost_model.errors import InputError
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.headwise_times import HeadwiseTimes, step_times
from hexgen2.search.problem import make_problem
from hexgen2.simulator.headwise_replica import HeadwiseReplica
from hexgen2.simulator.options import Failure, HeadOptions, Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import results
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.baselines import hetis
from hexgen2.workload.arrivals import LengthSource, online


@functools.cache
def placement_of(model: str = "llama-2-70b", workload: str = "online") -> Placement:
    found = hetis.search(make_problem("hetis-12", model, workload), SearchOptions())
    assert found.attention_workers
    return found


def run(placement: Placement, share: float, count: int, options: Options | None = None, seed: int = 5):
    """The finished simulation of so many requests at a share of the planned rate, and its records."""
    requests = online(LengthSource(placement.workload), share * placement.throughput.req_s, count, (seed,))
    records = Records(requests)
    simulation = Simulation(placement, Cluster.from_spec(placement.cluster), records, options or Options())
    simulation.run()
    return simulation, records


def replicas_of(simulation: Simulation) -> list[HeadwiseReplica]:
    found = list(simulation._colocated_replicas.values())
    assert all(isinstance(replica, HeadwiseReplica) for replica in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("model", ["llama-2-70b", "llama-2-13b"])
def test_every_request_ends_and_nothing_is_left(model, monkeypatch):
    placement, fullest = placement_of(model), []
    step_s = HeadwiseReplica._step_s

    def watched(self, *of):
        for allocation in self._allocations:
            fullest.append(float((allocation.held_bytes / allocation._capacity).max()))
        return step_s(self, *of)

    monkeypatch.setattr(HeadwiseReplica, "_step_s", watched)
    simulation, records = run(placement, 2.0, 500)
    assert not records.failed and not np.isnan(records.end_s).any()
    assert max(fullest) <= 1 + 1e-9  # no memory ever holds more than it can
    assert max(fullest) > 0.5
    for replica in replicas_of(simulation):
        assert not replica._running
        for allocation in replica._allocations:
            assert np.abs(allocation.held_bytes).max() < 1.0 and not allocation._total.any()


def test_memory_is_balanced_before_anybody_is_preempted():
    """Section 7.4: without it requests on exhausted devices are preempted, though others have room."""
    placement = placement_of()
    records = [
        run(placement, 2.0, 600, Options(heads=HeadOptions(balances_memory=balances)))[1]
        for balances in (True, False)
    ]
    preempted = [sum(r.preemptions for r in each.replicas.values()) for each in records]
    moved = [sum(r.redispatches for r in each.replicas.values()) for each in records]
    assert preempted[0] < preempted[1] and moved[0] > moved[1]
    assert sum(r.hauled_bytes for r in records[0].replicas.values()) > 0
    served = [results(placement, each).request_throughput for each in records]
    assert served[0] > served[1]


def test_the_same_arguments_give_the_same_result():
    placement = placement_of()
    one, two = (run(placement, 1.2, 200)[1] for _ in range(2))
    assert one.end_s.tolist() == two.end_s.tolist()
    off = Options(heads=HeadOptions(profile_error=0.2, seed=3))
    wrong, again = (run(placement, 1.2, 200, off)[1] for _ in range(2))
    assert wrong.end_s.tolist() == again.end_s.tolist() != one.end_s.tolist()


def test_steps_take_what_the_prediction_says():
    """Alike requests, dispatched one by one, take a step as long as with heads divided at will, up to whole
    heads."""
    placement = placement_of()
    replica, costs = placement.replicas[0], placement.costs()
    cluster = Cluster.from_spec(placement.cluster)
    times = step_times(replica, placement.workers_of(replica.id), cluster, costs, "pipelined")
    assert isinstance(times, HeadwiseTimes)
    records = Records(online(LengthSource(placement.workload), 1.0, 1, (0,)))
    simulation = Simulation(placement, cluster, records)
    own = replicas_of(simulation)[0]
    count, tokens = 40, 900
    for allocation in own._allocations:
        assert allocation.place({index: float(tokens) for index in range(count)})
    heads_s = [
        own._attention_s(s, count, each.heads(each.rows(range(count))), np.full(count, tokens), [0.0] * 3)
        for s, each in enumerate(own._allocations)
    ]
    work = Work(0.0, 0.0, float(count), 0.0, float(count))
    step = times.step(work._replace(context=float(count * tokens)))[0]
    for s, (dense_s, whole_s) in enumerate(zip(times.dense(work)[0], step, strict=True)):
        assert math.isclose(dense_s + times.layers[s] * heads_s[s], whole_s, rel_tol=0.05)


def test_throughput_is_near_the_plan():
    """The plan counts no moves and divides heads at will, but knows no prompts that ride along."""
    placement = placement_of()
    _, records = run(placement, 1.3, 1200)
    served = results(placement, records).steady_request_throughput
    assert 0.85 < served / placement.throughput.req_s < 1.35


def test_a_lost_replica_s_requests_go_on_elsewhere():
    placement = placement_of()
    options = Options(failures=[Failure(20.0, placement.replicas[0].id)])
    _, records = run(placement, 0.5, 150, options)
    assert not records.failed and not np.isnan(records.end_s).any()


def test_other_policies_are_refused():
    with pytest.raises(InputError, match="--policy"):
        run(placement_of(), 1.0, 1, Options(policy="chunked"))

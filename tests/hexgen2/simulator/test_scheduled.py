"""Schedulers in simulations: every request ends once, whatever is lost; unlike instances are told apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hexgen2
from cluster_specs.loader import resolve
from cost_model.errors import InputError
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.schedulers import OUTPUT_LENGTHS, SCHEDULERS
from hexgen2.search.problem import make_problem
from hexgen2.simulator.options import Failure, Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import results
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.requests import Requests
from runtime.routing.output_lengths import OutputLengths


def place(strategy: str, cluster: str, model: str) -> Placement:
    return find_strategy(strategy)(make_problem(cluster, model, "online"), SearchOptions(simulated=False))


@pytest.fixture(scope="module")
def unlike() -> Placement:
    """Four instances of two V100, and one of an A800."""
    return place("huawei", "huawei-v100-a800", "llama-2-13b")


@pytest.fixture(scope="module")
def split() -> Placement:
    """Prefill and decode replicas."""
    return place("distserve", "hexgen2-homogeneous", "llama-2-70b")


def requests(count: int, rate: float | None, seed: int) -> Requests:
    rng = np.random.default_rng(seed)
    isl, osl = rng.integers(20, 1500, count), rng.integers(2, 600, count)
    arrival_s = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return Requests(arrival_s, isl, osl, "test")


def run(placement: Placement, load: Requests, **options) -> Simulation:
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    simulation = Simulation(placement, cluster, Records(load), Options(**options))
    simulation.run()
    return simulation


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("kind", ["unlike", "split"])
def test_every_request_ends_though_a_replica_is_lost(kind, scheduler, request):
    placement = request.getfixturevalue(kind)
    lost = max(placement.replicas, key=lambda replica: (replica.role != "prefill", replica.capacity_req_s)).id
    load = requests(300, 30.0, 1)
    found = run(placement, load, scheduler=scheduler, failures=[Failure(4.0, lost)])
    left = [name for name, budget in found.kv_budgets.items() if len(budget.backlog) or budget.held]
    assert left == [] and all(budget.backlog.work == 0 for budget in found.kv_budgets.values())
    whole = results(placement, found.records)
    if kind == "unlike" or len([r for r in placement.replicas if r.role != "prefill"]) > 1:
        assert (whole.completed, whole.failed) == (300, 0)
    assert whole.completed + whole.failed == 300
    again = run(placement, load, scheduler=scheduler, failures=[Failure(4.0, lost)])
    assert results(placement, again.records) == whole


@pytest.mark.parametrize("lengths", OUTPUT_LENGTHS)
def test_unlike_instances_are_told_apart(unlike, lengths):
    """All at once, to engines that queue requests themselves: round-robin waits for the weaker instances."""
    load = requests(1500, None, 2)
    found = {
        scheduler: results(
            unlike,
            run(unlike, load, scheduler=scheduler, policy="prefill-first", output_lengths=lengths).records,
        )
        for scheduler in ("round-robin", "workload-aware", "single")
    }
    best = found["workload-aware"]
    assert best.request_throughput > found["round-robin"].request_throughput
    assert best.request_throughput > 2 * found["single"].request_throughput
    counts = {name: replica["requests"] for name, replica in best.replicas.items()}
    assert lengths == "distribution" or counts["colocated-4"] > 1.2 * max(
        counts[f"colocated-{k}"] for k in range(4)
    )
    single = {name for name, replica in found["single"].replicas.items() if replica["requests"]}
    assert single == {"colocated-4"}


def test_decode_replicas_are_chosen_by_their_work():
    placement = place("distserve", "hetis-12", "llama-2-13b")
    load = requests(400, 0.6 * placement.throughput.req_s, 3)
    flow, aware = (
        results(placement, run(placement, load, scheduler=each).records)
        for each in ("flow", "workload-aware")
    )
    assert flow.completed == aware.completed == 400
    assert flow != aware


class Exact(OutputLengths):
    """Knows every output in advance, and is told of every end."""

    def __init__(self) -> None:
        self.learned: list[int] = []

    def predict(self, request) -> float:
        return request.capacity_tokens - request.prompt_tokens

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        assert output_limit is None
        self.learned.append(output_tokens)


def test_a_predictor_of_ones_own(unlike):
    predictor = Exact()
    found = hexgen2.simulate(
        unlike, request_rate=10, num_requests=200, scheduler="workload-aware", output_lengths=predictor
    )
    assert found.completed == 200 and len(predictor.learned) == 200
    assert sum(predictor.learned) == found.total_output_tokens


def test_unknown_names_are_refused(unlike):
    for wrong in ({"scheduler": "fastest"}, {"output_lengths": "s3"}):
        with pytest.raises(InputError, match="use one of"):
            hexgen2.simulate(unlike, request_rate=1, num_requests=5, **wrong)


@pytest.mark.parametrize("scheduler", ["workload-aware", "round-robin", "weighted"])
def test_replicas_of_a_new_placement_are_known(scheduler):
    """After a re-plan, requests go to replicas that were not there before."""
    old = place("hexgen2", "hexgen2-case-study", "llama-2-13b")
    new = hexgen2.replan(old, lost=[old.replicas[0].gpus[0]], time_limit_s=2)
    load = requests(300, 20.0, 4)
    found = hexgen2.simulate(
        old,
        request_rate=20,
        num_requests=len(load),
        replans=[(new, 3.0)],
        failures=[(old.replicas[0].id, 1.0)],
        scheduler=scheduler,
    )
    assert found.completed == 300

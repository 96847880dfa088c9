"""Room that requests hold in decode replicas while others compute their prompts."""

from __future__ import annotations

import pytest
from problems import problem_from

from hexgen2.cluster import Cluster
from hexgen2.placement import SearchRecord
from hexgen2.promise.full_load import simulated_factor
from hexgen2.search.build import build_placement
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, Solution

NODES = [
    {"name": "fast", "accelerators": "H100:4"},
    *({"name": f"slow-{k}", "accelerators": "V100-32GB:8"} for k in range(3)),
    {"name": "decode", "accelerators": "A100-80GB:2"},
]
NETWORK = {"default": {"bandwidth_gbit_s": 800, "latency_us": 20}}
FAST = tuple(Group("prefill", ((0, 1),)) for _ in range(4))
SLOW = tuple(Group("prefill", ((node, 8),)) for node in (1, 2, 3))
DECODE = Group("decode", ((4, 2),))


def evaluated(senders: tuple[Group, ...]):
    problem = problem_from({"name": "waits", "nodes": NODES, "network": NETWORK}, "opt-30b", "HPLD")
    return problem, Evaluator(problem).evaluate(Solution((*senders, DECODE)))


def test_answers_are_planned_beside_the_prompts_of_slow_senders() -> None:
    (_, beside_fast), (_, beside_slow) = evaluated(FAST), evaluated(SLOW)
    fast, slow = beside_fast.decode[0], beside_slow.decode[0]
    assert fast.plan == slow.plan
    assert slow.capacity_req_s < 0.97 * fast.capacity_req_s
    assert fast.capacity_req_s <= fast.plan.capacity_req_s


@pytest.mark.parametrize("senders", [FAST, SLOW], ids=["fast", "slow"])
def test_the_simulator_serves_what_is_planned(senders: tuple[Group, ...]) -> None:
    problem, found = evaluated(senders)
    record = SearchRecord(seconds=0.0, seed=0, evaluations=1)
    placement = build_placement(problem, found, "by-hand", record)
    factor = simulated_factor(placement, Cluster.from_spec(placement.cluster), 3)
    assert found.flow.value == pytest.approx(found.decode[0].capacity_req_s, rel=1e-6)
    assert factor == pytest.approx(1.0, abs=0.06)

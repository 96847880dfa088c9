"""Requests/s of colocated replicas within targets: what their queues say, and no more than without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.pipeline import Pace
from cost_model.queueing import DecodeQueue, ServiceMix
from hexgen2.goal import Goal
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.targets import Targets
from hexgen2.search.problem import counts_of, make_problem


@given(
    st.floats(0.5, 50),
    st.floats(0.01, 2),
    st.floats(0.05, 5),
    st.integers(1, 200),
    st.floats(0.005, 0.1),
    st.floats(0.7, 0.99),
)
def test_both_phases_together_are_in_time_as_often_as_asked(
    capacity, latency_s, ttft_s, places, tpot_s, attainment
):
    targets = Targets(ttft_s, 0.2, attainment, ServiceMix((1.0,), (1.0,)), 100.0)
    decodes = DecodeQueue(places, lambda requests: tpot_s * (1 + requests / 300), 100.0)
    prompts = Pace(capacity, latency_s)
    rest = decodes.largest_rate(targets.share)
    found = targets.both_req_s(prompts, 1.0, decodes, rest)
    queue = targets.prefill_queue(prompts, 1.0)
    assert found >= min(rest, queue.largest_rate(ttft_s, targets.share))
    if found > 0:
        rate = found * (1 - 1e-6)
        both = queue.attained(rate, ttft_s) * decodes.attained(rate, targets.tpot_s)
        assert both >= attainment - 1e-3


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(
    "targets", [{"tpot_ms": 80.0}, {"ttft_ms": 4000.0}, {"ttft_ms": 2000.0, "tpot_ms": 60.0}]
)
def test_no_target_makes_a_colocated_replica_serve_more(gpus, targets):
    free = make_problem("hexgen2-homogeneous", "qwen3-32b", None, 4000, 500, phases="flexible")
    bound = make_problem(
        "hexgen2-homogeneous",
        "qwen3-32b",
        None,
        4000,
        500,
        phases="flexible",
        goal=Goal(objective="goodput", **targets),
    )
    counts = counts_of({0: gpus})
    most, within = Planner(free).plan("colocated", counts), Planner(bound).plan("colocated", counts)
    assert most is not None and within is not None
    assert 0 < within.capacity_req_s <= most.capacity_req_s * (1 + 1e-9)

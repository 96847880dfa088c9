"""Profiles find the numbers that made the runs, and say how far off they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexgen2.cluster import Cluster
from hexgen2.headwise.profile import AttentionRun, TransferRun, fit, kv_head_token_bytes, profiled
from hexgen2.prediction.headwise_times import HeadwiseTimes, step_times
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.baselines import hetis

GRID = [(h, g) for h in (64, 512, 2048, 8192) for g in (1e6, 1e8, 3e8, 1e9)]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-10, 1e-6),
    st.floats(1e-13, 1e-10),
    st.floats(0, 1e-4),
    st.floats(1e-11, 1e-7),
    st.floats(1e-7, 1e-3),
)
def test_linear_runs_give_their_own_numbers(head_s, byte_s, fixed_s, vector_s, exchange_s):
    runs = [AttentionRun(h, g, head_s * h + byte_s * g + fixed_s) for h, g in GRID]
    sent = [TransferRun(d, vector_s * d + exchange_s) for d in (64, 512, 4096, 16384)]
    found = fit(runs, sent)
    assert found.error < 1e-5 and found.exchange_error < 1e-5
    for run in runs:
        predicted = found.head_s * run.heads + found.kv_byte_s * run.kv_bytes + found.fixed_s
        assert math.isclose(predicted, run.seconds, rel_tol=1e-3)
    for run in sent:
        assert math.isclose(found.vector_s * run.vectors + found.exchange_s, run.seconds, rel_tol=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 0.3))
def test_the_error_is_that_of_the_runs(seed, spread):
    rng = np.random.default_rng(seed)
    runs = [
        AttentionRun(h, g, (1e-8 * h + 1e-12 * g + 1e-5) * rng.uniform(1 - spread, 1 + spread))
        for h, g in GRID
    ]
    found = fit(runs)
    errors = [
        abs(found.head_s * r.heads + found.kv_byte_s * r.kv_bytes + found.fixed_s - r.seconds) / r.seconds
        for r in runs
    ]
    assert math.isclose(found.error, np.mean(errors), rel_tol=1e-3)
    assert 0 < found.error <= spread * 1.2
    assert min(found.head_s, found.kv_byte_s, found.fixed_s) >= 0


def test_no_number_is_negative():
    runs = [AttentionRun(h, g, 1e-12 * g + 1e-6) for h, g in GRID]
    runs[0] = runs[0]._replace(seconds=1e-3)
    found = fit(runs)
    assert min(found.head_s, found.kv_byte_s, found.fixed_s) >= 0
    with pytest.raises(ValueError, match="runs"):
        fit([])


@pytest.mark.parametrize("cost_model", ["calibrated", "vllm"])
def test_profiles_of_a_placement(cost_model):
    placement = hetis.search(
        make_problem("hetis-12", "llama-2-70b", "online", cost_model=cost_model), SearchOptions()
    )
    replica, costs = placement.replicas[0], placement.costs()
    cluster = Cluster.from_spec(placement.cluster)
    times = step_times(replica, placement.workers_of(replica.id), cluster, costs, "pipelined")
    assert isinstance(times, HeadwiseTimes)
    primary, *workers = profiled(times, 0)
    assert primary.vector_s == primary.exchange_s == 0
    assert (
        kv_head_token_bytes(costs.model) * costs.model.kv_heads * costs.model.layers
        == costs.model.kv_bytes_per_token
    )
    for worker in workers:
        assert worker.kv_byte_s > primary.kv_byte_s  # a P100 reads more slowly than an A100
        assert worker.exchange_s >= 2 * 20e-6
        assert worker.exchange_error < 1e-4
    assert all(profile.error < 0.25 for profile in (primary, *workers))

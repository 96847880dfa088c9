"""The three readings of a pipeline, on a pipeline small enough to compute by hand, and on Appendix E.2."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_specs.loader import parse_cluster
from cost_model.models import find_model
from cost_model.pipeline import (
    PIPELINE_SEMANTICS,
    PhaseTimes,
    colocated_pace,
    decode_pace,
    micro_batch,
    prefill_pace,
)
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Problem
from hexgen2.workload.classes import load_workload

STAGES, HOPS = [0.2, 0.5, 0.1], [0.05, 0.05]
times = st.floats(1e-6, 10)


def test_literal_prefill_is_batch_over_the_sum():
    pace = prefill_pace("literal", STAGES, HOPS, batch=3)
    assert (pace.capacity_req_s, pace.latency_s) == pytest.approx((3 / 0.9, 0.9))


def test_pipelined_prefill_keeps_the_pace_of_its_slowest_stage():
    pace = prefill_pace("pipelined", STAGES, HOPS, batch=3)
    assert (pace.capacity_req_s, pace.latency_s) == pytest.approx((3 / 0.5, 0.9))


def test_a_slow_hop_is_a_bottleneck_too():
    assert prefill_pace("pipelined", STAGES, [0.05, 0.8], batch=2).capacity_req_s == pytest.approx(2 / 0.8)


def test_optimistic_prefill_is_the_papers():
    """Appendix A divides the time period by the latency, under any decode assumption."""
    assert prefill_pace("paper_optimistic", STAGES, HOPS, 3) == prefill_pace("literal", STAGES, HOPS, 3)


def test_literal_decode_is_batch_over_the_sum():
    """12 requests, each with 10 tokens of 0.9 s."""
    pace = decode_pace("literal", STAGES, HOPS, batch=12, osl=10)
    assert (pace.capacity_req_s, pace.latency_s) == pytest.approx((12 / 9, 0.9))


def test_pipelined_decode_shares_the_batch():
    """Three micro-batches of 4 take turns of 0.5 s: each of the 12 requests gets a token every 1.5 s."""
    assert micro_batch("pipelined", 12, 3) == 4
    pace = decode_pace("pipelined", STAGES, HOPS, batch=12, osl=10)
    assert (pace.capacity_req_s, pace.latency_s) == pytest.approx((12 / 15, 1.5))


def test_optimistic_decode_fills_every_stage():
    """As above, but with 12 requests in each of the three micro-batches."""
    assert micro_batch("paper_optimistic", 12, 3) == 12
    pace = decode_pace("paper_optimistic", STAGES, HOPS, batch=12, osl=10)
    assert (pace.capacity_req_s, pace.latency_s) == pytest.approx((36 / 15, 1.5))


def test_hops_that_outlast_the_turns_are_waited_for():
    """Two stages of 0.1 s with 0.5 s in between: the first waits for its own token, 0.7 s later."""
    assert decode_pace("pipelined", [0.1, 0.1], [0.5], batch=2, osl=1).latency_s == pytest.approx(1.0)
    assert decode_pace("pipelined", [0.3, 0.1, 0.1], [0.3, 0.3], 3, 1).latency_s == pytest.approx(1.1)


def test_pipelined_colocation_lets_each_stage_divide_its_time():
    """A request costs the stages 0.3 / 3 + 10 * 0.1 / 2 = 0.6 s and 0.6 / 3 + 10 * 0.04 / 2 = 0.4 s. The
    batch of 4 then turns over at 1 / 0.6 requests/s, so its 10 tokens take 4 * 0.6 s."""
    prefill, decode = PhaseTimes([0.3, 0.6], [0.03], batch=3), PhaseTimes([0.1, 0.04], [0.01], batch=4)
    pace = colocated_pace("pipelined", prefill, decode, osl=10)
    assert (pace.capacity_req_s, pace.latency_s, pace.token_s) == pytest.approx((1 / 0.6, 0.93, 0.24))


def test_tokens_of_a_colocated_replica_wait_for_slow_hops():
    """A token goes around in 1.1 s, although no stage or hop is busy for a third of that."""
    steps, hops = [0.3, 0.1, 0.1], [0.3, 0.3]
    prefill, decode = PhaseTimes([1e-3] * 3, [1e-3] * 2, batch=1), PhaseTimes(steps, hops, batch=3)
    pace = colocated_pace("pipelined", prefill, decode, osl=10)
    assert (pace.capacity_req_s, pace.token_s) == pytest.approx((3 / 11, 1.1))


def test_one_stage_takes_turns():
    """Two tokens of 2 s each after a prefill of 3 s."""
    pace = colocated_pace("pipelined", PhaseTimes([3], [], 1), PhaseTimes([2], [], 1), osl=2)
    assert (pace.capacity_req_s, pace.latency_s, pace.token_s) == pytest.approx((1 / 7, 3, 3.5))


def test_literal_colocation_runs_one_batch_at_a_time():
    """0.9 s of prefill for 3 requests and 10 steps of 0.9 s for 12: 0.3 + 0.75 s each."""
    pace = colocated_pace("literal", PhaseTimes(STAGES, HOPS, 3), PhaseTimes(STAGES, HOPS, 12), osl=10)
    assert (pace.capacity_req_s, pace.latency_s, pace.token_s) == pytest.approx((1 / 1.05, 0.9, 1.26))


@given(
    st.sampled_from(PIPELINE_SEMANTICS),
    st.lists(st.tuples(times, times), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(1, 256),
    st.integers(1, 1000),
)
def test_colocation_gains_at_most_what_dividing_the_time_leaves(semantics, stage_s, prompts, batch, osl):
    """The rate is between that of taking turns and that of the slower phase alone; on one stage, prefills
    stretch a token's step by their share of time."""
    hops = [0.0] * (len(stage_s) - 1)
    first, rest = ([pair[k] for pair in stage_s] for k in (0, 1))
    prefill = prefill_pace(semantics, first, hops, prompts)
    decode = decode_pace(semantics, rest, hops, batch, osl)
    both = colocated_pace(semantics, PhaseTimes(first, hops, prompts), PhaseTimes(rest, hops, batch), osl)
    turns = 1 / (1 / prefill.capacity_req_s + 1 / decode.capacity_req_s)
    assert both.capacity_req_s >= turns * (1 - 1e-9)
    assert both.capacity_req_s <= min(prefill.capacity_req_s, decode.capacity_req_s) * (1 + 1e-9)
    assert both.latency_s == prefill.latency_s
    if len(stage_s) == 1:
        in_prefills = both.capacity_req_s / prefill.capacity_req_s
        assert both.capacity_req_s == pytest.approx(turns)
        assert both.token_s * (1 - in_prefills) == pytest.approx(
            decode.latency_s, rel=1e-6, abs=1e-9 * both.token_s
        )


@given(st.sampled_from(PIPELINE_SEMANTICS), times, st.integers(1, 256), st.integers(1, 1000))
def test_one_stage_is_read_the_same_way_by_all(semantics, stage_s, batch, osl):
    assert micro_batch(semantics, batch, 1) == batch
    prefill = prefill_pace(semantics, [stage_s], [], batch)
    assert (prefill.capacity_req_s, prefill.latency_s) == pytest.approx((batch / stage_s, stage_s))
    decode = decode_pace(semantics, [stage_s], [], batch, osl)
    assert (decode.capacity_req_s, decode.latency_s) == pytest.approx((batch / (stage_s * osl), stage_s))


@given(st.lists(times, min_size=1, max_size=6), times, st.integers(1, 256))
def test_the_readings_are_ordered(stage_s, hop_s, batch):
    """With equal stage times, micro-batches help prefill, but help decode only if they cost no memory."""
    hops = [hop_s] * (len(stage_s) - 1)
    prefill = {s: prefill_pace(s, stage_s, hops, batch).capacity_req_s for s in PIPELINE_SEMANTICS}
    assert prefill["literal"] <= prefill["pipelined"] * (1 + 1e-12)
    decode = {s: decode_pace(s, stage_s, hops, batch, 10).capacity_req_s for s in PIPELINE_SEMANTICS}
    assert decode["pipelined"] <= decode["literal"] * (1 + 1e-12)
    assert decode["literal"] <= decode["paper_optimistic"] * (1 + 1e-12)


@pytest.mark.parametrize("gpu", ["A100-80GB", "H100"])
@pytest.mark.parametrize("workload", ["HPLD", "HPHD", "LPHD", "LPLD"])
@pytest.mark.parametrize("semantics", PIPELINE_SEMANTICS)
def test_appendix_e2_comes_out_under_the_optimistic_reading_only(gpu, workload, semantics):
    """Two GPUs decode Llama-2 70B: (TP=1, PP=2) is the paper's throughput-optimal choice."""
    node = {"name": "n0", "accelerators": f"{gpu}:2", "interconnect": "nvlink"}
    network = {"default": {"bandwidth_gbit_s": 100, "latency_us": 50}}
    spec = parse_cluster({"name": "pair", "nodes": [node], "network": network}, "test", Path())
    model, load = find_model("llama-2-70b"), load_workload(workload)
    costs = make_cost_model("table1", model, load.lengths)
    planner = Planner(Problem(spec, Cluster.from_spec(spec), model, load, costs, semantics))

    pipeline = planner.plan_shape("decode", [(0, 1), (0, 1)])
    tensor = planner.plan_shape("decode", [(0, 2)])
    assert pipeline and tensor
    assert (pipeline.capacity_req_s > tensor.capacity_req_s) == (semantics == "paper_optimistic")
    best = planner.plan("decode", ((0, 2),))
    assert best == (pipeline if semantics == "paper_optimistic" else tensor)
    # For prefill, E.2 chooses (TP=2, PP=1), which has the shorter latency.
    assert (
        planner.plan_shape("prefill", [(0, 2)]).latency_s
        < planner.plan_shape("prefill", [(0, 1), (0, 1)]).latency_s
    )

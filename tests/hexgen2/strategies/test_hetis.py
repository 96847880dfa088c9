"""Hetis's plans: against exhaustive search, its paper, and the checkers on random clusters."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_checks import check_placement
from problems import LATENT, clusters, problem_from
from scipy.optimize import linprog

from cost_model.attention import DenseCosts, token_s
from cost_model.base import TensorGroup, Work
from cost_model.errors import InfeasibleError
from cost_model.hardware import NO_LINK
from hexgen2.attention_workers import stage_requests
from hexgen2.checks import violations
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.headwise_times import HeadwiseTimes, Line, level, step_times
from hexgen2.prediction.step_times import StepTimes
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.baselines import hetis, parallelizer
from hexgen2.strategies.baselines.parallelizer import DELTA, Parallelizer, dealt


def plan(problem: Problem) -> Placement:
    return hetis.search(problem, SearchOptions())


def test_the_plan_of_the_paper():
    """Section 7.2: with Llama 70B on 12 GPUs, A100 and 3090 are primary workers, P100 attention workers."""
    for workload in ("HPLD", "HPHD", "LPHD", "LPLD", "online"):
        placement = plan(make_problem("hetis-12", "llama-2-70b", workload))
        primary = {gpu.split("-")[0] for replica in placement.replicas for gpu in replica.gpus}
        assert primary == {"a100", "rtx3090"}
        assert {worker.gpu for worker in placement.attention_workers} == {f"p100-1/{k}" for k in range(4)}
        check_placement(placement)


@settings(max_examples=40, deadline=None)
@given(
    clusters(8), st.sampled_from(["llama-2-7b", "llama-2-13b", "opt-13b"]), st.sampled_from(["HPLD", "LPHD"])
)
def test_plans_pass_the_checkers(spec, model, workload):
    try:
        placement = plan(problem_from(spec, model, workload))
    except InfeasibleError as error:
        assert "no feasible placement" in str(error)
        return
    check_placement(placement)
    Placement.model_validate_json(placement.to_json())


@settings(max_examples=25, deadline=None)
@given(clusters(8), st.randoms(use_true_random=False))
def test_the_order_of_nodes_changes_names_only(spec, random):
    """GPUs are dealt in the order of the nodes, so that links of instances may differ, but with one instance
    on one network nothing does."""
    spec["network"] = {"default": {"bandwidth_gbit_s": 100, "latency_us": 10}}
    one = Parallelizer(problem := problem_from(spec, "llama-2-7b", "HPHD"))
    shuffled = {**spec, "nodes": random.sample(spec["nodes"], len(spec["nodes"]))}
    two = Parallelizer(other := problem_from(shuffled, "llama-2-7b", "HPHD"))
    plans = one.plan(dealt(problem, 1)[0]), two.plan(dealt(other, 1)[0])
    assert (plans[0] is None) == (plans[1] is None)
    if plans[0] is not None:
        assert math.isclose(plans[0].dense_s, plans[1].dense_s, rel_tol=0.05)
        assert len(plans[0].others) == len(plans[1].others)


@settings(max_examples=30, deadline=None)
@given(clusters(8), st.sampled_from(["llama-2-7b", "opt-13b"]))
def test_types_leave_as_the_delta_rule_says(spec, model):
    problem = problem_from(spec, model, "HPHD")
    planner, instance = Parallelizer(problem), dealt(problem, 1)[0]
    found, requests = planner.plan(instance), planner._requests(instance)
    if found is None:
        return
    kept = len({stage.group.accelerator for stage in found.stages})
    costs = [_unified(problem, instance[:count], requests) for count in range(1, len(instance) + 1)]
    wanted = len(instance)
    while wanted > 1 and costs[wanted - 2] <= costs[wanted - 1] * (1 + DELTA):
        wanted -= 1
    slowest = min(stage.group.accelerator.flops_s for stage in found.stages)
    assert all(p.accelerator.flops_s <= slowest for p in instance[kept:])
    if kept > wanted:  # Only where fewer types do not hold the weights.
        assert planner._best_shape(instance[:wanted], requests, spare=True) is None
    elif kept < wanted:
        assert planner._best_shape(instance[:wanted], requests, spare=wanted < len(instance)) is None


def _unified(problem, pools, requests):
    """L / sum of n / c, written once more from the definition."""
    costs, batch = problem.costs, requests / len(pools)
    rate = 0.0
    for pool in pools:
        alone = TensorGroup(pool.accelerator, 1, NO_LINK)
        prompts = costs.prefill_batch()
        step = Work(0.0, 0.0, max(1.0, batch), 0.0, max(1.0, batch))
        own = costs.layer_s("prefill", alone, prompts) / prompts
        rate += len(pool) / (own + costs.osl * costs.layer_work_s(alone, step) / max(1.0, batch))
    return problem.model.layers / rate


@settings(max_examples=15, deadline=None)
@given(clusters(8))
def test_changing_one_degree_at_a_time_is_close_to_trying_all(spec):
    problem = problem_from(spec, "llama-2-7b", "HPHD")
    planner, instance = Parallelizer(problem), dealt(problem, 1)[0]
    requests = planner._requests(instance)
    whole = planner._best_shape(instance, requests, spare=False)
    before, parallelizer.MOST_SHAPES = parallelizer.MOST_SHAPES, 0
    try:
        stepwise = planner._best_shape(instance, requests, spare=False)
    finally:
        parallelizer.MOST_SHAPES = before
    assert (whole is None) == (stepwise is None)
    if whole is not None:
        assert whole[1] <= stepwise[1] * (1 + 1e-9)
        assert stepwise[1] <= whole[1] * 1.25


LINES = st.lists(
    st.builds(Line, st.sampled_from([0.0, 1e-5, 3e-4]), st.floats(1e-6, 1e-2), st.floats(0.05, 1.0)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=80, deadline=None)
@given(LINES)
def test_level_is_the_optimum_of_its_linear_programs(lines):
    """Over all sets of devices that take part, the least time by HiGHS."""
    seconds, shares = level(lines)
    assert math.isclose(math.fsum(shares), 1, rel_tol=1e-9)
    assert all(share >= 0 for share in shares)
    if math.fsum(line.most for line in lines) < 1:
        return
    assert all(share <= line.most * (1 + 1e-9) for share, line in zip(shares, lines, strict=True))
    best = math.inf
    for used in itertools.product([False, True], repeat=len(lines)):
        chosen = [line for line, use in zip(lines, used, strict=True) if use]
        if not chosen or math.fsum(line.most for line in chosen) < 1:
            continue
        count = len(chosen)
        rows = np.zeros((count, count + 1))
        for i, line in enumerate(chosen):
            rows[i, i], rows[i, count] = line.share_s * 1e3, -1
        found = linprog(
            [0.0] * count + [1.0],
            A_ub=rows,
            b_ub=[-line.fixed_s * 1e3 for line in chosen],
            A_eq=[[1.0] * count + [0.0]],
            b_eq=[1.0],
            bounds=[(0, line.most) for line in chosen] + [(None, None)],
        )
        if found.success:
            best = min(best, found.fun / 1e3)
    assert math.isclose(seconds, best, rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize("model", ["llama-2-70b", "opt-30b"])
def test_dense_and_attention_add_up_to_a_layer(model):
    for cost_model in ("calibrated", "vllm"):
        problem = make_problem("hetis-12", model, "online", cost_model=cost_model)
        costs, dense = problem.costs, DenseCosts(problem.costs)
        for accelerator in dict.fromkeys(problem.node_accelerator):
            group = TensorGroup(accelerator, 1, NO_LINK)
            work = Work(0.0, 0.0, 32.0, 32 * 900.0, 32.0)
            parts = dense.layer_work_s(group, work) + 32 * 900 * token_s(costs, group, 32.0)
            assert math.isclose(parts, costs.layer_work_s(group, work), rel_tol=0.02)


def test_workers_give_memory_and_time():
    """With workers a replica holds more requests, and a long step takes less time than without."""
    problem = make_problem("hetis-12", "llama-2-70b", "online")
    placement = plan(problem)
    replica = placement.replicas[0]
    workers = placement.workers_of(replica.id)
    cluster, costs = Cluster.from_spec(placement.cluster), placement.costs()
    without, with_ = (stage_requests(replica, w, cluster, costs) for w in ((), workers))
    assert min(with_) > min(without) * 1.05
    assert max(with_) - min(with_) < 0.1 * min(with_)  # evened out over the stages
    plain = StepTimes(replica, cluster, costs, "pipelined")
    helped = step_times(replica, workers, cluster, costs, "pipelined")
    assert isinstance(helped, HeadwiseTimes)
    work = Work(0.0, 0.0, 40.0, 40 * 900.0, 40.0)
    assert max(helped.step(work)[0]) <= max(plain.step(work)[0])
    nothing = work._replace(context=0.0)
    assert helped.step(nothing) == plain.step(nothing)


def test_wrong_workers_are_found():
    placement = plan(make_problem("hetis-12", "llama-2-70b", "online"))
    worker = placement.attention_workers[0]

    def with_workers(*changed):
        workers = [*changed, *placement.attention_workers[1:]]
        return [key for key, _ in violations(placement.model_copy(update={"attention_workers": workers}))]

    assert with_workers(worker) == []
    stages = len(worker.kv_shares)
    for change, key in [
        ({"gpu": "a100-1/0"}, "attention_workers[0].gpu"),
        ({"gpu": "p100-1/1"}, "attention_workers[1].gpu"),
        ({"gpu": "nowhere/0"}, "attention_workers[0].gpu"),
        ({"replica": "colocated-9"}, "attention_workers[0].replica"),
        ({"kv_shares": [0.1] * (stages + 1)}, "attention_workers[0].kv_shares"),
        ({"kv_shares": [1.0] * stages}, "attention_workers[0].kv_shares"),
    ]:
        assert with_workers(worker.model_copy(update=change)) == [key]
    assert with_workers() != []  # the batch needs the worker's memory


def test_latent_attention_has_no_attention_workers():
    spec = {
        "name": "mixed",
        "nodes": [
            {"name": "a", "accelerators": "H100:2", "interconnect": "nvlink"},
            {"name": "b", "accelerators": "L4:2", "interconnect": "pcie3"},
        ],
    }
    placement = plan(problem_from(spec, LATENT, "LPLD"))
    assert placement.attention_workers == []
    check_placement(placement)

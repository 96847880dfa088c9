"""Colocated replicas: HexGen and vLLM compared with optima that are computed another way."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from problems import MODELS, problem_from, problems

from cost_model.errors import InfeasibleError
from hexgen2.checks import violations
from hexgen2.placement import Placement
from hexgen2.search.bounds.upper_bounds import rates_bound
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Group, Problem, Solution, counts_of, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

NETWORK = {"default": {"bandwidth_gbit_s": 25, "latency_us": 50}}


def run(strategy: str, problem: Problem) -> Placement:
    """A placement that passes the checkers and stays below its bound."""
    placement = find_strategy(strategy)(problem, SearchOptions(simulated=False))
    assert violations(placement) == []
    assert {replica.role for replica in placement.replicas} == {"colocated"}
    assert placement.routes == []
    assert placement.throughput.req_s <= placement.bound.req_s * (1 + 1e-9)
    return placement


def optimum(problem: Problem) -> float:
    """The best set partition. Capacities add up, so this is a dynamic program over the GPUs left in each
    node."""
    planner = Planner(problem)

    @functools.cache
    def best(free: tuple[int, ...]) -> float:
        if not any(free):
            return 0.0
        node = next(n for n, count in enumerate(free) if count)
        found = best((*free[:node], free[node] - 1, *free[node + 1 :]))
        for taken in itertools.product(*(range(count + 1) for count in free)):
            if taken[node]:
                plan = planner.plan("colocated", counts_of(dict(enumerate(taken))))
                if plan:
                    left = tuple(f - t for f, t in zip(free, taken, strict=True))
                    found = max(found, plan.capacity_req_s + best(left))
        return found

    return best(tuple(len(gpus) for gpus in problem.node_gpus))


@settings(max_examples=30, deadline=None)
@given(problems(max_gpus=6))
def test_hexgen_finds_the_best_partition_and_the_bound_holds_for_it(problem):
    best = optimum(problem)
    assert best <= rates_bound(problem).req_s * (1 + 1e-9)
    if best == 0:
        for strategy in ("hexgen", "vllm"):
            with pytest.raises(InfeasibleError):
                run(strategy, problem)
        return
    found = run("hexgen", problem).throughput.req_s
    assert 0.98 * best <= found <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(max_gpus=8))
def test_vllm_has_one_uniform_shape_per_type_and_is_never_above_the_best_partition(problem):
    try:
        placement = run("vllm", problem)
    except InfeasibleError:
        return
    shapes: dict[str, set] = {}
    name_of = dict(zip(problem.cluster.gpu_ids, problem.cluster.accelerators, strict=True))
    for replica in placement.replicas:
        (name,) = {name_of[gpu].name for gpu in replica.gpus}
        on_node = [gpu.split("/")[0] for gpu in replica.gpus]
        per_node = {on_node.count(node) for node in on_node}
        shapes.setdefault(name, set()).add((replica.shape, *per_node))
    for found in shapes.values():
        ((shape, *per_node),) = found
        assert len(set(shape.split(","))) == 1 and len(per_node) == 1
    assert placement.throughput.req_s <= optimum(problem) * (1 + 1e-9)


@pytest.mark.parametrize("gpu", ["A100-80GB", "L40"])
@pytest.mark.parametrize("model", MODELS)
def test_vllm_takes_the_best_degrees_in_one_node(gpu, model):
    """With seven GPUs, as many copies of TP x PP as fit; the other GPUs stay idle."""
    node = {"name": "n", "accelerators": f"{gpu}:7", "interconnect": "nvlink"}
    problem = problem_from({"name": "one", "nodes": [node], "network": NETWORK}, model, "HPHD")
    planner, best = Planner(problem), 0.0
    for tp in problem.model.tensor_degrees(7):
        for pp in range(1, 7 // tp + 1):
            plan = planner.plan_shape("colocated", [(0, tp)] * pp)
            best = max(best, 7 // (tp * pp) * plan.capacity_req_s if plan else 0.0)
    assert run("vllm", problem).throughput.req_s == pytest.approx(best)


def test_vllm_pipelines_cross_nodes():
    nodes = [{"name": f"n{k}", "accelerators": "A100-80GB:1"} for k in range(7)]
    problem = problem_from({"name": "rows", "nodes": nodes, "network": NETWORK}, "llama-2-70b", "LPLD")
    placement = run("vllm", problem)
    assert {replica.shape for replica in placement.replicas} in ({"tp1,tp1,tp1"}, {"tp1" + ",tp1" * 6})


@pytest.mark.parametrize("strategy", ["hexgen", "vllm"])
def test_one_gpu_is_enough(strategy):
    """There is no choice, so the replica's figures are those of its plan."""
    nodes = [{"name": "n", "accelerators": "H100:1"}]
    problem = problem_from({"name": "one", "nodes": nodes, "network": NETWORK}, "opt-30b", "HPLD")
    placement, plan = run(strategy, problem), Planner(problem).plan("colocated", ((0, 1),))
    assert plan
    assert placement.throughput.req_s == pytest.approx(plan.capacity_req_s)
    assert placement.latency.ttft_ms == pytest.approx(plan.latency_s * 1e3)
    assert placement.latency.tpot_ms == pytest.approx(plan.token_s * 1e3)
    assert placement.bottlenecks == ["all colocated replicas are at capacity"]


def test_latency_is_the_mean_over_requests():
    placement = run("vllm", make_problem("hexgen2-setting-1", "llama-2-70b", "HPHD"))
    means = {round(replica.max_batch / replica.capacity_req_s, 3) for replica in placement.replicas}
    assert len(means) > 1
    # Little's law: requests in flight = requests/s x output tokens x time per output token.
    under_way = sum(replica.max_batch for replica in placement.replicas)
    tokens_s = placement.throughput.req_s * placement.workload.osl
    assert placement.latency.tpot_ms == pytest.approx(under_way / tokens_s * 1e3)


@settings(max_examples=30, deadline=None)
@given(problems(max_gpus=6))
def test_colocated_replicas_add_to_the_flow_of_the_others(problem):
    """A group that changes from idle to colocated adds its capacity, and no bound is below the value."""
    evaluator = Evaluator(problem)
    groups = [
        Group("prefill" if n % 2 else "decode", ((n, len(g)),)) for n, g in enumerate(problem.node_gpus)
    ]
    apart = Solution(tuple(groups[:-1]))
    mixed = Solution((*groups[:-1], Group("colocated", groups[-1].counts)))
    plan = evaluator.planner.plan("colocated", groups[-1].counts)
    gained = plan.capacity_req_s if plan else 0.0
    found = evaluator.evaluate(mixed)
    assert found.req_s == pytest.approx(evaluator.evaluate(apart).req_s + gained)
    assert found.score <= evaluator.limits.of(mixed, 0.0) * (1 + 1e-9)
    assert found.score <= evaluator.limits.of(mixed, float("inf")) * (1 + 1e-9)

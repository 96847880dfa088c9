"""Whole searches, compared with enumeration and with their bound, and repeated."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from problems import MODELS, SETTINGS, WORKLOADS, problem_from, problems, set_partitions

from cluster_specs.loader import load_cluster
from cost_model.errors import InfeasibleError
from cost_model.models import find_model
from cost_model.registry import make_cost_model
from hexgen2.checks import violations
from hexgen2.cluster import Cluster
from hexgen2.export.vllm_command import check_vllm
from hexgen2.placement import Placement, json_schema
from hexgen2.search.bounds.upper_bounds import rates_bound
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, Problem, Solution, counts_of, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.classes import load_workload

OPTIONS = SearchOptions(simulated=False)
"""Searches are compared by the formulas that they go by."""


def run(strategy: str, problem: Problem) -> Placement:
    placement = find_strategy(strategy)(problem, OPTIONS)
    assert violations(placement) == []
    return placement


def brute_force(problem: Problem) -> float:
    """The best flow over every partition of every subset of GPUs and every choice of roles, without using
    symmetry."""
    evaluator, best = Evaluator(problem), 0.0
    node_of = problem.cluster.node_of
    gpus = range(len(node_of))
    for size in range(2, len(node_of) + 1):
        for used in itertools.combinations(gpus, size):
            for parts in set_partitions(list(used)):
                counts = []
                for part in parts:
                    nodes = [int(node_of[g]) for g in part]
                    counts.append(counts_of({n: nodes.count(n) for n in nodes}))
                for roles in itertools.product(("prefill", "decode"), repeat=len(parts)):
                    groups = tuple(Group(r, b) for r, b in zip(roles, counts, strict=True))
                    found = evaluator.reordered(evaluator.evaluate(Solution(groups)))
                    best = max(best, found.req_s)
    return best


@settings(max_examples=25, deadline=None)
@given(problems(max_gpus=5))
def test_exact_equals_brute_force_and_stays_below_the_bound(problem):
    best = brute_force(problem)
    bound = rates_bound(problem).req_s
    assert best <= bound * (1 + 1e-9)
    if best == 0:
        with pytest.raises(InfeasibleError):
            run("exact", problem)
        return
    assert run("exact", problem).throughput.req_s == pytest.approx(best, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(problems(max_gpus=8))
def test_hexgen2_finds_a_placement_where_there_is_one_and_never_beats_exact(problem):
    try:
        best = run("exact", problem)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            run("hexgen2", problem)
        return
    found = run("hexgen2", problem)
    assert 0.98 * best.throughput.req_s <= found.throughput.req_s <= best.throughput.req_s * (1 + 1e-6)


@settings(max_examples=12, deadline=None)
@given(problems(max_gpus=5))
def test_plans_for_vllm_are_the_best_of_those_that_it_runs(problem):
    """These have replicas of one stage; brute force over such groups bounds the answer from both sides."""
    limited = replace(problem, engine="vllm")
    best = brute_force(limited)
    assert best <= brute_force(problem) * (1 + 1e-9)
    for strategy in ("exact", "hexgen2"):
        if best == 0:
            with pytest.raises(InfeasibleError):
                run(strategy, limited)
            continue
        found = run(strategy, limited)
        check_vllm(found, strategy)
        assert all(len(replica.stages) == 1 for replica in found.replicas)
        assert 0.98 * best <= found.throughput.req_s <= best * (1 + 1e-6)


@pytest.mark.parametrize("strategy", ["vllm", "hexgen"])
def test_colocated_plans_for_vllm_may_be_pipelines_of_one_degree(strategy):
    free = make_problem("hexgen2-setting-1", "llama-2-70b", "HPHD")
    found = run(strategy, replace(free, engine="vllm"))
    check_vllm(found, strategy)
    assert any(len(replica.stages) > 1 for replica in found.replicas)
    # More shapes to choose from; the search among them is not exhaustive.
    assert found.throughput.req_s <= run(strategy, free).throughput.req_s * 1.01


def case_study_cells():
    """All models, workloads and cost models. Half of them, in which all pairs occur, are not marked slow."""
    costs = [("vllm", "pipelined"), ("calibrated", "pipelined"), ("table1", "paper_optimistic")]
    for i, model in enumerate(MODELS):
        for j, workload in enumerate(WORKLOADS):
            for k, cost in enumerate(costs):
                yield pytest.param(model, workload, *cost, marks=[pytest.mark.slow] * ((i + j + k) % 2))


@pytest.mark.parametrize(("model", "workload", "cost_model", "pipeline"), list(case_study_cells()))
def test_case_study_equals_exhaustive_search(model, workload, cost_model, pipeline):
    """Appendix E: on 4 H100 and 4 A100, the search matches exhaustive search."""
    problem = make_problem("hexgen2-case-study", model, workload, cost_model=cost_model, pipeline=pipeline)
    found, best = run("hexgen2", problem), run("exact", problem)
    assert found.throughput.req_s == pytest.approx(best.throughput.req_s, rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_case_study_is_found_by_climbing_alone(model, workload):
    """The refinement finds the optimum before the enumeration does, which then only proves it."""
    problem = make_problem("hexgen2-case-study", model, workload, cost_model="calibrated")
    placement = run("hexgen2", problem)
    climbed = [entry for entry in placement.search.trace if entry["step"] != "enumerate"]
    assert climbed[-1]["req_s"] == pytest.approx(placement.bound.req_s, rel=1e-6)
    assert placement.bound.gap == 0


def test_case_study_shape_of_appendix_e():
    """With the paper's own cost model and its reading of pipelines, the balanced case gives the result of E.1
    and E.2: two GPUs of one type per group, prefill TP=2, decode PP=2."""
    problem = make_problem(
        "hexgen2-case-study", "llama-2-70b", "LPLD", cost_model="table1", pipeline="paper_optimistic"
    )
    shapes = sorted(
        (r.role, r.shape, "/".join(sorted({g.split("/")[0] for g in r.gpus})))
        for r in run("hexgen2", problem).replicas
    )
    assert shapes == [
        ("decode", "tp1,tp1", "a100-1"),
        ("decode", "tp1,tp1", "h100-1"),
        ("prefill", "tp2", "a100-1"),
        ("prefill", "tp2", "h100-1"),
    ]


def test_case_study_shifts_gpus_to_decode_for_lphd():
    """Appendix E.3: with light prefill and heavy decode, GPUs move to the decode replicas."""

    def decode_gpus(workload: str) -> int:
        placement = run("hexgen2", make_problem("hexgen2-case-study", "llama-2-70b", workload))
        return sum(len(r.gpus) for r in placement.replicas if r.role == "decode")

    assert decode_gpus("LPHD") > decode_gpus("HPLD")


def paper_cells():
    """All settings, models and workloads. An eighth of them, in which each occurs, is not marked slow."""
    for i, cluster in enumerate(SETTINGS):
        for j, model in enumerate(MODELS):
            for k, workload in enumerate(WORKLOADS):
                marks = [] if (j, k) == (i // 2 % 2, i % 4) else [pytest.mark.slow]
                yield pytest.param(cluster, model, workload, marks=marks)


@pytest.mark.parametrize(("cluster", "model", "workload"), list(paper_cells()))
def test_paper_settings(cluster, model, workload):
    """The placement is valid, has both roles, follows the schema and is close to the bound."""
    found = run("hexgen2", make_problem(cluster, model, workload))
    jsonschema.validate(json.loads(found.to_json()), json_schema())
    assert {r.role for r in found.replicas} == {"prefill", "decode"}
    assert 0 <= found.bound.gap < 0.5


@pytest.mark.parametrize(
    "cluster,model",
    [
        ("local-cpu", "opt-13b"),
        ("hetis-12", "bloom-176b"),
        ("huawei-v100-a800", "bloom-176b"),
    ],
)
def test_what_cannot_fit_says_why(cluster, model):
    spec, architecture, load = load_cluster(cluster), find_model(model), load_workload("LPLD")
    costs = make_cost_model("calibrated", architecture, load.lengths)
    problem = Problem(spec, Cluster.from_spec(spec), architecture, load, costs)
    with pytest.raises(InfeasibleError, match=architecture.name):
        find_strategy("hexgen2")(problem, OPTIONS)


SLOW_24 = pytest.param("helix-geo-24", marks=pytest.mark.slow)


@pytest.mark.parametrize("cluster", ["helix-single-24", SLOW_24, "hetis-12", "huawei-v100-a800"])
def test_other_papers_clusters(cluster):
    run("hexgen2", make_problem(cluster, "llama-30b", "online"))


def test_interrupted_search_keeps_the_best_so_far():
    seen = []

    def interrupt(state):
        seen.append(state.incumbent.best.req_s)
        if len(seen) == 3:
            raise KeyboardInterrupt

    problem = make_problem("hexgen2-setting-1", "llama-2-70b", "HPHD")
    placement = find_strategy("hexgen2")(problem, SearchOptions(progress=interrupt))
    assert placement.search.cut == "interrupted"
    assert placement.throughput.req_s == pytest.approx(seen[-1], rel=1e-6)
    assert violations(placement) == []


def test_time_limit_is_named():
    problem = make_problem("hexgen2-setting-3", "opt-30b", "HPHD")
    placement = find_strategy("hexgen2")(problem, SearchOptions(time_limit_s=0.3))
    assert placement.search.cut == "time limit"
    assert violations(placement) == []


def test_trace_rises():
    trace = run("hexgen2", make_problem("hexgen2-setting-2", "llama-2-70b", "LPHD")).search.trace
    flows = [entry["req_s"] for entry in trace]
    assert flows == sorted(flows) and len(flows) > 1


def test_published_schema_is_the_code_s():
    published = Path(__file__).parents[3] / "docs" / "placement.schema.json"
    assert json.loads(published.read_text()) == json_schema(), "run `make schema`"


def test_uneven_memory_is_used():
    """A small card beside large ones gets fewer layers than they do."""
    nodes = [
        {"name": "big", "accelerators": "H100:2"},
        {"name": "mid", "accelerators": "A100-80GB:2"},
        {"name": "small", "accelerators": "L4:2"},
    ]
    placement = run("hexgen2", problem_from({"name": "t", "nodes": nodes}, "llama-2-70b", "LPLD"))
    layers = {
        s.gpus[0].split("/")[0]: s.layer_count / len(s.gpus) for r in placement.replicas for s in r.stages
    }
    if "small" in layers:
        assert layers["small"] < min(n for name, n in layers.items() if name != "small")


@pytest.mark.parametrize(
    ("cost_model", "measured"), [("calibrated", {"H100", "A100-80GB"}), ("zero-fit", set())]
)
def test_a_placement_says_which_of_its_cards_were_never_measured(cost_model, measured):
    problem = make_problem("hexgen2-setting-1", "llama-2-70b", "LPLD", cost_model=cost_model)
    placement = find_strategy("splitwise")(problem, SearchOptions())
    used = {
        problem.cluster.accelerators[problem.cluster.index(g)].name
        for r in placement.replicas
        for g in r.gpus
    }
    assert placement.cost_model.unmeasured == sorted(used - measured)

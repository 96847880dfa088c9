"""The flexible search: mixtures of prefill, decode, colocated and mixed replicas."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

import hexgen2
from cluster_specs.loader import parse_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError, InputError
from hexgen2.checks import violations
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.replan.migration import Terms
from hexgen2.replan.request import replan_problem
from hexgen2.replan.search import replan
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.knapsack import best_points, served
from hexgen2.search.problem import ROLES, Group, Problem, Solution, counts_of, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

OPTIONS = SearchOptions(simulated=False)
"""Searches are compared by the formulas that they go by."""


def run(strategy: str, problem: Problem, phases: str = "flexible") -> Placement:
    placement = find_strategy(strategy)(replace(problem, phases=phases), OPTIONS)  # type: ignore[arg-type]
    assert violations(placement) == []
    return placement


def req_s(strategy: str, problem: Problem, phases: str) -> float:
    """What a search finds; 0 where nothing fits."""
    try:
        return run(strategy, problem, phases).throughput.req_s
    except InfeasibleError:
        return 0.0


def solutions(problem: Problem):
    """Every division of all GPUs, and of all but one, into groups with roles."""
    node_of = problem.cluster.node_of
    everyone = list(range(len(node_of)))
    for used in (everyone, *([g for g in everyone if g != left] for left in everyone)):
        for parts in partitions(used):
            counts = []
            for part in parts:
                nodes = [int(node_of[g]) for g in part]
                counts.append(counts_of({n: nodes.count(n) for n in nodes}))
            for roles in itertools.product(ROLES["flexible"], repeat=len(parts)):
                yield Solution(tuple(Group(r, c) for r, c in zip(roles, counts, strict=True)))


def partitions(items: list[int]):
    """All ways to divide the items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [item for item in rest if item not in others]
            for found in partitions(left):
                yield [[first, *others], *found]


@settings(max_examples=15, deadline=None)
@given(problems(max_gpus=4))
def test_exact_is_the_best_of_all_mixtures(problem):
    evaluator = Evaluator(replace(problem, phases="flexible"))
    found = (evaluator.reordered(evaluator.evaluate(each)).req_s for each in solutions(problem))
    best = max(found, default=0.0)
    exact = req_s("exact", problem, "flexible")
    assert exact >= best * (1 - 1e-6)
    assert exact <= evaluator.relaxed.upper_bound().req_s * (1 + 1e-6)


@settings(max_examples=12, deadline=None)
@given(problems(max_gpus=7))
def test_a_flexible_search_is_near_the_exact_one_and_never_below_a_pure_one(problem):
    exact = req_s("exact", problem, "flexible")
    found = req_s("hexgen2", problem, "flexible")
    assert 0.98 * exact <= found <= exact * (1 + 1e-6)
    for phases in ("disaggregated", "colocated"):
        assert found >= 0.995 * req_s("hexgen2", problem, phases)


def drawn_solution(problem: Problem, data) -> Solution:
    """Groups inside nodes, in any role."""
    groups = []
    for node, gpus in enumerate(problem.node_gpus):
        left = len(gpus)
        while left:
            count = data.draw(st.integers(1, left))
            groups.append(Group(data.draw(st.sampled_from(ROLES["flexible"])), ((node, count),)))
            left -= count
    return Solution(tuple(groups))


@settings(max_examples=30, deadline=None)
@given(problems(max_gpus=6), st.data())
def test_mixed_replicas_run_chunks_that_serve_nearly_as_much_as_any(problem, data):
    evaluator = Evaluator(replace(problem, phases="flexible"))
    found = evaluator.evaluate(drawn_solution(problem, data))
    usual = [replace(r, plan=r.own or r.plan, own=None) for r in found.colocated]
    choices = [evaluator.mixtures_of(replica, None).plans for replica in usual]
    most = 0.0
    for plans in itertools.islice(itertools.product(*choices), 500):
        running = tuple(replace(r, plan=plan) for r, plan in zip(usual, plans, strict=True))
        tried = evaluator.with_plans(found.solution, found.prefill, found.decode, running)
        most = max(most, tried.req_s)
    as_usual = evaluator.with_plans(found.solution, found.prefill, found.decode, tuple(usual))
    # What flows and knapsacks find is equal but for rounding.
    assert found.req_s >= max(0.97 * most, as_usual.req_s * (1 - 2e-6))


@settings(max_examples=40, deadline=None)
@given(problems(max_gpus=8), st.data())
def test_what_mixed_replicas_add_is_what_their_regions_allow(problem, data):
    """At least what groups do that keep to themselves, at most what they could if KV caches moved freely."""
    solution = drawn_solution(problem, data)
    evaluator = Evaluator(replace(problem, phases="flexible"))
    together = evaluator.evaluate(solution)
    apart = evaluator.each_alone(together)
    assert not apart.mixed and together.req_s >= apart.req_s * (1 - 1e-6)
    capacity = {
        role: sum(r.plan.capacity_req_s for r in together.replicas if r.group.role == role)
        for role in ("prefill", "decode")
    }
    regions = [evaluator.planner.region(r.plan) for r in together.colocated]
    points = best_points(capacity["prefill"], capacity["decode"], regions)
    assert together.req_s <= served(capacity["prefill"], capacity["decode"], points) * (1 + 1e-6)
    assert together.score <= evaluator.limits.of(solution, -1.0) * (1 + 1e-6)
    for replica, region in zip(together.colocated, regions, strict=True):
        alone = together.alone[[r.index for r in together.colocated].index(replica.index)]
        ends = (
            (together.senders, together.flow.routes.sum(axis=1)),
            (
                together.receivers,
                together.flow.routes.sum(axis=0),
            ),
        )
        prompts, answers = (
            alone + sum(w for r, w in zip(side, loads, strict=True) if r.index == replica.index)
            for side, loads in ends
        )
        assert region.busy(prompts, answers) <= 1 + 1e-6


@pytest.mark.parametrize("improvements", [1, 3])
def test_ctrl_c_while_it_looks_at_pure_phases_loses_nothing(improvements):
    left = improvements

    def press(state) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    problem = make_problem("hexgen2-setting-1", "opt-30b", "LPHD", phases="flexible")
    found = find_strategy("hexgen2")(problem, SearchOptions(simulated=False, progress=press))
    assert found.search.cut == "interrupted" and found.throughput.req_s > 0


@pytest.mark.parametrize(
    ("cluster", "model", "workload"),
    [
        ("hexgen2-homogeneous", "llama-2-70b", "LPHD"),
        pytest.param("hexgen2-setting-4", "opt-30b", "HPLD", marks=pytest.mark.slow),
        ("hexgen2-case-study", "llama-2-13b", "online"),
    ],
)
def test_flexible_beats_both_pure_forms_on_the_papers_clusters(cluster, model, workload):
    problem = make_problem(cluster, model, workload)
    found = run("hexgen2", problem)
    pure = [run("hexgen2", problem, phases).throughput.req_s for phases in ("disaggregated", "colocated")]
    assert found.throughput.req_s >= 1.005 * max(pure)
    assert any(replica.role == "mixed" for replica in found.replicas)
    by_phases = {each.phases: each.req_s for each in found.search.alternatives}
    assert by_phases["flexible"] == pytest.approx(found.throughput.req_s)
    assert Placement.model_validate_json(found.to_json()) == found


def test_a_plain_search_has_roles_of_one_phase_and_a_colocated_one_has_none():
    problem = make_problem("hexgen2-case-study", "llama-2-13b", "LPLD")
    roles = {phases: {r.role for r in run("hexgen2", problem, phases).replicas} for phases in ROLES}
    assert roles["disaggregated"] == {"prefill", "decode"}
    assert roles["colocated"] == {"colocated"}


NODES = [{"name": "a", "accelerators": "H100:2"}, {"name": "b", "accelerators": "A100-80GB:2"}]
ASKED = {
    "cluster": ClusterSpec.model_validate({"name": "small", "nodes": NODES}),
    "model": "llama-2-13b",
    "workload": "LPHD",
}


def test_phases_are_refused_where_there_is_no_choice():
    with pytest.raises(InputError, match="--strategy vllm"):
        hexgen2.search(**ASKED, phases="flexible", strategy="vllm")


def value(objective: str, found: hexgen2.Placement) -> float:
    """What the objective asks for, greater is better."""
    if objective == "cost":
        return -found.price_per_hour
    return -found.goodput.mean_e2el_ms if objective == "latency" else found.throughput.req_s


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "cost", "request_rate": 40.0},
        pytest.param({"objective": "latency", "request_rate": 20.0}, marks=pytest.mark.slow),
        {"budget_per_hour": 10.0},
        {"engine": "vllm"},
    ],
    ids=lambda options: " ".join(options),
)
def test_flexible_phases_are_the_default_and_the_best_for_every_objective(options):
    found = hexgen2.search(**ASKED, **options)
    best = max(
        value(options.get("objective", ""), hexgen2.search(**ASKED, **options, phases=phases))
        for phases in ("disaggregated", "colocated")
    )
    assert value(options.get("objective", ""), found) >= best - 0.01 * abs(best)
    assert found == hexgen2.search(**ASKED, **options, phases="flexible").model_copy(
        update={"search": found.search}
    )


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms"), [(800.0, 50.0), (4000.0, 200.0), (None, 80.0), (1500.0, None)]
)
def test_under_targets_too_a_flexible_search_is_never_below_a_pure_one(ttft_ms, tpot_ms):
    goal = Goal(objective="goodput", ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    problem = make_problem("hexgen2-homogeneous", "llama-2-70b", "online", goal=goal)
    found = req_s("hexgen2", problem, "flexible")
    pure = {phases: req_s("hexgen2", problem, phases) for phases in ("disaggregated", "colocated")}
    assert found >= 0.995 * max(pure.values()) > 0


def test_prompts_of_a_colocated_replica_are_in_time_for_the_first_token():
    """The tighter the target, the less is planned, and nothing once a prompt alone takes longer."""

    def planned(ttft_ms: float) -> float:
        goal = Goal(objective="goodput", ttft_ms=ttft_ms)
        return req_s(
            "hexgen2", make_problem("hexgen2-homogeneous", "llama-2-70b", "HPLD", goal=goal), "colocated"
        )

    rates = [planned(ttft_ms) for ttft_ms in (10_000, 2000, 500, 10)]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[2] > rates[3] == 0


@pytest.mark.parametrize("lost", ["a100-3/0", "h100-1"])
def test_a_placement_with_mixed_replicas_is_planned_again_after_a_loss(lost):
    running = run("hexgen2", make_problem("hexgen2-setting-4", "llama-2-70b", "LPHD"))
    found = hexgen2.replan(running, lost=lost)
    assert violations(found) == []
    # What stays as it is, is not simulated.
    assert found.migration is not None
    assert found.migration.unchanged_req_s <= 1.02 * found.throughput.req_s
    # Others may do so with chunks of another size from then on, which takes a drain but loads nothing.
    kept = {move.from_ for move in found.moves if move.action in ("keep", "turn") and not move.load_bytes}
    assert kept and kept <= {replica.id for replica in running.replicas}
    assert not any(gpu.startswith(lost) for replica in found.replicas for gpu in replica.gpus)


def test_a_colocated_replica_that_also_works_for_others_turns_and_gets_another_id():
    """The id it runs under says "colocated", as it would if an earlier placement had made it that."""
    running = run("hexgen2", make_problem("hexgen2-setting-4", "llama-2-70b", "LPHD"))
    names = {r.id: r.id.replace("mixed", "colocated") for r in running.replicas}
    replicas = [
        r.model_copy(update={"id": names[r.id], "role": r.role_of_group, "region": None})
        for r in running.replicas
    ]
    before = running.model_copy(update={"replicas": replicas, "routes": []})
    problem = replace(replan_problem(before), phases="flexible")
    found = replan(problem, before, OPTIONS, Terms())
    mixed = [r for r in found.replicas if r.role == "mixed"]
    assert mixed and all(r.id.startswith("mixed-") for r in mixed)
    moves = {move.replica: move for move in found.moves}
    for replica in mixed:
        assert moves[replica.id].action == "turn" and moves[replica.id].from_ in names.values()
        assert moves[replica.id].drain_s > 0 == moves[replica.id].load_bytes


def test_under_vllm_pipelines_work_for_themselves_only():
    """vLLM's NixlConnector moves KV caches of replicas with one stage; two A10G hold the model as a
    pipeline."""
    cards = ["A10G:1", "A10G:1", "H100:1", "H100:1"]
    nodes = [{"name": f"n{k}", "accelerators": card} for k, card in enumerate(cards)]
    network = {"default": {"bandwidth_gbit_s": 100, "latency_us": 20}}
    spec = parse_cluster({"name": "small cards", "nodes": nodes, "network": network}, "test", Path())
    groups = (("colocated", {0: 1, 1: 1}), ("prefill", {2: 1}), ("colocated", {3: 1}))
    solution = Solution(tuple(Group(role, counts_of(counts)) for role, counts in groups))
    helped = {}
    for engine in ("any", "vllm"):
        problem = make_problem(spec, "llama-2-13b", "HPHD", phases="flexible", engine=engine)
        helped[engine] = Evaluator(problem).evaluate(solution)
    assert helped["any"].mixed == {0, 2} and helped["vllm"].mixed == {2}
    pipeline = next(r for r in helped["vllm"].colocated if r.index == 0)
    assert len(pipeline.stages) == 2
    assert helped["vllm"].alone[0] == pytest.approx(pipeline.plan.capacity_req_s)
    assert 0 < helped["vllm"].req_s <= helped["any"].req_s


def test_under_vllm_none_but_a_pipeline_beside_a_thin_link():
    nodes = [{"name": f"n{k}", "accelerators": card} for k, card in enumerate(["A10G:2", "H100:1", "H100:1"])]
    network = {"default": {"bandwidth_gbit_s": 0.1, "latency_us": 20}}
    spec = parse_cluster({"name": "thin", "nodes": nodes, "network": network}, "test", Path())
    problem = make_problem(spec, "llama-3-8b", "HPHD", phases="flexible", engine="vllm")
    roles = (("colocated", {0: 2}), ("prefill", {1: 1}), ("decode", {2: 1}))
    solution = Solution(tuple(Group(role, counts_of(counts)) for role, counts in roles))
    evaluator = Evaluator(problem)
    planned = evaluator.planner.plan_shape("colocated", [(0, 1), (0, 1)])
    assert planned is not None and len(planned.stages) == 2
    near = Evaluator(problem).evaluate(solution)
    near.plans["colocated", counts_of({0: 2})] = planned
    found = evaluator.evaluate(solution, near)
    assert len(found.colocated[0].stages) == 2 and found.mixed == frozenset()
    assert found.req_s == pytest.approx(planned.capacity_req_s + found.flow.value)


@settings(max_examples=15, deadline=None)
@given(problems(max_gpus=5))
def test_no_solution_exceeds_its_limit_by_links(problem):
    every = list(itertools.islice(solutions(replace(problem, phases="flexible")), 0, 2000, 7))
    evaluator = Evaluator(replace(problem, phases="flexible"))
    near = evaluator.evaluate(every[0])
    for solution in every[1:]:
        limit = evaluator.limit_by_links(solution, near)
        assert evaluator.evaluate(solution, near).score <= limit * (1 + 1e-9)


@pytest.mark.parametrize("bandwidth_gbit_s", [0.3, 2, 10])
def test_limits_by_links_rule_most_steps_out_where_links_are_thin(bandwidth_gbit_s):
    nodes = [
        {"name": f"n{k}", "accelerators": f"{gpu}:2"}
        for k, gpu in enumerate(("L40S", "A6000", "L40", "A10G"))
    ]
    network = {"default": {"bandwidth_gbit_s": bandwidth_gbit_s, "latency_us": 50}}
    cluster = ClusterSpec.model_validate({"name": "thin", "nodes": nodes, "network": network})
    problem = make_problem(cluster, "llama-3-8b", "LPHD", phases="flexible")
    evaluator = Evaluator(problem)
    roles = itertools.product(("prefill", "decode", "colocated"), repeat=4)
    every = [Solution(tuple(Group(role, ((k, 2),)) for k, role in enumerate(each))) for each in roles]
    near = evaluator.evaluate(every[-1])
    limits = [evaluator.limit_by_links(each, near) for each in every]
    scores = [evaluator.evaluate(each, near).score for each in every]
    assert all(score <= limit * (1 + 1e-9) for score, limit in zip(scores, limits, strict=True))
    finite = [(s, x) for s, x in zip(scores, limits, strict=True) if x < float("inf")]
    assert len(finite) > len(every) / 2  # All in which somebody runs both phases.
    assert sum(x - s for s, x in finite) < 0.1 * sum(x for _, x in finite)


def test_a_certificate_is_the_same_on_one_core(monkeypatch):
    """The integer program beside the search, or after it; never a looser bound than without it."""
    problem = make_problem("hexgen2-setting-4", "llama-2-70b", "LPHD", phases="flexible")
    certified = replace(OPTIONS, certify=True)

    def found(options: SearchOptions, cores: set[int]) -> dict:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
        placement = find_strategy("hexgen2")(problem, options).model_dump()
        del placement["search"]["seconds"]
        return placement

    alone, beside, plain = found(certified, {0}), found(certified, {0, 1}), found(OPTIONS, {0, 1})
    assert alone == beside
    assert alone["bound"]["method"] == "integer program"
    assert alone["bound"]["req_s"] <= plain["bound"]["req_s"] * (1 + 1e-9)
    assert alone["throughput"]["req_s"] >= plain["throughput"]["req_s"] * (1 - 1e-9)

"""The linear program's start: laid out on real GPUs, and close to the bound where there are many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from problems import problem_from, problems

from hexgen2.search.bound import trivial_bound
from hexgen2.search.columns import linear_start, list_columns
from hexgen2.search.evaluate import Evaluator
from hexgen2.search.problem import Problem


def check_layout(problem: Problem, evaluator: Evaluator) -> float:
    """Each GPU used once at most, each group able to hold the model; the flow."""
    solution = linear_start(evaluator)
    used = [0] * len(problem.node_gpus)
    for group in solution.groups:
        assert evaluator.planner.plan(group.role, group.blocks) is not None
        for node, count in group.blocks:
            used[node] += count
    assert all(n <= len(gpus) for n, gpus in zip(used, problem.node_gpus, strict=True))
    return evaluator.evaluate(solution).req_s


@settings(max_examples=60, deadline=None)
@given(problems(max_gpus=10))
def test_any_start_is_laid_out_on_real_gpus(problem):
    flow = check_layout(problem, Evaluator(problem))
    assert flow <= trivial_bound(problem)[0] * (1 + 1e-9)


@pytest.mark.parametrize("model", ["llama-2-70b", "opt-30b"])
@pytest.mark.parametrize("workload", ["HPLD", "LPHD"])
def test_many_gpus_come_close_to_the_bound(model, workload):
    cards = ["H100:4", "A100:4", "L40:4", "A6000:4"] * 4
    nodes = [
        {"name": f"n{i}", "accelerators": card, "interconnect": "nvlink" if i % 4 < 2 else "pcie4"}
        for i, card in enumerate(cards)
    ]
    spec = {"name": "64", "nodes": nodes, "network": {"default": {"bandwidth_gbit_s": 100, "latency_us": 20}}}
    # The linear program leaves KV transfers aside; so does the max flow where no route shares its links.
    problem = replace(problem_from(spec, model, workload), links="pairwise")
    assert check_layout(problem, Evaluator(problem)) >= 0.8 * trivial_bound(problem)[0]


def test_patterns_name_every_kind_once():
    nodes = [{"name": f"n{i}", "accelerators": "H100:2", "interconnect": "nvlink"} for i in range(3)]
    problem = problem_from({"name": "t", "nodes": nodes}, "opt-30b", "LPLD")
    patterns = {column.pattern for column in list_columns(Evaluator(problem))}
    # Like nodes are one kind: one GPU, two of one node, and pairs across two nodes.
    assert patterns == {((0, 1),), ((0, 2),), ((0, 1), (0, 1)), ((0, 2), (0, 1)), ((0, 2), (0, 2))}

"""First answers: nodes that are like others, and nodes that serve more in parts."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.search.ordinary import drawn
from cluster_specs.schema import ClusterSpec
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition.whole_nodes import whole_nodes
from hexgen2.search.problem import Problem, Solution, counts_of, make_problem


def _problem(family: str, gpus: int, seed: int, model: str = "llama-3-8b") -> Problem:
    cluster = ClusterSpec.model_validate(drawn(family, gpus, seed))
    return make_problem(cluster, model, "HPLD", phases="flexible")


def _used(solution: Solution) -> Counter[int]:
    used: Counter[int] = Counter()
    for group in solution.groups:
        used.update(dict(group.counts))
    return used


def _in_equal_parts(evaluator: Evaluator, node: int, size: int) -> float:
    """The most requests/s of a node's GPUs in groups of 1, 2, 4, ... GPUs or as a whole."""
    parts = {size} | {2**k for k in range(size.bit_length()) if 2**k <= size}
    plans = {part: evaluator.planner.plan("colocated", counts_of({node: part})) for part in parts}
    return max(size // part * plan.capacity_req_s for part, plan in plans.items() if plan)


@pytest.mark.parametrize("family", ["racks", "mostly", "zoo"])
@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-32b"])
def test_nodes_are_divided_where_that_serves_more(family: str, model: str) -> None:
    problem = _problem(family, 48, 11, model)
    evaluator = Evaluator(problem)
    whole, divided = (whole_nodes(evaluator, "colocated", divide=divide) for divide in (False, True))
    assert _used(divided) == _used(whole)
    served = [evaluator.with_phases("colocated").evaluate(each).req_s for each in (whole, divided)]
    assert served[1] > served[0]
    joined = [group.counts for group in whole.groups if len(group.counts) > 1]
    assert [group.counts for group in divided.groups if len(group.counts) > 1] == joined
    apart: dict[int, float] = {}
    for group in divided.groups:
        if len(group.counts) == 1:
            plan = evaluator.planner.plan("colocated", group.counts)
            assert plan is not None
            node = group.counts[0][0]
            apart[node] = apart.get(node, 0.0) + plan.capacity_req_s
    for node, req_s in apart.items():
        # Halves of halves end at the first that does not help.
        assert req_s >= 0.9 * _in_equal_parts(evaluator, node, len(problem.node_gpus[node]))


def test_nodes_that_are_alike_and_have_most_memory_come_first() -> None:
    problem = _problem("racks", 64, 6)
    found = whole_nodes(Evaluator(problem), "colocated", stop=lambda: True, divide=True)
    alike: dict[tuple[int, int], list[int]] = {}
    for node, gpus in enumerate(problem.node_gpus):
        alike.setdefault((problem.node_kind[node], len(gpus)), []).append(node)
    memory = problem.cluster.memory_bytes
    most = max(alike.values(), key=lambda nodes: sum(memory[g] for n in nodes for g in problem.node_gpus[n]))
    assert len(most) > 1
    assert [group.counts for group in found.groups] == [((n, len(problem.node_gpus[n])),) for n in most]


def test_joining_may_stop_sooner() -> None:
    """A 70B model fits in some nodes only."""
    evaluator = Evaluator(_problem("racks", 64, 5, "llama-2-70b"))
    whole = whole_nodes(evaluator, "colocated")
    alone = whole_nodes(evaluator, "colocated", stop_joining=lambda: True)
    assert alone.groups == tuple(group for group in whole.groups if len(group.counts) == 1)
    assert 0 < len(alone.groups) < len(whole.groups)

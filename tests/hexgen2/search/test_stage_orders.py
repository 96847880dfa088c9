"""Stages are put in the order that suits their KV routes, as far as there is time."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import clusters, problem_from

from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition.initial import initial_solution


@settings(max_examples=25, deadline=None)
@given(clusters(max_gpus=10), st.integers(2, 4), st.integers(0, 6))
def test_orders_improve_as_far_as_there_is_time(cluster, groups, looks):
    """Once the clock has been looked at so often, it is time to stop."""
    problem = problem_from(cluster, "opt-30b", "LPLD")
    assume(len(problem.cluster) >= groups)
    evaluator = Evaluator(problem)
    start = evaluator.evaluate(initial_solution(evaluator, groups))
    assume(start.prefill and start.decode)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > looks

    cut = evaluator.orders.improved(start, evaluator, stop)
    whole = evaluator.orders.improved(start, evaluator)
    assert cut.score >= start.score * (1 - 1e-9) and whole.score >= start.score * (1 - 1e-9)
    assert cut.solution == whole.solution == start.solution
    if looks == 0:
        assert cut is start

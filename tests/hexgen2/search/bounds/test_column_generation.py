"""The configuration LP by some columns at a time has the optimum of the program over all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem_from, problems
from scipy.optimize import linprog
from scipy.sparse import csr_array

from hexgen2.search.bounds import column_generation
from hexgen2.search.bounds.column_generation import Bills
from hexgen2.search.bounds.columns import with_its_plan
from hexgen2.search.bounds.configuration_lp import ConfigurationLP
from hexgen2.search.bounds.matrix_columns import OWN, Corners, Entries
from hexgen2.search.evaluator import Evaluator


def all_at_once(lp: ConfigurationLP, columns, budget: float) -> float:
    """The optimum of the program in which a row counts the groups of each column, by scipy."""
    gain, matrix, least, most = lp._arrays(columns, budget)
    rows = csr_array((matrix.values, matrix.columns, matrix.starts), shape=(matrix.count, matrix.width))
    upper, lower = np.flatnonzero(np.isfinite(most)), np.flatnonzero(np.isfinite(least))
    found = linprog(
        -gain,
        A_ub=np.vstack([rows.toarray()[upper], -rows.toarray()[lower]]),
        b_ub=np.concatenate([most[upper], -least[lower]]),
    )
    assert found.status == 0
    return -found.fun


@settings(max_examples=25, deadline=None)
@given(problems(max_gpus=8), st.sampled_from([(1, 1), (4, 2), (10_000, 1)]), st.booleans())
def test_some_columns_at_a_time_have_the_optimum_of_all(problem, sizes, planned):
    evaluator = Evaluator(problem)
    relaxed = evaluator.relaxed
    columns = relaxed.columns
    if planned:  # Plans are worth less than their limits, so that other columns count.
        counts = [relaxed.classes.counts(column.pattern) for column in columns]
        columns = [
            with_its_plan(c, evaluator.planner, problem, n) if k % 2 else c
            for k, (c, n) in enumerate(zip(columns, counts, strict=True))
        ]
    if not columns:
        return
    few, column_generation.FEW = column_generation.FEW, sizes[0]
    taken, column_generation.TAKEN_IN = column_generation.TAKEN_IN, sizes[1]
    try:
        for lp in (ConfigurationLP(relaxed.classes), ConfigurationLP(relaxed.classes, with_kv=False)):
            for budget in (math.inf, 0.7 * sum(problem.node_price)):
                truth = all_at_once(lp, columns, budget)
                found = lp.solve(columns, budget)
                again = lp.solve(columns, budget)
                assert found.value == pytest.approx(truth, rel=1e-6, abs=1e-9)
                assert again.value == pytest.approx(truth, rel=1e-6, abs=1e-9)
                worth = lp.worth(columns, found.duals)
                assert (worth[np.isfinite(worth)] <= 1 + 1e-5).all()
                if budget == math.inf and truth > 0:
                    used = found.amounts > 1e-6
                    assert used.any() and (worth[used] >= 1 - 1e-5).all()
    finally:
        column_generation.FEW, column_generation.TAKEN_IN = few, taken


def test_a_program_apart_changes_nothing_in_the_other(monkeypatch):
    """The columns with which the next program begins are its own."""
    monkeypatch.setattr(column_generation, "FEW", 3)
    spec = {"nodes": [{"name": f"n{k}", "accelerators": "A100-80GB:4"} for k in range(3)]}
    spec["network"] = {"default": {"bandwidth_gbit_s": 25, "latency_us": 50}}
    problem = problem_from({"name": "three", **spec}, "opt-30b", "HPLD")
    relaxed = Evaluator(problem).relaxed
    lp, columns = ConfigurationLP(relaxed.classes), relaxed.columns
    lp.solve(columns)
    near = set(lp._generation._near)
    apart = lp.apart()
    assert near and apart._generation._near == near
    others = [column.worth(0.1) if k % 3 else column for k, column in enumerate(columns)]
    apart.solve(others)
    assert apart._generation._near != near and lp._generation._near == near


def test_bills_count_the_best_corner_and_nothing_for_a_column_s_own_row():
    class Matrix:
        """Two columns, the second mixed with two corners."""

        def entries(self, columns):
            return Entries(np.array([0, 2, 2, OWN]), np.array([3.0, 1.0, 1.0, -1.0]), np.array([0, 0, 1, 1]))

        def corners(self, columns):
            row, value = np.array([OWN, 0, OWN, 1]), np.array([1.0, 4.0, 1.0, 6.0])
            return Corners(Entries(row, value, np.array([0, 0, 1, 1])), [2])

    class Given:
        def __init__(self, region):
            self.region = region

    bills = Bills(Matrix(), [Given(None), Given("some")], np.array([False, False, True]))
    brought, cost = bills.at(np.array([-0.5, -1.0, 2.0]))
    assert brought.tolist() == [1.5, 6.0] and cost.tolist() == [2.0, 2.0]
    assert bills.worth(np.array([-0.5, -1.0, 2.0])).tolist() == [0.75, 3.0]

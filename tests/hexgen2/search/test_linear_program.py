"""Linear programs apart from what they are used for."""

import math
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexgen2.search import linear_program
from hexgen2.search.linear_program import LinearProgram, WarmProgram, implied_most, run
from hexgen2.search.sparse_rows import SparseRows


class Talkative:
    """A solver that prints, as HiGHS does when it repairs a solution."""

    HandleUserInterrupt = False

    def run(self):
        os.write(1, b"tmpSolver.run();\n")


def test_what_a_solver_prints_stays_out_of_stdout(capfd):
    print("result: 1")
    threads = [threading.Thread(target=run, args=[Talkative()]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(Talkative())
    print("result: 2")
    said = capfd.readouterr()
    assert said.out == "result: 1\nresult: 2\n"
    assert said.err.count("tmpSolver") == 9


def test_there_may_be_no_stdout(capfd):
    kept, silent = os.dup(1), SimpleNamespace(run=lambda: None)
    os.close(1)
    try:
        run(silent)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@st.composite
def programs(draw):
    """Rows of variables that share something, and of variables that are no more than others allow."""
    size, rows = draw(st.integers(2, 6)), draw(st.integers(1, 6))
    entry = st.sampled_from([0.0, 0.0, 1.0, 2.5, -1.0, -0.4])
    matrix = np.array([[draw(entry) for _ in range(size)] for _ in range(rows)])
    row_most = np.array([draw(st.sampled_from([0.0, 1.0, 7.0, math.inf])) for _ in range(rows)])
    equal = np.array([draw(st.booleans()) for _ in range(rows)])
    row_least = np.where(equal & np.isfinite(row_most), row_most, -math.inf)
    most = np.array([draw(st.sampled_from([1.0, 4.0, math.inf])) for _ in range(size)])
    return SparseRows.dense(matrix), row_least, row_most, most


@given(programs())
@settings(max_examples=150, deadline=None)
def test_no_solution_exceeds_the_limits_that_rows_imply(program):
    matrix, row_least, row_most, most = program
    limits = implied_most(matrix, row_least, row_most, most)
    assert (limits <= most).all()
    for k, limit in enumerate(limits):
        lp = LinearProgram(np.eye(len(most))[k], matrix, row_least, row_most, most)
        found = lp.solve()
        if found is not None:
            assert found.value <= limit + 1e-6


@given(programs())
@settings(max_examples=50, deadline=None)
def test_programs_are_the_same_filled_in_at_once(program):
    matrix, row_least, row_most, most = program
    arguments = np.ones(len(most)), matrix, row_least, row_most, most
    one_by_one = LinearProgram(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_program, "MANY_ENTRIES", 0)
        at_once = LinearProgram(*arguments)
    texts = [each._model.export_to_mps_string() for each in (one_by_one, at_once)]
    assert texts[0] == texts[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_warm_program_is_the_same_after_every_change(seed):
    rng = np.random.default_rng(seed)
    size, rows = 6, 4
    matrix = SparseRows.dense(rng.uniform(0.1, 2.0, (rows, size)) * (rng.random((rows, size)) < 0.8))
    gain, row_most = rng.uniform(0.0, 3.0, size), rng.uniform(1.0, 9.0, rows)
    arrays = gain, matrix, np.full(rows, -math.inf), row_most
    cold, warm = LinearProgram(*arrays, most=np.full(size, 20.0)), WarmProgram(*arrays)
    for column in range(size):
        warm.at_most(column, 20.0)
    for _ in range(5):
        column = int(rng.integers(size))
        least, value = float(rng.choice([0.0, 0.3, 2.5])), float(rng.uniform(0.0, 3.0))
        for program in (cold, warm):
            program.at_least(column, least)
            program.set_gain(column, value)
        one, other = cold.solve(), warm.solve()
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert other.value == pytest.approx(one.value, abs=1e-7)


def test_a_warm_program_takes_other_coefficients():
    matrix = SparseRows.dense(np.array([[1.0, 1.0], [2.0, 0.0]]))
    program = WarmProgram(np.array([1.0, 0.5]), matrix, np.full(2, -math.inf), np.array([4.0, 2.0]))
    first = program.solve()
    assert first is not None
    assert first.x.tolist() == pytest.approx([1.0, 3.0])
    assert first.duals.tolist() == pytest.approx([0.5, 0.25])
    program.set_entries(0, np.array([0, 1]), np.array([1.0, 1.0]))
    second = program.solve()
    assert second is not None
    assert second.x.tolist() == pytest.approx([2.0, 2.0])

"""Linear programs, solved by OR-tools' GLOP (simplex), which is quick where they are small and solved again
and again, or by HiGHS where little changes from one time to the next; and integer programs, solved by HiGHS
(branch and cut)."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import highspy
import numpy as np
from ortools.linear_solver.python import model_builder_helper as linear

from hexgen2.search.sparse_rows import MANY_ENTRIES, SparseRows

IMPLIED_PASSES = 8
"""Times that all rows are looked at for limits of variables."""


@dataclass(frozen=True)
class Optimum:
    """A solution x: its value, the value that no solution exceeds (the same, unless an integer program was
    cut short), and of a linear program the dual of each row (none of an integer program)."""

    value: float
    bound: float
    x: np.ndarray
    duals: np.ndarray


def _fill(
    model: linear.ModelBuilderHelper,
    gain: np.ndarray,
    matrix: SparseRows,
    row_least: np.ndarray,
    row_most: np.ndarray,
    most: np.ndarray,
) -> None:
    """Fill in a program: one entry at a time, or where there are many, all at once in a tenth of the time."""
    size = len(gain)
    if len(matrix.values) > MANY_ENTRIES:
        from scipy.sparse import csr_array

        shape = matrix.count, matrix.width
        rows = csr_array((matrix.values, matrix.columns, matrix.starts), shape=shape)
        model.fill_model_from_sparse_data(np.zeros(size), most, gain, row_least, row_most, rows)  # type: ignore[arg-type]
        return
    model.add_var_array_with_bounds(np.zeros(size), most, np.zeros(size, dtype=bool), "")  # type: ignore[arg-type]
    for column, each in enumerate(gain.tolist()):
        model.set_var_objective_coefficient(column, each)
    for low, high in zip(row_least.tolist(), row_most.tolist(), strict=True):
        row = model.add_linear_constraint()
        model.set_constraint_lower_bound(row, low)
        model.set_constraint_upper_bound(row, high)
    add = model.add_term_to_constraint
    for entry in zip(matrix.rows.tolist(), matrix.columns.tolist(), matrix.values.tolist(), strict=True):
        add(*entry)


class LinearProgram:
    """max gain x over 0 <= x <= most and row_least <= matrix x <= row_most. It can be changed and solved
    again.

    Parameters
    ----------
    gain, most : [n]; without `most`, x has no upper limit
    matrix : [r, n]
    row_least, row_most : [r], which may be infinite
    """

    def __init__(
        self,
        gain: np.ndarray,
        matrix: SparseRows,
        row_least: np.ndarray,
        row_most: np.ndarray,
        most: np.ndarray | None = None,
    ) -> None:
        size = len(gain)
        most = np.full(size, math.inf) if most is None else most
        self._model = linear.ModelBuilderHelper()
        _fill(self._model, gain, matrix, row_least, row_most, most)
        self._model.set_maximize(True)

    @property
    def size(self) -> int:
        """n, the number of variables."""
        return self._model.num_variables()

    def minimise(self, cost: Iterable[float]) -> None:
        """From now on, minimise cost x [n] instead."""
        for column, each in enumerate(cost):
            self._model.set_var_objective_coefficient(column, each)
        self._model.set_maximize(False)

    def set_gain(self, column: int, gain: float) -> None:
        """Change the gain of one variable."""
        self._model.set_var_objective_coefficient(column, gain)

    def at_least(self, column: int, amount: float) -> None:
        """From now on, x[column] is no less."""
        self._model.set_var_lower_bound(column, float(amount))

    def at_most(self, column: int, amount: float) -> None:
        """From now on, x[column] is no more."""
        self._model.set_var_upper_bound(column, float(amount))

    def row_at_most(self, row: int, amount: float) -> None:
        """From now on, (matrix x)[row] is no more."""
        self._model.set_constraint_upper_bound(row, amount)

    def solve(self, parameters: str = "") -> Optimum | None:
        """The optimum by the simplex method; None if there is none.

        Parameters
        ----------
        parameters : GLOP's, as text of its protocol buffer
        """
        solver = linear.ModelSolverHelper("glop")
        if parameters:
            solver.set_solver_specific_parameters(parameters)
        solver.solve(self._model)
        if not solver.has_solution():
            return None
        value, duals = solver.objective_value(), np.asarray(solver.dual_values())
        return Optimum(value, value, np.asarray(solver.variable_values()), duals)


class WarmProgram:
    """The same program, solved by HiGHS, which begins where it ended the last time: quicker, if little has
    changed since. After a change of the optimum's ties, it may be another optimum than LinearProgram's.

    Parameters
    ----------
    gain, matrix, row_least, row_most : as of LinearProgram
    """

    def __init__(
        self, gain: np.ndarray, matrix: SparseRows, row_least: np.ndarray, row_most: np.ndarray
    ) -> None:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(gain), len(row_least)
        lp.sense_ = highspy.ObjSense.kMaximize
        self._least, self._most, self._gain = np.zeros(len(gain)), np.full(len(gain), math.inf), gain.copy()
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self._gain, self._least, self._most
        lp.row_lower_, lp.row_upper_ = row_least, row_most
        set_rows(lp, matrix)
        # What is simplified first has no basis to begin with.
        self._solver = make_highs(presolve="off")
        self._solver.passModel(lp)
        self._columns = np.arange(len(gain), dtype=np.int32)

    def set_gain(self, column: int, gain: float) -> None:
        """Change the gain of one variable."""
        self._gain[column] = gain

    def at_least(self, column: int, amount: float) -> None:
        """From now on, x[column] is no less."""
        self._least[column] = amount

    def at_most(self, column: int, amount: float) -> None:
        """From now on, x[column] is no more."""
        self._most[column] = amount

    def set_entries(self, column: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Change the entries of one variable in these rows [k], in which it had some before."""
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            self._solver.changeCoeff(row, column, value)

    def solve(self) -> Optimum | None:
        """The optimum; None if there is none."""
        size = len(self._columns)
        self._solver.changeColsCost(size, self._columns, self._gain)
        self._solver.changeColsBounds(size, self._columns, self._least, self._most)
        self._solver.run()
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        value, found = float(self._solver.getInfo().objective_function_value), self._solver.getSolution()
        return Optimum(value, value, np.array(found.col_value), np.array(found.row_dual))


def solve_whole(
    gain: np.ndarray,
    matrix: SparseRows,
    row_least: np.ndarray,
    row_most: np.ndarray,
    whole_most: Mapping[int, float],
    gap: float,
    branches: int,
    time_s: float | None = None,
    least_value: float = 0.0,
) -> Optimum:
    """The best solution found of max gain x over x >= 0 and row_least <= matrix x <= row_most, until it is
    within this relative gap of the bound, or so many branches or seconds are spent; a value of 0 and no x
    [n] that is not 0 if none is found.

    Parameters
    ----------
    whole_most : the variables with whole numbers, and the most that each may be
    least_value : solutions of less are of no interest, so that none may be found, and none exceed -infinity
    """
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(gain), len(row_least)
    lp.sense_ = highspy.ObjSense.kMaximize
    most, kinds = np.full(len(gain), math.inf), [highspy.HighsVarType.kContinuous] * len(gain)
    for column, limit in whole_most.items():
        most[column], kinds[column] = limit, highspy.HighsVarType.kInteger
    # Of variables without limits, HiGHS 1.12 takes solutions for the best that are not.
    most = implied_most(matrix, row_least, row_most, most)
    lp.col_cost_, lp.col_lower_, lp.col_upper_, lp.integrality_ = gain, np.zeros(len(gain)), most, kinds
    lp.row_lower_, lp.row_upper_ = row_least, row_most
    set_rows(lp, matrix)
    # To simplify the program first takes as long as to solve it.
    solver = make_highs(presolve="off", mip_rel_gap=gap, mip_max_nodes=branches)
    if time_s is not None:
        solver.setOptionValue("time_limit", max(time_s, 1e-3))
    solver.passModel(lp)
    if least_value > 0:
        valued = np.flatnonzero(gain)
        solver.addRow(least_value, math.inf, len(valued), valued.astype(np.int32), gain[valued])
    run(solver)
    info, nothing = solver.getInfo(), np.zeros(0)
    bound = float(info.mip_dual_bound)
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        bound = -math.inf
    elif not math.isfinite(bound):
        bound = math.inf
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Optimum(0.0, bound, np.zeros(len(gain)), nothing)
    value = float(info.objective_function_value)
    return Optimum(value, max(bound, value), np.array(solver.getSolution().col_value), nothing)


def implied_most(
    matrix: SparseRows, row_least: np.ndarray, row_most: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """[n] what no x exceeds, with 0 <= x <= most and row_least <= matrix x <= row_most: as far as the rows,
    one at a time and with what the others have shown, say so."""
    row, column, value = matrix.rows, matrix.columns, matrix.values
    # Rows with least values are rows with most values, negated.
    row, column, value = np.r_[row, row + matrix.count], np.r_[column, column], np.r_[value, -value]
    limit = np.r_[row_most, -row_least]
    takes = np.flatnonzero((value > 0) & np.isfinite(limit[row]))
    most = most.astype(float)
    for _ in range(IMPLIED_PASSES):
        gives = np.where(value < 0, -value * np.where(value < 0, most[column], 0.0), 0.0)
        room = limit + np.bincount(row, gives, len(limit))
        found = most.copy()
        np.minimum.at(found, column[takes], np.maximum(room[row[takes]] / value[takes], 0.0))
        if np.array_equal(found, most):
            break
        most = found
    return most


def set_rows(lp: highspy.HighsLp, matrix: SparseRows) -> None:
    """Make this the matrix of a program for HiGHS."""
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.starts, matrix.columns
    lp.a_matrix_.value_ = matrix.values


def make_highs(**options: float | str) -> highspy.Highs:
    """HiGHS on one thread, without output, with these options; the same input gives the same result."""
    solver = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, "random_seed": 0, **options}.items():
        solver.setOptionValue(name, value)
    return solver


def run(solver: highspy.Highs) -> None:
    """Run HiGHS so that Ctrl-C is heard: it stops, and the interrupt goes on."""
    solver.HandleUserInterrupt = True
    thread = threading.Thread(target=solver.run, daemon=True)
    with _stdout_kept:
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.1)
        except KeyboardInterrupt:
            solver.cancelSolve()
            thread.join()
            raise


class _StdoutKept:
    """Keeps stdout for results while solvers run: HiGHS prints a line there when it repairs a solution,
    whatever its options say. Meanwhile stdout is stderr."""

    def __init__(self) -> None:
        self._lock, self._solvers = threading.Lock(), 0
        self._stdout: int | None = None
        self._libc = ctypes.CDLL(None)

    def __enter__(self) -> None:
        with self._lock:
            self._solvers += 1
            if self._solvers == 1:
                sys.stdout.flush()
                with suppress(OSError):  # There may be no stdout, or no stderr.
                    self._stdout = os.dup(1)
                    os.dup2(2, 1)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._solvers -= 1
            if self._solvers == 0 and self._stdout is not None:
                sys.stdout.flush()
                self._libc.fflush(None)
                os.dup2(self._stdout, 1)
                os.close(self._stdout)
                self._stdout = None


_stdout_kept = _StdoutKept()

"""Linear and integer programs, solved by OR-tools: GLOP (simplex) and SCIP (branch and cut)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver.python import model_builder_helper as linear
from scipy.sparse import csr_array


@dataclass(frozen=True)
class Optimum:
    """A solution x: its value, the value that no solution exceeds (the same, unless an integer program was
    cut short), and of a linear program the dual of each row (none of an integer program)."""

    value: float
    bound: float
    x: np.ndarray
    duals: np.ndarray


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
        matrix: csr_array,
        row_least: np.ndarray,
        row_most: np.ndarray,
        most: np.ndarray | None = None,
    ) -> None:
        size = len(gain)
        most = np.full(size, math.inf) if most is None else most
        self._model = model = linear.ModelBuilderHelper()
        model.fill_model_from_sparse_data(np.zeros(size), most, gain, row_least, row_most, matrix)  # type: ignore[arg-type]
        model.set_maximize(True)

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

    def solve_integer(
        self, whole: Iterable[int], gap: float, branches: int | None = None, time_s: float | None = None
    ) -> Optimum:
        """The best solution found with whole numbers for these variables, until it is within this
        relative gap of the bound, or so many branches or seconds are spent. If none is found, its value is
        0."""
        for column in whole:
            self._model.set_var_integrality(column, True)
        solver = linear.ModelSolverHelper("scip")
        parameters = [f"limits/gap = {gap}", "misc/catchctrlc = FALSE"]
        if branches is not None:
            parameters.append(f"limits/nodes = {branches}")
        solver.set_solver_specific_parameters("\n".join(parameters))
        if time_s is not None:
            solver.set_time_limit_in_seconds(time_s)
        _solve_in_thread(solver, self._model)
        bound, none = solver.best_objective_bound(), np.zeros(0)
        if not solver.has_solution():
            return Optimum(0.0, bound, np.zeros(self.size), none)
        return Optimum(solver.objective_value(), bound, np.array(solver.variable_values()), none)


def _solve_in_thread(solver: linear.ModelSolverHelper, model: linear.ModelBuilderHelper) -> None:
    """Solve so that Ctrl-C is heard: the solver stops, and the interrupt goes on."""
    thread = threading.Thread(target=solver.solve, args=(model,), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        solver.interrupt_solve()
        thread.join()
        raise

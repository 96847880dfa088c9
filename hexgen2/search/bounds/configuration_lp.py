"""The linear program over columns, with KV transfers between the nodes they stand on.

The variable z of a column is how many such groups there are, F the throughput:

    max F   with   F <= sum of capacity z over prefill columns, and over decode columns,
                   sum of GPUs z <= GPUs of each class,
                   sum of price z <= the budget, if there is one.

Every request's KV cache moves, layer by layer, from where it was computed to where it is read. Let
y[a, b] be the requests/s, times the share of their layers, that move from class a to class b:

    sum of y = F,    KV bytes y <= what the links, cards and uplinks in between carry,
    sum over b of y[a, b] <= what the GPUs in prefill columns on class a can do; likewise for decode.

Every placement is a solution, whichever routes and orders of stages it has; so the value is an upper
bound (search/bound.py), with z integer a tighter one. Columns laid out on nodes are a start for the
search (search/dive.py). Where links are counted pairwise, transfers are left aside, since there two
routes over one link each have it whole.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver.python import model_builder_helper as linear
from scipy.sparse import csr_array

from hexgen2.placement import OPTIMAL
from hexgen2.search.bounds.columns import ROLES, Column
from hexgen2.search.bounds.upper_bounds import node_rates
from hexgen2.search.partition.coarsen import sums_by
from hexgen2.search.planning.classes import NodeClasses
from hexgen2.search.ties import spread

INFINITY = math.inf
TIE = 1e-3
"""Share of a column's capacity by which a rule may prefer another one: the solver's tolerance is 1e-6."""
Entries = list[tuple[int, float]]
"""A column of the matrix: (row, coefficient)."""


@dataclass(frozen=True)
class Relaxation:
    """A solution: its value, an upper limit that is proven (the same, unless an integer solution was cut
    short), and how many groups of each column."""

    value: float
    limit: float
    amounts: np.ndarray


class Master:
    """The rows, which depend on the cluster only; columns come with each solve."""

    def __init__(self, classes: NodeClasses, with_kv: bool = True) -> None:
        self._classes = classes
        self._problem = problem = classes.problem
        self._with_kv = with_kv and len(problem.node_gpus) > 1
        self._rows: list[tuple[float, float]] = []
        self._flow: Entries = [(self._row(0.0, INFINITY), -1.0) for _ in ROLES]
        self._gpu_row = [self._row(-INFINITY, float(gpus)) for gpus in classes.gpus]
        self._price = [problem.node_price[nodes[0]] for nodes in classes.nodes]
        self._price_row = self._row(-INFINITY, INFINITY)
        self._moves: list[Entries] = []
        if self._with_kv:
            rates = node_rates(problem)
            at_best = [rates[nodes[0]] for nodes in classes.nodes]
            self._rates = dict(zip(ROLES, zip(*at_best, strict=True), strict=True))
            self._lay_kv_rows()

    def _row(self, low: float, high: float) -> int:
        self._rows.append((low, high))
        return len(self._rows) - 1

    def _lay_kv_rows(self) -> None:
        """Rows and columns of y. What links and cards carry is added up over the nodes of a class."""
        problem, classes = self._problem, self._classes.nodes
        size, nodes = len(classes), len(problem.node_gpus)
        links = problem.shared_links.capacity_bytes_s[: nodes**2].reshape(nodes, nodes).copy()
        np.fill_diagonal(links, 0.0)
        kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
        class_of = np.array(self._classes.class_of)
        between = sums_by(sums_by(links, class_of).T, class_of).T / kv_bytes
        card = sums_by(problem.cluster.card_bytes_s, class_of) / kv_bytes

        total = self._row(0.0, 0.0)
        self._flow.append((total, -1.0))
        self._rate_row = {role: [self._row(-INFINITY, 0.0) for _ in classes] for role in ROLES}
        out, into = ([self._row(-INFINITY, float(c)) for c in card] for _ in range(2))
        uplinks = []
        for uplink in problem.cluster.uplinks:
            leaving, entering = (self._row(-INFINITY, uplink.bandwidth_bytes_s / kv_bytes) for _ in range(2))
            uplinks.append((uplink.nodes, leaving, entering))
        for a, b in itertools.product(range(size), repeat=2):
            ends = [(total, 1.0), (self._rate_row["prefill"][a], 1.0), (self._rate_row["decode"][b], 1.0)]
            if a == b:
                self._moves.append(ends)  # inside a node
            if between[a, b] <= 0:
                continue
            link = self._row(-INFINITY, float(between[a, b]))
            crossed = [(out[a], 1.0), (into[b], 1.0), (link, 1.0)]
            for members, leaving, entering in uplinks:
                inside = [classes[side][0] in members for side in (a, b)]
                if inside[0] != inside[1]:
                    crossed.append((leaving if inside[0] else entering, 1.0))
            self._moves.append(ends + crossed)

    def _entries(self, column: Column) -> Entries:
        entries = [(ROLES.index(column.role), column.capacity_req_s)]
        entries.append((self._price_row, self.price_of(column)))
        for which, count in column.gpus:
            entries.append((self._gpu_row[which], float(count)))
            if self._with_kv:
                rate = self._rates[column.role][which]
                entries.append((self._rate_row[column.role][which], -rate * count))
        return entries

    def program(self, columns: Sequence[Column], budget: float = INFINITY) -> Program:
        """The linear program over these columns, within a budget (US dollars per hour)."""
        model, first = self._model(columns)
        model.set_constraint_upper_bound(self._price_row, budget)
        return Program(model, first)

    def solve(self, columns: Sequence[Column], budget: float = INFINITY) -> Relaxation:
        """The linear program, solved."""
        return self.program(columns, budget).solve()

    def solve_whole(
        self,
        columns: Sequence[Column],
        budget: float = INFINITY,
        branches: int | None = None,
        time_s: float | None = None,
    ) -> Relaxation:
        """With whole groups only, until optimal or so many branches or seconds are spent."""
        model, first = self._model(columns)
        model.set_constraint_upper_bound(self._price_row, budget)
        for k, column in enumerate(columns, first):
            model.set_var_integrality(k, True)
            model.set_var_upper_bound(k, min(self._classes.gpus[c] // n for c, n in column.gpus))
        solver = linear.ModelSolverHelper("scip")
        parameters = [f"limits/gap = {OPTIMAL}", "misc/catchctrlc = FALSE"]
        if branches is not None:
            parameters.append(f"limits/nodes = {branches}")
        solver.set_solver_specific_parameters("\n".join(parameters))
        if time_s is not None:
            solver.set_time_limit_in_seconds(time_s)
        _solve_in_thread(solver, model)
        if not solver.has_solution():
            return Relaxation(0.0, solver.best_objective_bound(), np.zeros(len(columns)))
        amounts = np.array(solver.variable_values())[first:]
        return Relaxation(solver.objective_value(), solver.best_objective_bound(), amounts)

    def least_price(self, columns: Sequence[Column], req_s: float) -> float:
        """$ per hour below which no placement carries req_s; infinity if none does."""
        model, first = self._model(columns)
        model.set_var_objective_coefficient(0, 0.0)
        for k, column in enumerate(columns):
            model.set_var_objective_coefficient(first + k, self.price_of(column))
        model.set_maximize(False)
        model.set_var_lower_bound(0, req_s)
        solver = linear.ModelSolverHelper("glop")
        solver.solve(model)
        return solver.objective_value() if solver.has_solution() else INFINITY

    def price_of(self, column: Column) -> float:
        """US dollars per hour for the GPUs of one group."""
        return math.fsum(self._price[which] * count for which, count in column.gpus)

    def _model(self, columns: Sequence[Column]) -> tuple[linear.ModelBuilderHelper, int]:
        """The linear program, and where its columns z begin."""
        fixed = [self._flow, *self._moves]
        matrix = [*fixed, *(self._entries(column) for column in columns)]
        first, size = len(fixed), len(matrix)
        gain = np.zeros(size)
        gain[0] = 1.0
        row, value = np.array([entry for entries in matrix for entry in entries]).T
        column = np.repeat(np.arange(size), [len(entries) for entries in matrix])
        row_low, row_high = np.array(self._rows).T
        coefficients = csr_array((value, (row.astype(int), column)), shape=(len(self._rows), size))
        model = linear.ModelBuilderHelper()
        bounds = (np.zeros(size), np.full(size, INFINITY), gain, row_low.copy(), row_high.copy())
        model.fill_model_from_sparse_data(*bounds, coefficients)  # type: ignore[arg-type]
        model.set_maximize(True)
        return model, first


class Program:
    """A linear program whose columns can be held to whole numbers, one after the other."""

    def __init__(self, model: linear.ModelBuilderHelper, first: int) -> None:
        self._model, self._first = model, first

    def break_ties(self, capacities: Sequence[float]) -> None:
        """From now on, of the solutions within TIE of the optimum take the one that weighs least, by weights
        that no two columns share: otherwise the solver's pivots would choose. The value is then no bound.

        Parameters
        ----------
        capacities : requests/s of each column
        """
        for k, weight in enumerate(spread(len(capacities)).tolist()):
            self._model.set_var_objective_coefficient(self._first + k, -TIE * weight * capacities[k])

    def at_least(self, column: int, groups: int) -> None:
        """From now on, no fewer groups of the column."""
        self._model.set_var_lower_bound(self._first + column, float(groups))

    def at_most(self, column: int, groups: int) -> None:
        """From now on, no more groups of the column."""
        self._model.set_var_upper_bound(self._first + column, float(groups))

    def solve(self) -> Relaxation:
        """Its optimum; nothing if there is none."""
        solver = linear.ModelSolverHelper("glop")
        solver.solve(self._model)
        if not solver.has_solution():
            return Relaxation(0.0, 0.0, np.zeros(self._model.num_variables() - self._first))
        value = solver.objective_value()
        return Relaxation(value, value, np.array(solver.variable_values())[self._first :])


def _solve_in_thread(solver: linear.ModelSolverHelper, model: linear.ModelBuilderHelper) -> None:
    """Solve so that Ctrl-C is heard: the solver then stops, and the interrupt goes on."""
    thread = threading.Thread(target=solver.solve, args=(model,), daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        solver.interrupt_solve()
        thread.join()
        raise

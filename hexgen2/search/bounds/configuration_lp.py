"""The configuration LP: which groups of GPUs to form, with KV transfers between the nodes they stand on.

A linear program over columns (see columns.py), as in cutting stock (Gilmore & Gomory, 1961). The variable z
of a column is how many such groups there are, F the throughput in requests/s:

    max F   with   F <= sum of capacity z over prefill columns, and over decode columns,
                   each with that over colocated columns,
                   sum of z with n GPUs on a node of a class <= slots of n GPUs there, for each n,
                   sum of price z <= the budget, if there is one.

A node is divided into slots in some way: for each way there is a variable, of which there are together no
more than nodes of that size. So two groups of 5 GPUs do not share a node of 8 (the pattern formulation again,
one level down). On nodes of more than LARGEST GPUs, which have too many ways, groups only share the GPUs.

The KV cache of every request moves, layer by layer, from where it was computed to where it is read. Let
y[a, b] be the requests/s, times the share of their layers, that move from class a to class b:

    sum of y + sum of capacity z over colocated columns >= F,
    KV bytes y <= what the links, cards and uplinks in between carry,
    sum over b of y[a, b] <= what the GPUs in prefill columns on class a can do; likewise for decode.

A colocated column whose groups may work for others has a variable for each corner of its region instead of
one capacity; together they are at most z. Of these, no more than all their prompts, or all their answers,
stay where they are. On a single class, its GPUs handle KV caches as far as its corners allow, and what stays
is among what moves inside the class.

Every placement is a solution, whatever its routes and the order of its stages. So the value is an upper
bound (upper_bounds.py), and with whole z a tighter one. Rounded to whole groups on nodes it is a start for
the search (rounding.py). Under links "pairwise" transfers are left out: two routes over one link then have
all of it each.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from hexgen2.placement import OPTIMAL
from hexgen2.search.bounds.column_generation import Bills, ColumnGeneration, Relaxation
from hexgen2.search.bounds.columns import Column
from hexgen2.search.bounds.matrix_columns import OWN, Corners, Entries, Entry, MatrixColumns, Times
from hexgen2.search.bounds.upper_bounds import node_rates
from hexgen2.search.linear_program import LinearProgram, WarmProgram, solve_whole
from hexgen2.search.partition.coarsen import sums_by
from hexgen2.search.planning.classes import NodeClasses
from hexgen2.search.planning.shapes import partitions
from hexgen2.search.problem import ROLES
from hexgen2.search.sparse_rows import SparseRows
from hexgen2.search.ties import spread

INFINITY = math.inf
PHASES = ROLES["disaggregated"]
ROUNDING = 1e-6
"""Share of a value that may be the solver's rounding."""
LARGEST = 16
"""GPUs of the largest node that is divided into slots."""
TIE = 1e-3
"""Share of a column's capacity by which a rule may prefer another one: the solver's tolerance is 1e-6."""
Pairs = list[tuple[int, float]]
"""A column of the matrix: (row, coefficient)."""
Arrays = tuple[np.ndarray, SparseRows, np.ndarray, np.ndarray]


class ConfigurationLP:
    """The rows of the program, which depend only on the cluster; columns come with each solve."""

    def __init__(self, classes: NodeClasses, with_kv: bool = True) -> None:
        self._classes = classes
        self._problem = problem = classes.problem
        self._with_kv = with_kv and len(problem.node_gpus) > 1
        self._rows: list[tuple[float, float]] = []
        self._flow: Pairs = [(self._row(0.0, INFINITY), -1.0) for _ in PHASES]
        self._slots: list[Pairs] = []
        # Of each class and number of GPUs on a node: the row that counts them, and how many one counts for.
        self._gpu_row: list[dict[int, tuple[int, float]]] = [
            self._lay_slots(nodes) for nodes in classes.nodes
        ]
        self._price = [problem.node_price[nodes[0]] for nodes in classes.nodes]
        self._price_row = self._row(-INFINITY, INFINITY)
        self._moves: list[Pairs] = []
        self._local: list[Pairs] = []
        self._matrix = MatrixColumns(self._entries, self._handled_at)
        if self._with_kv:
            rates = node_rates(problem)
            at_best = [rates[nodes[0]] for nodes in classes.nodes]
            self._rates = dict(zip(PHASES, zip(*at_best, strict=True), strict=True))
            self._lay_kv_rows()
        self._bought = np.zeros(len(self._rows), dtype=bool)
        self._bought[[self._price_row, *(row for rows in self._gpu_row for row, _ in rows.values())]] = True
        self._generation = ColumnGeneration(self._matrix, self._bought)

    def apart(self) -> ConfigurationLP:
        """The same program, whose solutions begin where these do by now, and later where its own do: what is
        found in the background does not depend on what is found here meanwhile."""
        other = copy.copy(self)
        other._generation = copy.copy(self._generation)
        return other

    def _row(self, low: float, high: float) -> int:
        """Add a row with these limits; its number."""
        self._rows.append((low, high))
        return len(self._rows) - 1

    def _lay_slots(self, nodes: Sequence[int]) -> dict[int, tuple[int, float]]:
        """The rows for the GPUs of a class, and the ways to divide its nodes into slots."""
        sizes = Counter(len(self._problem.node_gpus[node]) for node in nodes)
        if max(sizes) > LARGEST:
            row = self._row(-INFINITY, float(sum(size * count for size, count in sizes.items())))
            return {count: (row, float(count)) for count in range(1, max(sizes) + 1)}
        rows = {count: self._row(-INFINITY, 0.0) for count in range(1, max(sizes) + 1)}
        for size, count in sizes.items():
            of_size = self._row(-INFINITY, float(count))
            for way in partitions(size, tuple(range(1, size + 1))):
                slots = [(rows[slot], -float(amount)) for slot, amount in Counter(way).items()]
                self._slots.append([(of_size, 1.0), *slots])
        return {count: (row, 1.0) for count, row in rows.items()}

    def _lay_kv_rows(self) -> None:
        """Rows and columns of y. What links and cards carry is added up over the nodes of a class."""
        problem, classes = self._problem, self._classes.nodes
        size, nodes = len(classes), len(problem.node_gpus)
        links = problem.shared_links.capacity_bytes_s[: nodes**2].reshape(nodes, nodes).copy()
        np.fill_diagonal(links, 0.0)
        kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
        here = np.array(list(itertools.chain.from_iterable(classes)))
        class_of = np.repeat(np.arange(size), [len(members) for members in classes])
        between = sums_by(sums_by(links[np.ix_(here, here)], class_of).T, class_of).T / kv_bytes
        card = sums_by(problem.cluster.card_bytes_s[here], class_of) / kv_bytes

        alone = "colocated" in problem.roles
        self._moved_row = total = self._row(0.0, INFINITY if alone else 0.0)
        self._flow.append((total, -1.0))
        if problem.mixes:
            # Requests that mixed groups keep: as far as they compute the prompts and decode the answers.
            self._local_rows = [self._row(-INFINITY, 0.0) for _ in PHASES]
            self._local.append([(total, 1.0), *((row, 1.0) for row in self._local_rows)])
        self._rate_row = {role: [self._row(-INFINITY, 0.0) for _ in classes] for role in PHASES}
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
                # Of a class whose nodes are on both sides, nobody knows what crosses.
                inside = [sum(node in members for node in classes[side]) for side in (a, b)]
                if inside == [len(classes[a]), 0]:
                    crossed.append((leaving, 1.0))
                elif inside == [0, len(classes[b])]:
                    crossed.append((entering, 1.0))
            self._moves.append(ends + crossed)

    def _entries(self, column: Column) -> list[Entry]:
        """The entries of a column: its capacity, price, GPUs and, negated, the KV caches that its GPUs can
        handle; those of a colocated one need not be moved."""
        colocated = column.role == "colocated"
        entries = list[Entry]()
        if column.region is None:
            roles = enumerate(PHASES)
            of_phases = [k for k, role in roles if colocated or role == column.role]
            moved = [self._moved_row] if colocated and self._with_kv else []
            entries = [Entry(row, 1.0, Times.CAPACITY) for row in (*of_phases, *moved)]
        entries.append(Entry(self._price_row, self.price_of(column)))
        entries += [Entry(*self._gpu_row[which][count]) for which, count in column.pattern]
        moves = self._with_kv and not (colocated and (column.region is None or self._in_one_class(column)))
        for which, count in column.gpus if moves else ():
            for phase in PHASES if colocated else (column.role,):
                row, most = self._rate_row[phase][which], self._rates[phase][which] * count
                entries.append(Entry(row, -most) if colocated else Entry(row, most, Times.AT_MOST_CAPACITY))
        if column.region is not None:
            entries.append(Entry(OWN, -1.0))
        return entries

    @staticmethod
    def _in_one_class(column: Column) -> bool:
        return len(column.gpus) == 1

    def _handled_at(self, column: Column) -> tuple[int, ...]:
        """The rows in which the prompts and the answers of a mixed column's corners are handled. On one
        class, KV caches that stay where they are count among those that move inside the class."""
        if not self._with_kv:
            return ()
        if self._in_one_class(column):
            return tuple(self._rate_row[phase][column.gpus[0][0]] for phase in PHASES)
        return tuple(self._local_rows)

    def relaxed_groups(self, columns: Sequence[Column], budget: float = INFINITY) -> RelaxedGroups:
        """The program over these columns, within a budget (US dollars per hour)."""
        program = LinearProgram(*self._arrays(columns, budget))
        return RelaxedGroups(program, self._first, len(columns))

    def warm_groups(self, columns: Sequence[Column]) -> WarmGroups:
        """The same, to be solved again and again with little changed."""
        return WarmGroups(WarmProgram(*self._arrays(columns)), self._first, len(columns))

    def capacity_entries(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Rows [n] and coefficients [n] of the matrix's column for one that is worth what it can do alone."""
        return self._matrix.entries([column.alone])[:2]

    def solve(self, columns: Sequence[Column], budget: float = INFINITY) -> Relaxation:
        """The optimum over these columns, within a budget (US dollars per hour)."""
        return self._generation.solve(
            columns, partial(self._shares_of_best, columns), partial(self._solve_all, budget)
        )

    def _solve_all(self, budget: float, columns: Sequence[Column]) -> Relaxation:
        """The same by one program."""
        found = LinearProgram(*self._divided_arrays(columns, budget)).solve()
        if found is None:
            return Relaxation(0.0, 0.0, np.zeros(len(columns)), np.zeros(0))
        first, last = self._first, self._first + len(columns)
        mixed = [k for k, column in enumerate(columns) if column.region is not None]
        owner = np.repeat(np.array(mixed, dtype=int), [len(columns[k].corners) for k in mixed])
        amounts = found.x[first:last] + np.bincount(owner, found.x[last:], len(columns))
        return Relaxation(found.value, found.bound, amounts, found.duals)

    def _shares_of_best(self, columns: Sequence[Column]) -> np.ndarray:
        """[columns] what a group can do, in parts of what its GPUs could if each worked alone at its best."""
        rates = [node_rates(self._problem)[nodes[0]] for nodes in self._classes.nodes]
        best = {
            "prefill": [p for p, _ in rates],
            "decode": [d for _, d in rates],
            "colocated": [p * d / (p + d) for p, d in rates],
        }
        return np.array(
            [
                column.capacity_req_s / math.fsum(best[column.role][which] * n for which, n in column.gpus)
                for column in columns
            ]
        )

    def solve_whole(
        self,
        columns: Sequence[Column],
        budget: float,
        branches: int,
        time_s: float | None = None,
        known: float = 0.0,
    ) -> Relaxation:
        """The same with whole groups only, until optimal or so many branches or seconds are spent. Solutions
        of less than `known` requests/s are left out; there may be no groups then."""
        relaxed = self.solve(columns, budget)
        most = self.most_groups(columns, relaxed, known)
        kept = np.flatnonzero(most).tolist()
        arrays = self._arrays([columns[k] for k in kept], budget)
        groups = range(self._first, self._first + len(kept))
        limits = dict(zip(groups, most[kept].tolist(), strict=True))
        found = solve_whole(*arrays, limits, OPTIMAL, branches, time_s, known * (1 - ROUNDING))
        amounts = np.zeros(len(columns))
        amounts[kept] = found.x[groups.start : groups.stop]
        bound = min(relaxed.upper_bound, max(known, found.bound))
        return Relaxation(found.value, bound, amounts, found.duals)

    def most_groups(self, columns: Sequence[Column], relaxed: Relaxation, known: float) -> np.ndarray:
        """[columns] the most groups of each in any solution of more than `known` requests/s: each group takes
        at least what it costs beyond what it brings, at the duals of the relaxed program, off its optimum
        (reduced cost fixing; Dantzig, Fulkerson & Johnson, 1954)."""
        fit = np.array([self._classes.most_groups(column.pattern) for column in columns])
        if not len(relaxed.duals):
            return fit
        gap = relaxed.value - known + ROUNDING * relaxed.value
        brought, cost = self._bills(columns).at(relaxed.duals)
        losses = cost - brought
        room = np.divide(gap, losses, out=np.full(len(columns), np.inf), where=losses > 0)
        return np.minimum(fit, np.floor(np.clip(room, 0, fit.max(initial=0)))).astype(int)

    def cheapest(self, columns: Sequence[Column], req_s: float) -> tuple[float, np.ndarray]:
        """US dollars per hour below which no placement of these columns carries req_s (infinity if none
        does), and how many groups of each column [columns] cost that."""
        program, first = LinearProgram(*self._arrays(columns)), self._first
        prices = [self.price_of(column) for column in columns]
        program.minimise([0.0] * first + prices + [0.0] * (program.size - first - len(columns)))
        program.at_least(0, req_s)
        found = program.solve()
        if found is None:
            return INFINITY, np.zeros(len(columns))
        return found.value, found.x[first : first + len(columns)]

    def cheapest_whole(
        self, columns: Sequence[Column], req_s: float, branches: int, time_s: float | None
    ) -> tuple[float, np.ndarray]:
        """The same with whole groups only, as far as so many branches or seconds show; no groups if none were
        found that carry req_s."""
        gain, matrix, row_least, row_most = self._arrays(columns)
        groups = range(self._first, self._first + len(columns))
        gain[0] = 0.0
        gain[groups.start : groups.stop] = [-self.price_of(column) for column in columns]
        flow = np.zeros(len(gain))
        flow[0] = 1.0
        limits = {k: self._classes.most_groups(c.pattern) for k, c in zip(groups, columns, strict=True)}
        found = solve_whole(
            gain,
            matrix.then(flow),
            np.append(row_least, req_s),
            np.append(row_most, INFINITY),
            limits,
            OPTIMAL,
            branches,
            time_s,
        )
        return -found.bound, np.round(found.x[groups.start : groups.stop])

    def worth(self, columns: Sequence[Column], duals: np.ndarray) -> np.ndarray:
        """[columns] what a group of each brings at these duals, beside what its GPUs cost: at most 1 of all
        columns, and 1 of those that the solution has."""
        return self._bills(columns).worth(duals)

    def _bills(self, columns: Sequence[Column]) -> Bills:
        """What a group of each of these columns brings and costs."""
        return self._generation.bills(columns)

    def price_of(self, column: Column) -> float:
        """US dollars per hour for the GPUs of one group."""
        return math.fsum(self._price[which] * count for which, count in column.gpus)

    @property
    def _first(self) -> int:
        """The number of the variable with which the columns begin."""
        return len(self._before_columns)

    @property
    def _before_columns(self) -> list[Pairs]:
        return [self._flow, *self._slots, *self._local, *self._moves]

    def _arrays(self, columns: Sequence[Column], budget: float = INFINITY) -> Arrays:
        """The program's gain [n], matrix [r, n] and limits of the rows [r]."""
        (row, value, variable), counts = self._joined(columns, divided=False)
        mixed = np.array([column.region is not None for column in columns], dtype=bool)
        own = len(self._rows) + np.cumsum(mixed) - mixed
        numbers = np.concatenate([np.zeros(self._first, dtype=int), own, np.repeat(own[mixed], counts)])
        row = np.where(row == OWN, numbers[variable], row)
        return self._with_rows(row, value, variable, len(numbers), budget, int(mixed.sum()))

    def _divided_arrays(self, columns: Sequence[Column], budget: float) -> Arrays:
        """The same where groups can be divided: each corner of a mixed column takes its groups by itself, so
        that no row counts them, and such a program is solved in less than half the time. The column's own
        variable is that of groups which do nothing but handle KV caches."""
        (row, value, variable), counts = self._joined(columns, divided=True)
        kept = row != OWN
        return self._with_rows(
            row[kept], value[kept], variable[kept], self._first + len(columns) + sum(counts), budget, 0
        )

    def _joined(self, columns: Sequence[Column], divided: bool) -> Corners:
        """All entries of the program, and how many corners each mixed column has. If groups are divided, each
        corner has those of its column, too."""
        first, corners = self._first, self._matrix.corners(columns)
        entries = Entries.of(self._before_columns).then(self._matrix.entries(columns), first)
        entries = entries.then(corners.entries, first + len(columns))
        if divided:
            mixed = [column for column in columns if column.region is not None]
            entries = entries.then(self._matrix.entries(mixed, corners.counts), first + len(columns))
        return Corners(entries, corners.counts)

    def _with_rows(
        self, row: np.ndarray, value: np.ndarray, variable: np.ndarray, size: int, budget: float, own: int
    ) -> Arrays:
        """The program with these entries and so many variables; `own` rows count the groups of columns."""
        rows = [*self._rows] + [(-INFINITY, 0.0)] * own
        rows[self._price_row] = -INFINITY, budget
        gain = np.zeros(size)
        gain[0] = 1.0
        coefficients = SparseRows.of(row, variable, value, (len(rows), size))
        row_least, row_most = np.array(rows).T
        return gain, coefficients, row_least.copy(), row_most.copy()


class RelaxedGroups:
    """The program, with columns that can be held to whole numbers of groups, one after the other."""

    def __init__(self, program: LinearProgram | WarmProgram, first: int, columns: int) -> None:
        self._program, self._first, self._columns = program, first, columns

    def break_ties(self, columns: Sequence[Column], weights: np.ndarray | None = None) -> None:
        """From now on, of the solutions within TIE of the optimum take the one that weighs least: that of
        groups on few nodes, which are easier to lay out, and by weights [columns] that no two of the
        program's columns share, since otherwise the solver's pivots would choose. The value is then no
        bound."""
        weights = spread(len(columns)) if weights is None else weights
        for k, (column, weight) in enumerate(zip(columns, weights.tolist(), strict=True)):
            weight += len(column.pattern) - 1
            self._program.set_gain(self._first + k, -TIE * weight * column.capacity_req_s)

    def at_least(self, column: int, groups: int) -> None:
        """From now on, no fewer groups of the column."""
        self._program.at_least(self._first + column, groups)

    def at_most(self, column: int, groups: int) -> None:
        """From now on, no more groups of the column."""
        self._program.at_most(self._first + column, groups)

    def solve(self) -> Relaxation:
        """The optimum; a value of 0 and no groups if there is none."""
        found = self._program.solve()
        if found is None:
            return Relaxation(0.0, 0.0, np.zeros(self._columns), np.zeros(0))
        groups = found.x[self._first : self._first + self._columns]
        return Relaxation(found.value, found.bound, groups, found.duals)


class WarmGroups(RelaxedGroups):
    """The program over columns that are worth what they can do alone, kept from one rounding to the next."""

    def __init__(self, program: WarmProgram, first: int, columns: int) -> None:
        super().__init__(program, first, columns)
        self._warm = program

    def set_capacity(self, column: int, entries: tuple[np.ndarray, np.ndarray]) -> None:
        """Give a column other coefficients (`capacity_entries`)."""
        self._warm.set_entries(self._first + column, *entries)

    def free(self) -> None:
        """From now on, as many groups of all columns as there is room for."""
        for column in range(self._columns):
            self.at_least(column, 0)
            self._warm.at_most(self._first + column, INFINITY)

"""The paper's integer program for ranges (Helix, section 4.4), solved by HiGHS.

Beyond the paper: flow and capacities are cut at a known upper bound U on the flow, the work bound is a row
(the layers that all nodes pass tokens through are L F at least), and the auxiliary variables of partial
inference are left out, since d_ij <= 1 alone can imply both of their conditions. As in the paper, slow links
are pruned and a known solution is where HiGHS starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import highspy
import numpy as np

from hexgen2.search.layer_ranges.instance import NOTHING, Instance, Ranges
from hexgen2.search.layer_ranges.max_flow import Flow
from hexgen2.search.linear_program import make_highs, run, set_rows
from hexgen2.search.sparse_rows import SparseRows

DEGREE = 12
"""Links that each node keeps in either direction (the paper's pruned cluster has as many)."""
GAP = 1e-7


@dataclass(frozen=True)
class MilpResult:
    """What HiGHS came to.

    ranges : the best placement, None if none was found
    bound_tok_s : no placement on the links that were kept passes more
    pruned : whether links were left out, so that the bound says nothing of placements that use them
    nodes : of the branch and bound tree
    """

    ranges: Ranges | None
    bound_tok_s: float
    pruned: bool
    nodes: int


@dataclass
class _Rows:
    """Rows least <= sum of coefficient x column <= most, as they are added."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def add(self, terms: dict[int, float], least: float = -math.inf, most: float = math.inf) -> None:
        self.row += [len(self.least)] * len(terms)
        self.column += terms
        self.value += terms.values()
        self.least.append(least)
        self.most.append(most)


def kept_links(instance: Instance, degree: int, in_use: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs of nodes that may be linked: the fastest `degree` of each node in either direction, of equal
    ones those to the next nodes in turn, and all that are in use."""
    n, kept = instance.nodes, set(in_use)
    for v in range(n):
        others = [u for u in range(n) if u != v]
        kept |= {
            (v, u) for u in sorted(others, key=lambda u: (-instance.link_tok_s[v, u], (u - v) % n))[:degree]
        }
        kept |= {
            (u, v) for u in sorted(others, key=lambda u: (-instance.link_tok_s[u, v], (v - u) % n))[:degree]
        }
    return sorted(kept)


class _Program:
    """Columns: per node the first layer, whether it holds j layers, the flow from and to the coordinator and
    whether there is one; per link the flow and whether it is valid."""

    def __init__(self, instance: Instance, links: list[tuple[int, int]], most_tok_s: float) -> None:
        self._instance, self._links, self._most = instance, links, most_tok_s
        n, layers = instance.nodes, instance.layers
        tables = [np.minimum(instance.best_tables[k], most_tok_s).tolist() for k in instance.kind]
        self._tables = [table[: most + 1] for table, most in zip(tables, instance.most_layers, strict=True)]
        self._limit: list[float] = []
        self._whole: list[bool] = []
        self.first = [self._column(layers, whole=True) for _ in range(n)]
        self.holds = [
            {j: self._column(1.0, whole=True) for j in range(1, len(t)) if t[j] > 0} for t in self._tables
        ]
        fastest = [max(table, default=0.0) for table in self._tables]
        self.entering = [self._column(min(fastest[v], float(instance.source_tok_s[v]))) for v in range(n)]
        self.leaving = [self._column(min(fastest[v], float(instance.sink_tok_s[v]))) for v in range(n)]
        self.begins = [self._column(1.0, whole=True) for _ in range(n)]
        self.finishes = [self._column(1.0, whole=True) for _ in range(n)]
        self.flow = {
            (a, b): self._column(min(fastest[a], fastest[b], float(instance.link_tok_s[a, b])))
            for a, b in links
        }
        self.valid = {link: self._column(1.0, whole=True) for link in links}
        self.rows = _Rows()
        self._add_rows()

    def _column(self, limit: float, whole: bool = False) -> int:
        self._limit.append(limit)
        self._whole.append(whole)
        return len(self._limit) - 1

    def _end(self, node: int, sign: float = 1.0) -> dict[int, float]:
        """Terms of the end of a node's range."""
        return {self.first[node]: sign, **{c: sign * j for j, c in self.holds[node].items()}}

    def _add_rows(self) -> None:
        instance, add, layers = self._instance, self.rows.add, float(self._instance.layers)
        for v in range(instance.nodes):
            into = {self.entering[v]: 1.0} | {self.flow[link]: 1.0 for link in self._links if link[1] == v}
            out = {self.leaving[v]: -1.0} | {self.flow[link]: -1.0 for link in self._links if link[0] == v}
            add(dict.fromkeys(self.holds[v].values(), 1.0), most=1.0)
            add(self._end(v), most=layers)
            add(into | out, least=0.0, most=0.0)
            add(into | {c: -self._tables[v][j] for j, c in self.holds[v].items()}, most=0.0)
            add({self.first[v]: 1.0, self.begins[v]: layers}, most=layers)
            add({self.finishes[v]: layers} | self._end(v, -1.0), most=0.0)
            for flow, valid in ((self.entering[v], self.begins[v]), (self.leaving[v], self.finishes[v])):
                add({flow: 1.0, valid: -self._limit[flow]}, most=0.0)
        for a, b in self._links:
            flow, valid = self.flow[a, b], self.valid[a, b]
            add({flow: 1.0, valid: -self._limit[flow]}, most=0.0)
            # Whether first_b <= end_a, and end_a < end_b or end_a <= first_b.
            add({self.first[b]: 1.0, valid: layers} | self._end(a, -1.0), most=layers)
            if instance.partial:
                add(self._end(b) | self._end(a, -1.0) | {valid: -(layers + 1)}, least=-layers)
            else:
                add({self.first[b]: -1.0, valid: layers} | self._end(a), most=layers)
        total = dict.fromkeys(self.entering, 1.0)
        add(total, most=self._most)
        work = {c: -j * self._tables[v][j] for v in range(instance.nodes) for j, c in self.holds[v].items()}
        add(dict.fromkeys(self.entering, layers) | work, most=0.0)

    def model(self) -> highspy.HighsLp:
        """The program as HiGHS takes it."""
        size, rows = len(self._limit), self.rows
        matrix = SparseRows.of(
            np.array(rows.row), np.array(rows.column), np.array(rows.value), (len(rows.least), size)
        )
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = size, len(rows.least)
        gain = np.zeros(size)
        gain[self.entering] = 1.0
        lp.col_cost_, lp.sense_ = gain, highspy.ObjSense.kMaximize
        lp.col_lower_, lp.col_upper_ = np.zeros(size), np.array(self._limit)
        lp.row_lower_, lp.row_upper_ = np.array(rows.least), np.array(rows.most)
        set_rows(lp, matrix)
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[whole] for whole in self._whole]
        return lp

    def start(self, ranges: Ranges, flow: Flow) -> np.ndarray:
        """The columns' values for a known placement; flows are cut where the program's limits are."""
        x = np.zeros(len(self._limit))
        for v, (first, end) in enumerate(ranges):
            x[self.first[v]] = first
            if end > first:
                x[self.holds[v][end - first]] = 1.0
        for v, tok_s in flow.entering.items():
            x[self.entering[v]], x[self.begins[v]] = tok_s, 1.0
        for v, tok_s in flow.leaving.items():
            x[self.leaving[v]], x[self.finishes[v]] = tok_s, 1.0
        for link, tok_s in flow.edges.items():
            x[self.flow[link]], x[self.valid[link]] = tok_s, 1.0
        return x

    def ranges(self, x: np.ndarray) -> Ranges:
        """The placement of a solution."""
        found = []
        for v, first in enumerate(self.first):
            count = next((j for j, c in self.holds[v].items() if x[c] > 0.5), 0)
            begin = round(float(x[first]))
            found.append((begin, begin + count) if count else NOTHING)
        return tuple(found)


def solve_milp(
    instance: Instance,
    start: Ranges,
    flow: Flow,
    most_tok_s: float,
    node_limit: int,
    time_s: float | None = None,
    degree: int = DEGREE,
) -> MilpResult:
    """The best ranges that HiGHS finds and its bound, until so many branches or seconds are spent.

    Parameters
    ----------
    start, flow : a known placement and its flow
    most_tok_s : an upper bound on the flow of any placement

    Raises
    ------
    KeyboardInterrupt : interrupted; HiGHS has stopped
    """
    links = kept_links(instance, degree, set(flow.edges))
    program = _Program(instance, links, most_tok_s)
    solver = make_highs(mip_rel_gap=GAP, mip_max_nodes=node_limit)
    if time_s is not None:
        solver.setOptionValue("time_limit", max(time_s, 1e-3))
    solver.passModel(program.model())
    known = highspy.HighsSolution()
    known.col_value = program.start(start, flow).tolist()
    solver.setSolution(known)
    run(solver)
    info = solver.getInfo()
    solved = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    ranges = program.ranges(np.array(solver.getSolution().col_value)) if solved else None
    bound = min(most_tok_s, float(info.mip_dual_bound) if math.isfinite(info.mip_dual_bound) else math.inf)
    pruned = len(links) < instance.nodes * (instance.nodes - 1)
    return MilpResult(ranges, bound, pruned, int(info.mip_node_count))

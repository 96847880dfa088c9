"""What a budget buys at best, and what a load costs at least.

The trivial bound with a price row: every GPU works alone at its best, is divided at will between prefill
and decode, and is rented by the fraction. With x_n and y_n GPUs of node n at rates p_n and q_n
(requests/s, see bound.node_rates) and price c_n:

    F <= sum x_n p_n,   F <= sum y_n q_n,   x_n + y_n <= size_n,   sum c_n (x_n + y_n) = price.

The largest F within a price bounds the throughput; the least price with F at a load bounds the price.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from hexgen2.placement import Bound
from hexgen2.search.bound import node_rates, trivial_bound
from hexgen2.search.problem import Problem


def most_req_s(problem: Problem, budget_per_hour: float) -> float:
    """Requests/s that no rental within the budget (US dollars per hour) exceeds."""
    cost, roles, sizes, limits = _rows(problem)
    # Variables: all x, all y, F.
    rows = np.vstack([np.append(roles, [[1.0], [1.0]], axis=1), np.append(sizes, _zeros(sizes), axis=1)])
    rows = np.vstack([rows, np.append(cost, 0.0)])
    objective = np.append(np.zeros(len(cost)), -1.0)
    found = linprog(objective, A_ub=rows, b_ub=np.concatenate([[0.0, 0.0], limits, [budget_per_hour]]))
    return float(-found.fun)


def report(problem: Problem, budget_per_hour: float, req_s: float) -> Bound:
    """most_req_s as the placement states it."""
    limit = most_req_s(problem, budget_per_hour)
    assumptions = [*trivial_bound(problem)[1], "GPUs can be rented by the fraction"]
    return Bound(req_s=limit, gap=1 - req_s / limit if limit > 0 else 0.0, assumptions=assumptions)


def least_price(problem: Problem, req_s: float) -> float | None:
    """US dollars per hour below which no rental carries so many requests/s; None if all together do not."""
    cost, roles, sizes, limits = _rows(problem)
    found = linprog(cost, A_ub=np.vstack([roles, sizes]), b_ub=np.concatenate([[-req_s, -req_s], limits]))
    return float(found.fun) if found.success else None


def _rows(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cost of all x and y; rows of -rates by role; rows of GPUs by node, and their limits."""
    rates = np.array(node_rates(problem))
    nodes = len(rates)
    cost = np.tile(problem.node_price, 2)
    roles = np.zeros((2, 2 * nodes))
    roles[0, :nodes], roles[1, nodes:] = -rates[:, 0], -rates[:, 1]
    sizes = np.hstack([np.eye(nodes), np.eye(nodes)])
    return cost, roles, sizes, np.array([float(len(gpus)) for gpus in problem.node_gpus])


def _zeros(rows: np.ndarray) -> np.ndarray:
    return np.zeros((len(rows), 1))

"""What baselines with uniform replicas share: one tensor degree per replica, and copies that fill a pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from cost_model.hardware import Accelerator
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.params import Params
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.shapes import Shapes
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution, counts_of
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds
from hexgen2.strategies.baselines.paper import valued

MAX_NODES = 16
"""Most nodes that one replica's pipeline crosses."""

Replicas = list[NodeCounts]

Candidate = tuple[str, Solution]
"""A solution to value, and what the trace says of it."""


class UniformPlanner(Planner):
    """Plans with one tensor degree in all stages, TP x PP."""

    def __init__(self, problem: Problem) -> None:
        self._degree_of: dict[Accelerator, int] = {}
        super().__init__(problem, shapes=_UniformShapes(problem, self._degree_of))

    def fix_degree(self, accelerator: Accelerator, degree: int) -> None:
        """From now on, groups of this type have no other tensor degree; call it before any is planned."""
        self._degree_of[accelerator] = degree

    @classmethod
    def evaluator(cls, problem: Problem, params: Params) -> Evaluator:
        """An evaluator whose groups have such plans."""
        return Evaluator(problem, params, cls(problem))


class _UniformShapes(Shapes):
    def __init__(self, problem: Problem, degree_of: Mapping[Accelerator, int]) -> None:
        super().__init__(problem)
        self._degree_of = degree_of

    def alike(self, kinds: Sequence[int]) -> tuple:
        return (kinds[0],)

    def combinations(self, counts: Sequence[int], kinds: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        node = self.problem.node_kind.index(kinds[0])
        given = self._degree_of.get(self.problem.node_accelerator[node])
        for degree in (given,) if given else self.degrees:
            if all(count % degree == 0 for count in counts):
                yield [(node, degree) for node, count in enumerate(counts) for _ in range(count // degree)]


def nodes_by_type(problem: Problem) -> dict[Accelerator, list[int]]:
    """The nodes of each accelerator, the one of most FLOP/s first."""
    found: dict[Accelerator, list[int]] = {}
    for node, accelerator in enumerate(problem.node_accelerator):
        found.setdefault(accelerator, []).append(node)
    return dict(sorted(found.items(), key=lambda item: (-item[0].flops_s, item[0].name)))


def keep_best(state: SearchState, candidates: Iterator[Candidate]) -> None:
    """Value the candidates in turn, those whose replicas alone could beat the best so far."""
    for name, solution in candidates:
        if state.stopping.out_of_time():
            return
        best = state.incumbent.best.req_s if state.incumbent.best else 0.0
        if exceeds(state.evaluator.limits.of(solution, best), best):
            state.offer(valued(state.evaluator, solution), name)


def as_solution(prefill: Replicas, decode: Replicas) -> Solution:
    """Groups of both roles."""
    return Solution((*(Group("prefill", b) for b in prefill), *(Group("decode", b) for b in decode)))


def copies(problem: Problem, nodes: list[int]) -> Iterator[tuple[int, int, Replicas]]:
    """Every way to fill the nodes with like replicas: GPUs per node, nodes per replica, the replicas."""
    largest = max(len(problem.node_gpus[node]) for node in nodes)
    for gpus, across in itertools.product(range(1, largest + 1), range(1, min(len(nodes), MAX_NODES) + 1)):
        yield gpus, across, fill(problem, free_gpus(problem, nodes), gpus, across, spread=False)


def free_gpus(problem: Problem, nodes: list[int]) -> dict[int, int]:
    """All GPUs of the nodes, counted by node: what `fill` takes from."""
    return {node: len(problem.node_gpus[node]) for node in nodes}


def fill(
    problem: Problem, free: dict[int, int], gpus: int, nodes: int, spread: bool, most: int | None = None
) -> Replicas:
    """As many like replicas as `free` holds, at most `most`, taken out of it: each from the emptiest node
    that has room (or the fullest, to spread them) and the nodes with the fastest links to it."""
    found: Replicas = []
    while most is None or len(found) < most:
        room = [node for node in free if free[node] >= gpus]
        if len(room) < nodes:
            break
        first = min(room, key=lambda node: (-free[node] if spread else free[node], node))
        links = problem.node_links[first]
        others = sorted((n for n in room if n != first), key=lambda n: -links[n].bandwidth_bytes_s)
        taken = [first, *others[: nodes - 1]]
        for node in taken:
            free[node] -= gpus
        found.append(counts_of(dict.fromkeys(taken, gpus)))
    return found

"""The shapes that a group can take: which tensor-parallel stages, in which order (HexGen-2, Appendix A).

Tensor-parallel groups stay inside a node; a pipeline crosses nodes along fast links.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from hexgen2.search.problem import NodeCounts, Problem
from hexgen2.search.ties import least

MAX_SHAPES = 64
"""The most combinations of tensor degrees tried per group; beyond it, one degree per node."""


class StageShape(NamedTuple):
    """`degree` GPUs of `node`; attention_dp and expert_parallel are those of TensorGroup."""

    node: int
    degree: int
    attention_dp: int = 1
    expert_parallel: int = 1


@lru_cache(maxsize=4096)
def partitions(count: int, degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All multisets of `degrees` that sum to `count`, largest degree first."""
    if count == 0:
        return ((),)
    found = []
    for degree in sorted((d for d in degrees if d <= count), reverse=True):
        smaller = tuple(d for d in degrees if d <= degree)
        found += [(degree, *rest) for rest in partitions(count - degree, smaller)]
    return tuple(found)


def _even(choices: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The partitions into equal degrees, except for the last."""
    return tuple(p for p in choices if len(set(p[:-1])) <= 1)


def vllm_runs(role: str, shape: Sequence[StageShape]) -> bool:
    """Whether vLLM can run a replica of these stages: they need the same degrees and equal shares of every
    node, and attention groups a single node. Where KV caches come or go its NixlConnector allows only one
    stage."""
    stages = Counter(stage.node for stage in shape)
    uniform = len({stage[1:] for stage in shape}) == 1 and len(set(stages.values())) == 1
    on_one_node = len(stages) == 1 or shape[0].attention_dp == 1
    return uniform and on_one_node and (role == "colocated" or len(shape) == 1)


def with_experts_divided(problem: Problem, shape: Sequence[tuple[int, int]]) -> Iterator[list[StageShape]]:
    """The shape as it is. Of a mixture of experts, under a cost model that times it, also with whole experts
    on each GPU of a stage, and then with attention by requests besides (the same number of groups in every
    stage, or a request could not stay in one)."""
    plain = [StageShape(*stage) for stage in shape]
    yield plain
    experts, widest = problem.model.experts, max(stage.degree for stage in plain)
    divides = all(experts % stage.degree == 0 for stage in plain)
    if experts == 1 or widest == 1 or not divides or not problem.costs.times_expert_parallel:
        return
    yield [stage._replace(expert_parallel=stage.degree) for stage in plain]
    if len({stage.degree for stage in plain}) == 1:
        yield [stage._replace(attention_dp=widest, expert_parallel=widest) for stage in plain]


class Shapes:
    """Lists the shapes of groups of one problem that its engine can run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        largest = max(len(gpus) for gpus in problem.node_gpus)
        self.degrees = tuple(problem.model.tensor_degrees(largest))
        self._paths: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._forms: dict[tuple, list[list[StageShape]]] = {}

    def of(self, role: str, counts: NodeCounts) -> Iterator[list[StageShape]]:
        """The shapes of a group in a role."""
        nodes, forms = self.forms(role, counts)
        return ([StageShape(nodes[at], *degrees) for at, *degrees in form] for form in forms)

    def forms(self, role: str, counts: NodeCounts) -> tuple[list[int], list[list[StageShape]]]:
        """The nodes of a group in the order of its pipelines, and its shapes with the numbers of nodes in
        that order in their place: one list for all groups that are alike but for their nodes."""
        counts = self.along_fast_links(counts)
        kinds = [self.problem.node_kind[node] for node, _ in counts]
        vllm = self.problem.engine == "vllm"
        key = role if vllm else "", tuple(count for _, count in counts), self.alike(kinds)
        if key not in self._forms:
            plain = self.combinations([count for _, count in counts], kinds)
            found = itertools.chain.from_iterable(with_experts_divided(self.problem, each) for each in plain)
            self._forms[key] = [form for form in found if not vllm or vllm_runs(role, form)]
        return [node for node, _ in counts], self._forms[key]

    def alike(self, kinds: Sequence[int]) -> tuple:
        """What the shapes of a group depend on but for its counts: which of its nodes are alike."""
        return tuple(kind == before for before, kind in pairwise(kinds))

    def combinations(self, counts: Sequence[int], kinds: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        """Stages (number of a node, degree) for nodes of these kinds with so many GPUs: all combinations of
        the partitions of each node's GPUs, or of the even partitions where that would be too many."""
        choices = [partitions(count, self.degrees) for count in counts]
        if math.prod(len(c) for c in choices) > MAX_SHAPES:
            choices = [_even(c) for c in choices]
        if math.prod(len(c) for c in choices) > MAX_SHAPES:
            choices = [c if len(c) == 1 else (c[0], c[-1]) for c in choices]
        # Of two nodes that are alike, only one order is tried.
        places = range(1, len(counts))
        twins = [k for k in places if kinds[k] == kinds[k - 1] and choices[k] == choices[k - 1]]
        for combination in itertools.islice(itertools.product(*choices), 4 * MAX_SHAPES):
            if any(combination[k] > combination[k - 1] for k in twins):
                continue
            yield [(node, degree) for node, parts in enumerate(combination) for degree in parts]

    def along_fast_links(self, counts: NodeCounts) -> NodeCounts:
        """The nodes in the order with the fastest links between neighbours: exact up to 5 nodes, else
        greedy."""
        links = self.problem.node_links

        def hop(a: int, b: int) -> float:
            """Seconds per byte."""
            return 1 / links[a][b].bandwidth_bytes_s

        nodes = tuple(node for node, _ in counts)
        if len(nodes) <= 2:
            return counts
        if nodes not in self._paths:
            if len(nodes) <= 5:
                walks = itertools.permutations(nodes)
                path = least(walks, lambda walk: math.fsum(itertools.starmap(hop, pairwise(walk))))[0]
            else:
                path, rest = (nodes[0],), set(nodes[1:])
                while rest:
                    nearest = least(sorted(rest), partial(hop, path[-1]))[0]
                    path, rest = (*path, nearest), rest - {nearest}
            self._paths[nodes] = path
        count_of = dict(counts)
        return tuple((node, count_of[node]) for node in self._paths[nodes])

"""Classes of interchangeable nodes, and patterns of GPUs over them.

Many nodes of a large cluster are alike: equal devices, equal links to everybody. A pattern says how many GPUs
of which classes of nodes a group takes, without naming the nodes, so that a thousand GPUs have no more
patterns than a dozen. Beyond the paper, which names GPUs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cost_model.hardware import Link
from hexgen2.search.problem import NodeCounts, Problem, counts_of

PATTERNS_PLANNED = 3600
"""The most patterns for which plans are made, each counted once per node in it."""

PATTERNS_LISTED = 4000
"""More patterns than these are not listed for linear programs: kinds of nodes stand for their classes."""

SINGLE_NODES = 12
"""In clusters of up to this many nodes, each node is a class of its own."""

Pattern = tuple[tuple[int, int], ...]
"""(class, GPUs of one node of that class) for each node of a group, in rising order."""


@dataclass(frozen=True)
class NodeClasses:
    """The nodes of each class, in rising order, with the number of GPUs in each node."""

    problem: Problem
    nodes: tuple[tuple[int, ...], ...]

    @cached_property
    def node_size(self) -> tuple[int, ...]:
        """GPUs in a node of each class."""
        return tuple(len(self.problem.node_gpus[nodes[0]]) for nodes in self.nodes)

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """GPUs in all nodes of each class."""
        return tuple(size * len(nodes) for size, nodes in zip(self.node_size, self.nodes, strict=True))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """The class of each node."""
        found = {node: which for which, nodes in enumerate(self.nodes) for node in nodes}
        return tuple(found[node] for node in range(len(found)))

    def count_patterns(self, nodes: int) -> int:
        """The number of patterns of exactly this many nodes."""
        ways = [1] + [0] * nodes
        for size, members in zip(self.node_size, self.nodes, strict=True):
            here = [
                math.comb(size + m - 1, m) if m and m <= len(members) else int(m == 0)
                for m in range(nodes + 1)
            ]
            ways = [sum(ways[m - j] * here[j] for j in range(m + 1)) for m in range(nodes + 1)]
        return ways[nodes]

    def patterns(self, nodes: int) -> Iterator[Pattern]:
        """All patterns of exactly this many nodes."""
        yield from self._patterns(nodes, 0)

    def _patterns(self, nodes: int, first: int) -> Iterator[Pattern]:
        """Patterns of so many nodes of the classes from `first` on."""
        if nodes == 0:
            yield ()
            return
        for which in range(first, len(self.nodes)):
            sizes = range(1, self.node_size[which] + 1)
            for many in range(1, min(nodes, len(self.nodes[which])) + 1):
                rest = list(self._patterns(nodes - many, which + 1))
                for counts in itertools.combinations_with_replacement(sizes, many) if rest else ():
                    head = tuple((which, count) for count in counts)
                    for tail in rest:
                        yield head + tail

    def counts(self, pattern: Pattern) -> NodeCounts:
        """Nodes for a group of this pattern, with fast links among them: one node at a time, each the nearest
        to those already taken."""
        taken: list[int] = []
        for which, _ in pattern:
            free = [node for node in self.nodes[which] if node not in taken]
            taken.append(max(free, key=lambda node: (self._slowest(node, taken), -node)))
        if len(pattern) == 2 and not self._alone(pattern):
            taken = list(self._fastest_pair(pattern[0][0], pattern[1][0]))
        return counts_of({node: count for node, (_, count) in zip(taken, pattern, strict=True)})

    def _alone(self, pattern: Pattern) -> bool:
        """Whether every class in the pattern has only one node, so that there is nothing to choose."""
        return all(len(self.nodes[which]) == 1 for which, _ in pattern)

    def _slowest(self, node: int, others: Sequence[int]) -> float:
        """Bytes/s of the slowest link from a node to others; infinity if there are none."""
        links = self.problem.node_links[node]
        return min((links[other].bandwidth_bytes_s for other in others), default=math.inf)

    def _fastest_pair(self, a: int, b: int) -> tuple[int, int]:
        """A node of each class, joined by the fastest link."""
        if (a, b) not in self._fastest:
            pairs = ((m, n) for m in self.nodes[a] for n in self.nodes[b] if m != n)
            links = self.problem.node_links
            self._fastest[a, b] = max(
                pairs, key=lambda p: (links[p[0]][p[1]].bandwidth_bytes_s, -p[0], -p[1])
            )
        return self._fastest[a, b]

    @cached_property
    def _fastest(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The pairs of `_fastest_pair` found so far."""
        return {}


def node_classes(problem: Problem) -> NodeClasses:
    """The node classes of a problem: where there are few nodes each alone, else those that are alike
    together."""
    count = len(problem.node_gpus)
    return _each_node(problem) if count <= SINGLE_NODES else _like_nodes(problem)


def kinds_of_nodes(problem: Problem) -> NodeClasses:
    """Classes of nodes of one kind, size and price, whatever their links."""
    kinds: dict[tuple, list[int]] = {}
    for node, gpus in enumerate(problem.node_gpus):
        kinds.setdefault((problem.node_kind[node], len(gpus), problem.node_price[node]), []).append(node)
    return NodeClasses(problem, tuple(map(tuple, kinds.values())))


def few_classes(problem: Problem, classes: NodeClasses) -> NodeClasses:
    """These classes, or kinds of nodes where that gives too many patterns: where links are all different, or
    racks of different nodes have uplinks, nearly every node is a class of its own."""
    spans = range(1, widest_span(problem) + 1)
    if sum(map(classes.count_patterns, spans)) <= PATTERNS_LISTED:
        return classes
    return kinds_of_nodes(problem)


def widest_span(problem: Problem) -> int:
    """The number of nodes that a replica may span: few enough to plan every kind of replica, so that the
    bound and the search consider the same ones; more only where the model would not fit otherwise."""
    alike = kinds_of_nodes(problem)
    planned, span, fitting = 0, 0, _nodes_to_fit(problem)
    while span < len(problem.node_gpus):
        planned += (span + 1) * alike.count_patterns(span + 1)
        if planned > PATTERNS_PLANNED and span >= fitting:
            break
        span += 1
    return span


def _nodes_to_fit(problem: Problem) -> int:
    """The fewest nodes whose memory holds the weights twice, which leaves room for KV caches."""
    memory = sorted(
        (float(problem.cluster.memory_bytes[list(gpus)].sum()) for gpus in problem.node_gpus), reverse=True
    )
    needed = 2 * problem.model.total_bytes
    held = itertools.accumulate(memory)
    return next((n for n, total in enumerate(held, 1) if total >= needed), len(memory))


def _each_node(problem: Problem) -> NodeClasses:
    """Every node a class of its own."""
    return NodeClasses(problem, tuple((node,) for node in range(len(problem.node_gpus))))


def _like_nodes(problem: Problem) -> NodeClasses:
    """Classes of nodes of one kind, size, price and uplinks, with equal links to equal nodes.

    A class is split as long as two of its nodes see different links or classes around them (colour
    refinement; Weisfeiler and Leman, 1968)."""
    count = len(problem.node_gpus)
    uplinks = problem.cluster.uplinks
    link_kinds: dict[Link, int] = {}
    links = [[link_kinds.setdefault(link, len(link_kinds)) for link in row] for row in problem.node_links]
    colour = _renamed(
        [
            (
                problem.node_kind[n],
                len(problem.node_gpus[n]),
                problem.node_price[n],
                *(n in uplink.nodes for uplink in uplinks),
            )
            for n in range(count)
        ]
    )
    while True:
        finer = _renamed([(colour[n], *_around(n, links[n], colour)) for n in range(count)])
        if max(finer) == max(colour):
            break
        colour = finer
    return NodeClasses(
        problem, tuple(tuple(n for n in range(count) if colour[n] == c) for c in range(max(colour) + 1))
    )


def _around(node: int, links: Sequence[int], colour: Sequence[int]) -> list[tuple]:
    """How many other nodes of each colour are behind each kind of link."""
    seen = Counter((links[other], colour[other]) for other in range(len(colour)) if other != node)
    return sorted(seen.items())


def _renamed(keys: Sequence[tuple]) -> list[int]:
    """Small integers for equal keys, in the order of their first appearance."""
    names: dict[tuple, int] = {}
    return [names.setdefault(key, len(names)) for key in keys]

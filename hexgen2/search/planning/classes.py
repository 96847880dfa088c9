"""Classes of interchangeable nodes, and patterns of GPUs over them.

Many nodes of a large cluster are alike: equal devices, equal links to everybody. A pattern says how many GPUs
of which classes of nodes a group takes, without naming the nodes, so that a thousand GPUs have no more
patterns than a dozen. Beyond the paper, which names GPUs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hexgen2.search.problem import NodeCounts, Problem, counts_of

PATTERNS_PLANNED = 3600
"""The most patterns for which plans are made, each counted once per node in it."""

LARGE = 48
"""Clusters of more GPUs are searched part by part, and partitioned by parts of nodes: faster, and from 64
GPUs on also better."""

PATTERNS_LISTED, LARGE_LISTED = 4000, 600
"""More patterns than these (the second of large clusters) are not listed for linear programs: kinds of nodes
stand for their classes."""

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
        """GPUs in the largest node of each class."""
        sizes = [len(gpus) for gpus in self.problem.node_gpus]
        return tuple(max(sizes[node] for node in nodes) for nodes in self.nodes)

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """GPUs in all nodes of each class."""
        sizes = [len(gpus) for gpus in self.problem.node_gpus]
        return tuple(sum(sizes[node] for node in nodes) for nodes in self.nodes)

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        """The class of each node."""
        found = {node: which for which, nodes in enumerate(self.nodes) for node in nodes}
        return tuple(found[node] for node in range(len(found)))

    def within(self, nodes: Collection[int]) -> tuple[NodeClasses, dict[int, int]]:
        """The classes of these nodes alone, and where each class that has some of them is among these."""
        here = [tuple(node for node in members if node in nodes) for members in self.nodes]
        kept = [which for which, members in enumerate(here) if members]
        problem = self.problem.only({node: len(self.problem.node_gpus[node]) for node in nodes})
        return NodeClasses(problem, tuple(here[which] for which in kept)), {w: k for k, w in enumerate(kept)}

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
        return filter(self.has_room, self._patterns(nodes, 0))

    def has_room(self, pattern: Pattern) -> bool:
        """Whether a class has enough nodes with so many GPUs, each for one part of the pattern."""
        return all(
            len(self._with_room(which, count)) >= sum(w == which and c >= count for w, c in pattern)
            for which, count in pattern
        )

    def _patterns(self, nodes: int, first: int) -> Iterator[Pattern]:
        """Patterns of so many nodes of the classes from `first` on; of nodes of several sizes perhaps more
        than there is room for."""
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

    def most_groups(self, pattern: Pattern) -> int:
        """No more groups of this pattern than this fit, if there are no others."""
        sizes, most = [len(gpus) for gpus in self.problem.node_gpus], list[int]()
        for (which, count), parts in Counter(pattern).items():
            most.append(sum(sizes[node] // count for node in self.nodes[which]) // parts)
        totals: Counter[int] = Counter()
        for which, count in pattern:
            totals[which] += count
        return min(*most, *(self.gpus[which] // count for which, count in totals.items()))

    def counts(self, pattern: Pattern) -> NodeCounts:
        """Nodes for a group of this pattern, with fast links among them: one node at a time, each the nearest
        to those already taken."""
        if len(pattern) == 2 and not self._alone(pattern):
            taken = self._fastest_pair(*pattern)
            return counts_of({node: count for node, (_, count) in zip(taken, pattern, strict=True)})
        ordered = tuple(sorted(pattern, key=lambda part: -part[1]))
        return counts_of({node: count for node, (_, count) in zip(self._near(ordered), ordered, strict=True)})

    def _near(self, pattern: Pattern) -> tuple[int, ...]:
        """Nodes for each part of a pattern in turn, remembered: others begin with the same parts."""
        if not pattern:
            return ()
        if pattern not in self._nearest:
            taken = self._near(pattern[:-1])
            free = [node for node in self._with_room(*pattern[-1]) if node not in taken]
            nearest = max(free, key=lambda node: (self._slowest(node, taken), -node))
            self._nearest[pattern] = (*taken, nearest)
        return self._nearest[pattern]

    @cached_property
    def _nearest(self) -> dict[Pattern, tuple[int, ...]]:
        """What `_near` found so far."""
        return {}

    def _with_room(self, which: int, count: int) -> list[int]:
        """The nodes of a class that have so many GPUs, remembered."""
        key = which, count
        if key not in self._roomy:
            sizes = self.problem.node_gpus
            self._roomy[key] = [node for node in self.nodes[which] if len(sizes[node]) >= count]
        return self._roomy[key]

    @cached_property
    def _roomy(self) -> dict[tuple[int, int], list[int]]:
        """The lists of `_with_room` made so far."""
        return {}

    def _alone(self, pattern: Pattern) -> bool:
        """Whether every class in the pattern has only one node, so that there is nothing to choose."""
        return all(len(self.nodes[which]) == 1 for which, _ in pattern)

    def _slowest(self, node: int, others: Sequence[int]) -> float:
        """Bytes/s of the slowest link from a node to others; infinity if there are none."""
        links = self.problem.node_links[node]
        return min((links[other].bandwidth_bytes_s for other in others), default=math.inf)

    def _fastest_pair(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        """Two nodes of these classes with so many GPUs, joined by the fastest link."""
        key = (one, other)
        if key not in self._fastest:
            first, second = self._with_room(*one), self._with_room(*other)
            like = tuple(first), tuple(second)
            if like not in self._fastest_of:
                links = self.problem.node_links
                self._fastest_of[like] = max(
                    ((m, n) for m in first for n in second if m != n),
                    key=lambda p: (links[p[0]][p[1]].bandwidth_bytes_s, -p[0], -p[1]),
                )
            self._fastest[key] = self._fastest_of[like]
        return self._fastest[key]

    @cached_property
    def _fastest_of(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
        """The fastest pairs of nodes of two lists."""
        return {}

    @cached_property
    def _fastest(self) -> dict[tuple[tuple[int, int], tuple[int, int]], tuple[int, int]]:
        """The pairs of `_fastest_pair` found so far."""
        return {}


def node_classes(problem: Problem) -> NodeClasses:
    """The node classes of a problem: where there are few nodes each alone, else those that are alike
    together."""
    count = len(problem.node_gpus)
    return _each_node(problem) if count <= SINGLE_NODES else _like_nodes(problem)


def kinds_of_nodes(problem: Problem, of_any_size: bool = False) -> NodeClasses:
    """Classes of nodes of one kind, price and, unless they may be of any, size, whatever their links."""
    kinds: dict[tuple, list[int]] = {}
    for node, gpus in enumerate(problem.node_gpus):
        size = 0 if of_any_size else len(gpus)
        kinds.setdefault((problem.node_kind[node], size, problem.node_price[node]), []).append(node)
    return NodeClasses(problem, tuple(map(tuple, kinds.values())))


def few_classes(problem: Problem, classes: NodeClasses) -> NodeClasses:
    """These classes, or kinds of nodes where that gives too many patterns: where links are all different, or
    racks of different nodes have uplinks, nearly every node is a class of its own."""
    spans = range(1, widest_span(problem) + 1)
    large = len(problem.usable) > LARGE
    if sum(map(classes.count_patterns, spans)) <= (LARGE_LISTED if large else PATTERNS_LISTED):
        return classes
    return kinds_of_nodes(problem, of_any_size=large)


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
    links = problem.link_kinds[0].tolist()
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

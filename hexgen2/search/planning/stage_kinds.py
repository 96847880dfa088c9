"""Kinds of pipeline stages: what one can know of a stage without its layers and without its step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from cost_model.base import Phase, StageMemory, TensorGroup
from hexgen2.search.planning.shapes import StageShape
from hexgen2.search.problem import Problem

NONE = -1
"""Where a pipeline has fewer stages than the longest."""
Degrees = tuple[int, int, int]
"""The degrees of a StageShape."""


@dataclass(frozen=True, eq=False)
class StageKind:
    """A tensor group and everything about it that does not depend on the batch; its memory by phase, and
    whether the stage is the first and the last of its pipeline."""

    group: TensorGroup
    memory: dict[tuple[Phase, bool, bool], StageMemory]
    layer_s: dict[tuple[Phase, float], float] = field(default_factory=dict)
    edge_s: dict[tuple[Phase, float, bool], float] = field(default_factory=dict)
    turns_req_s: dict[tuple[float, float], float] = field(default_factory=dict)
    mixed_layer_s: dict[tuple[float, float], float] = field(default_factory=dict)
    mixed_edge_s: dict[tuple[float, bool], float] = field(default_factory=dict)


class StageKinds:
    """All kinds of stages of a problem, numbered as they are met.

    Attributes
    ----------
    every : the kinds met so far
    degrees : the degrees of stages met so far, numbered likewise
    links : [N, N] numbers of the kinds of links between nodes
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.every: list[StageKind] = []
        self.degrees: list[Degrees] = []
        self.links = problem.link_kinds[0]
        self._number: dict[tuple[int, Degrees], int] = {}
        self._degrees_at: dict[Degrees, int] = {}
        self._node_kind = np.array(problem.node_kind)
        self._memory: dict[Phase, list] = {}
        self._arrays: dict[int, tuple[Sequence, np.ndarray, np.ndarray]] = {}

    def of(self, stage: StageShape) -> StageKind:
        """The kind of a stage."""
        return self.every[self._of(self.problem.node_kind[stage.node], stage[1:])]

    def _of(self, node_kind: int, degrees: Degrees) -> int:
        """The number of the kind of stages with these degrees on such nodes."""
        key = node_kind, degrees
        if key not in self._number:
            problem, (degree, *others) = self.problem, degrees
            node = problem.node_kind.index(node_kind)
            link = problem.node_links[node][node]
            group = TensorGroup(problem.node_accelerator[node], degree, link, *others)
            ends = itertools.product(get_args(Phase), (True, False), (True, False))
            memory = {end: problem.costs.stage_memory(end[0], group, *end[1:]) for end in ends}
            self._number[key] = len(self.every)
            self.every.append(StageKind(group, memory))
        return self._number[key]

    def numbers(self, node: np.ndarray, degrees: np.ndarray) -> np.ndarray:
        """The numbers of the kinds of stages on these nodes with these degrees (by number), as an array of
        their shape; NONE where there is none."""
        there = node != NONE
        key = np.where(there, self._node_kind[node] * len(self.degrees) + degrees, NONE)
        different, which = np.unique(key, return_inverse=True)
        pairs = (divmod(each, len(self.degrees)) if each != NONE else None for each in different.tolist())
        found = [NONE if pair is None else self._of(pair[0], self.degrees[pair[1]]) for pair in pairs]
        return np.array(found, dtype=int)[which].reshape(node.shape)

    def form_arrays(self, forms: Sequence[Sequence[StageShape]]) -> tuple[np.ndarray, np.ndarray]:
        """[f, s] the nodes and (by number) the degrees of the stages of these forms."""
        if id(forms) not in self._arrays:
            size = len(forms), max(map(len, forms))
            at, degrees = np.full(size, NONE), np.full(size, NONE)
            for row, form in enumerate(forms):
                at[row, : len(form)] = [stage.node for stage in form]
                degrees[row, : len(form)] = [self._number_of(stage[1:]) for stage in form]
            self._arrays[id(forms)] = forms, at, degrees
        return self._arrays[id(forms)][1:]

    def _number_of(self, degrees: Degrees) -> int:
        if degrees not in self._degrees_at:
            self._degrees_at[degrees] = len(self.degrees)
            self.degrees.append(degrees)
        return self._degrees_at[degrees]

    def memory(self, phase: Phase) -> np.ndarray:
        """[kinds, 2, 2, 5] the numbers of StageMemory, by kind and whether a stage is not the first, and not
        the last."""
        ends = [(phase, first, last) for first in (True, False) for last in (True, False)]
        rows = self._memory.setdefault(phase, [])
        rows += [[_numbers(kind.memory[end]) for end in ends] for kind in self.every[len(rows) :]]
        return np.array(rows).reshape(len(rows), 2, 2, 5)


def shape_of(
    node: np.ndarray, degrees: np.ndarray, stages: int, known: Sequence[Degrees]
) -> list[StageShape]:
    """The shape of a pipeline of so many stages, from [s] nodes and numbers of degrees that are known."""
    some = itertools.islice(zip(node.tolist(), degrees.tolist(), strict=True), stages)
    return [StageShape(at, *known[each]) for at, each in some]


def _numbers(memory: StageMemory) -> Iterable[float]:
    return (memory.limit, memory.fixed, memory.per_layer, memory.per_layer_request, memory.per_request)

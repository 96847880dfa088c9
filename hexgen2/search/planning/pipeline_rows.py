"""Pipelines of many groups at once, a row of arrays for each, and the times of their steps: a fraction of the
time that one after the other takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cost_model.base import CostModel, Phase
from hexgen2.search.planning.shapes import StageShape
from hexgen2.search.planning.stage_kinds import NONE, StageKinds, shape_of
from hexgen2.search.planning.timing import NO_STAGE_S, Timings

Forms = tuple[Sequence[int], Sequence[Sequence[StageShape]]]
"""Nodes, and shapes of a group with the numbers of these nodes in their place (see Shapes.forms)."""


@dataclass(frozen=True, eq=False)
class PipelineRows:
    """n pipelines of up to s stages, whose layers are not divided yet; NONE where there is no stage.

    Attributes
    ----------
    kinds : of stages and links, which numbers stand for
    group : [n] the number of the group that forms it, rising
    node, degrees, kind : [n, s] of each stage
    hop : [n, s] the kind of link from each stage to the next
    stages : [n] how many
    """

    kinds: StageKinds
    group: np.ndarray
    node: np.ndarray
    degrees: np.ndarray
    kind: np.ndarray
    hop: np.ndarray
    stages: np.ndarray

    @classmethod
    def of(cls, kinds: StageKinds, groups: Sequence[Forms]) -> PipelineRows:
        """All shapes of these groups."""
        alike: dict[int, list[int]] = {}
        for number, (_, forms) in enumerate(groups):
            if forms:
                alike.setdefault(id(forms), []).append(number)
        most = max((len(form) for numbers in alike.values() for form in groups[numbers[0]][1]), default=1)
        group, node, degrees = ([np.zeros((0, size), dtype=int)] for size in (1, most, most))
        for numbers in alike.values():
            at, each = kinds.form_arrays(groups[numbers[0]][1])
            here = np.where(at == NONE, NONE, np.array([groups[number][0] for number in numbers])[:, at])
            group.append(np.repeat(numbers, len(at))[:, None])
            node.append(_widened(here.reshape(-1, at.shape[1]), most))
            degrees.append(_widened(np.tile(each, (len(numbers), 1)), most))
        of_group = np.concatenate(group)[:, 0]
        order = np.argsort(of_group, kind="stable")
        return cls._made(kinds, of_group[order], np.concatenate(node)[order], np.concatenate(degrees)[order])

    @classmethod
    def _made(
        cls, kinds: StageKinds, group: np.ndarray, node: np.ndarray, degrees: np.ndarray
    ) -> PipelineRows:
        hop = np.full_like(node, NONE)
        hop[:, :-1] = np.where(node[:, 1:] != NONE, kinds.links[node[:, :-1], node[:, 1:]], NONE)
        stages = (node != NONE).sum(axis=1)
        return cls(kinds, group, node, degrees, kinds.numbers(node, degrees), hop, stages)

    def __len__(self) -> int:
        return len(self.stages)

    def only(self, which: np.ndarray) -> PipelineRows:
        """Those for which [n] this is true."""
        arrays = (self.group, self.node, self.degrees, self.kind, self.hop, self.stages)
        return PipelineRows(self.kinds, *(each[which] for each in arrays))

    def shape(self, row: int) -> list[StageShape]:
        """The shape of a pipeline."""
        return shape_of(self.node[row], self.degrees[row], int(self.stages[row]), self.kinds.degrees)

    def places(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The kinds of stages, each with the rows and columns where it is."""
        flat = self.kind.ravel()
        order = np.argsort(flat, kind="stable")
        different, first = np.unique(flat[order], return_index=True)
        for number, at in zip(different.tolist(), np.split(order, first[1:]), strict=True):
            if number != NONE:
                yield number, *np.divmod(at, self.kind.shape[1])

    @cached_property
    def last(self) -> np.ndarray:
        """[n, s] whether a stage is the last of its pipeline."""
        return np.asarray(np.arange(self.kind.shape[1])[None, :] == self.stages[:, None] - 1)

    def fit(self, phase: Phase, batch: np.ndarray, layers: int) -> np.ndarray:
        """[n] whether the model's layers fit beside [n] requests, with at least one in each stage."""
        most, there = self.max_layers(phase, batch), self.kind != NONE
        each = np.where(there, most, np.inf).min(axis=1) >= 1
        return np.asarray(each & ((most * there).sum(axis=1) >= layers))

    def max_layers(self, phase: Phase, batch: np.ndarray) -> np.ndarray:
        """[n, s] the most layers that fit in each stage together with [n] requests."""
        limit, fixed, per_layer, per_layer_request, per_request = self._memory(phase)
        requests = batch[:, None]
        room = limit - fixed - requests * per_request
        return np.asarray(np.maximum(0.0, room // (per_layer + requests * per_layer_request)))

    def _memory(self, phase: Phase) -> np.ndarray:
        """[5, n, s] the numbers of StageMemory."""
        if phase not in self._memories:
            inside = np.ones_like(self.kind)
            inside[:, 0] = 0
            found = self.kinds.memory(phase)[self.kind, inside, (~self.last).astype(int)]
            self._memories[phase] = np.ascontiguousarray(np.moveaxis(found, -1, 0))
        return self._memories[phase]

    @cached_property
    def _memories(self) -> dict[Phase, np.ndarray]:
        """Those of `_memory` made so far."""
        return {}

    def largest_batch(self, phase: Phase, most: int, layers: int) -> np.ndarray:
        """[n] the most requests, up to `most`, for which the layers still fit; 0 if not even one does."""
        low, high = np.zeros(len(self), dtype=int), np.full(len(self), most)
        low[self.fit(phase, high, layers)] = most
        while (high - low).max(initial=0) > 1:
            middle = (low + high) // 2
            fits = self.fit(phase, middle, layers)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low


class Steps(NamedTuple):
    """Steps of n pipelines: first one of each, then another of each, and so on, [c n] in all. Most are alike.

    prompts, decodes : [u] of each kind of step
    kind : [c n] of each step
    """

    prompts: np.ndarray
    decodes: np.ndarray
    kind: np.ndarray

    @classmethod
    def of(cls, prompts: np.ndarray, decodes: np.ndarray) -> Steps:
        """Steps with [c n] prompts and decodes."""
        # As complex numbers, pairs are sorted much faster than as columns.
        unlike, kind = np.unique(prompts + 1j * decodes, return_inverse=True)
        return cls(unlike.real.copy(), unlike.imag.copy(), kind)


class StepTimes:
    """Times steps of several pipelines at once."""

    def __init__(self, costs: CostModel, rows: PipelineRows) -> None:
        self._costs, self._rows = costs, rows
        self._groups, stage = _numbered(rows.kind)
        self._stage = 2 * stage + rows.last
        self._links, self._hop = _numbered(rows.hop)

    def of(self, steps: Steps) -> Timings:
        """[c n] the times of these steps."""
        costs, rows = self._costs, self._rows
        work = costs.mixed_work(steps.prompts, steps.decodes)  # type: ignore[arg-type]
        layers = np.full((len(self._groups) + 1, 2, len(steps.prompts)), NO_STAGE_S)
        edges = np.zeros_like(layers)
        for k, number in enumerate(self._groups):
            group = rows.kinds.every[number].group
            layers[k] = costs.layers_work_s(group, work)
            for last in (False, True):
                edges[k, int(last)] = costs.edges_work_s(group, work.sampled, last)  # type: ignore[arg-type]
        hops = np.zeros((len(self._links) + 1, len(steps.prompts)))
        for k, number in enumerate(self._links):
            hop = rows.kinds.problem.link_kinds[1][number]
            hops[k] = costs.hop_work_s(hop, work.tokens)
        turns = len(steps.kind) // len(rows)
        layer_s, edge_s = _chosen(self._stage, steps, layers, edges)
        (hop_s,) = _chosen(self._hop, steps, hops)
        return Timings(np.tile(rows.stages, turns), layer_s, edge_s, hop_s)


def _numbered(kinds: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The different kinds in [n, s], and where in that list each is; where there is NONE, its length."""
    found = np.unique(kinds, return_index=True)[0]  # Without indices, numpy imports numpy.ma: 20 ms.
    found = found[found != NONE]
    return found.tolist(), np.where(kinds == NONE, len(found), np.searchsorted(found, kinds))


def _chosen(which: np.ndarray, steps: Steps, *tables: np.ndarray) -> list[np.ndarray]:
    """[c n, s] of each table, whose elements are of each kind of stage or link ([n, s] which) and of each
    kind of step."""
    n, s = which.shape
    at = which[None] * len(steps.prompts) + steps.kind.reshape(-1, n)[:, :, None]
    return [table.ravel().take(at).reshape(-1, s) for table in tables]


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """[n, width] of [n, s], with NONE beyond."""
    found = np.full((len(array), width), NONE)
    found[:, : array.shape[1]] = array
    return found

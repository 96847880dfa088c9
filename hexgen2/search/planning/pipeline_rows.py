"""Pipelines of many groups at once, a row of arrays for each, and the times of their steps: a fraction of the
time that one after the other takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_model.base import CostModel, Phase, Work
from hexgen2.search.planning.shapes import StageShape
from hexgen2.search.planning.stage_kinds import NONE, StageKinds
from hexgen2.search.planning.timing import Timings

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
        stages = zip(self.node[row].tolist(), self.degrees[row].tolist(), strict=True)
        some = itertools.islice(stages, int(self.stages[row]))
        return [StageShape(node, *self.kinds.degrees[each]) for node, each in some]

    def places(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The kinds of stages, each with the rows and columns where it is."""
        return _places(self.kind)

    def hops(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """The kinds of links between stages, each with the rows and columns of the stages before them."""
        return _places(self.hop)

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


class StepTimes:
    """Times steps of several pipelines at once."""

    def __init__(self, costs: CostModel, rows: PipelineRows) -> None:
        self._costs, self._rows = costs, rows
        self._places, self._hops = list(rows.places()), list(rows.hops())

    def of(self, prompts: np.ndarray, decodes: np.ndarray) -> Timings:
        """[c n] steps with so many prompts and decodes each: first one of each of the n pipelines, then
        another of each, and so on."""
        costs, rows, count = self._costs, self._rows, len(self._rows)
        work = costs.mixed_work(prompts, decodes)  # type: ignore[arg-type]
        turns = np.arange(0, len(prompts), count)[:, None]
        found = Timings.nothing(np.tile(rows.stages, len(turns)), rows.kind.shape[1])
        for kind, row, column in self._places:
            at, columns = (turns + row).ravel(), np.tile(column, len(turns))
            here, group = Work(*(np.asarray(each)[at] for each in work)), rows.kinds.every[kind].group  # type: ignore[arg-type]
            found.layer_s[at, columns] = costs.layers_work_s(group, here)
            last = np.tile(rows.last[row, column], len(turns))
            edge_s = np.empty(len(at))
            for which, where in ((True, last), (False, ~last)):
                edge_s[where] = costs.edges_work_s(group, here.sampled[where], which)  # type: ignore[index]
            found.edge_s[at, columns] = edge_s
        for link, row, column in self._hops:
            at = (turns + row).ravel()
            hop = rows.kinds.problem.link_kinds[1][link]
            found.hop_s[at, np.tile(column, len(turns))] = costs.hop_work_s(hop, work.tokens[at])  # type: ignore[index]
        return found


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """[n, width] of [n, s], with NONE beyond."""
    found = np.full((len(array), width), NONE)
    found[:, : array.shape[1]] = array
    return found


def _places(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each number in [n, s] but NONE, with the rows and columns where it is."""
    flat = numbers.ravel()
    order = np.argsort(flat, kind="stable")
    different, first = np.unique(flat[order], return_index=True)
    for number, at in zip(different.tolist(), np.split(order, first[1:]), strict=True):
        if number != NONE:
            yield number, *np.divmod(at, numbers.shape[1])

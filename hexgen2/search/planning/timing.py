"""Seconds of the stages of a pipeline, each affine in its layers, and of the hops between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NO_STAGE_S = 1e300
"""Seconds per layer of a stage that is not there: beside it, all others take no time."""


@dataclass(frozen=True)
class Timing:
    """Seconds per layer and per stage of each stage, and of each hop between stages."""

    layer_s: list[float]
    edge_s: list[float]
    hop_s: list[float]

    def stage_s(self, split: list[int]) -> list[float]:
        """Seconds of each stage with so many layers."""
        return [a * n + e for a, n, e in zip(self.layer_s, split, self.edge_s, strict=True)]

    def most_steps_s(self, layers: int) -> float:
        """An upper limit on the steps/s, however so many layers are divided (see balance_layers): that of
        stages which all take as long, and that of the slowest hop."""
        edges = math.fsum(e / a for a, e in zip(self.layer_s, self.edge_s, strict=True))
        stage_s = (layers + edges) / math.fsum(1 / a for a in self.layer_s)
        return 1 / max((stage_s, *self.hop_s))

    def times(self, weight: float) -> Timing:
        """`weight` times all of these."""
        return Timing(*([weight * s for s in part] for part in (self.layer_s, self.edge_s, self.hop_s)))

    def plus(self, other: Timing, weight: float) -> Timing:
        """This and `weight` times the other, stage by stage and hop by hop."""
        pairs = ((self.layer_s, other.layer_s), (self.edge_s, other.edge_s), (self.hop_s, other.hop_s))
        return Timing(*([a + weight * b for a, b in zip(*pair, strict=True)] for pair in pairs))


class Timings(NamedTuple):
    """Steps of n pipelines at once; those of fewer stages than the longest are filled up at the end.

    stages : [n]
    layer_s, edge_s : [n, s] seconds per layer and per stage; NO_STAGE_S and 0 where there is no stage
    hop_s : [n, s] seconds from each stage to the next; 0 where there is none
    """

    stages: np.ndarray
    layer_s: np.ndarray
    edge_s: np.ndarray
    hop_s: np.ndarray

    @classmethod
    def of(cls, timings: list[Timing]) -> Timings:
        """These steps as arrays."""
        stages = np.array([len(timing.layer_s) for timing in timings])
        found = cls.nothing(stages, int(stages.max()))
        for row, timing in enumerate(timings):
            count = len(timing.layer_s)
            found.layer_s[row, :count], found.edge_s[row, :count] = timing.layer_s, timing.edge_s
            found.hop_s[row, : count - 1] = timing.hop_s
        return found

    @classmethod
    def nothing(cls, stages: np.ndarray, most: int) -> Timings:
        """Rows for pipelines of so many stages, at most `most`, to be filled in."""
        size = len(stages), most
        return cls(stages, np.full(size, NO_STAGE_S), np.zeros(size), np.zeros(size))

    def only(self, which: np.ndarray) -> Timings:
        """Those of these pipelines."""
        return Timings(*(each[which] for each in self))

    def stage_s(self, split: np.ndarray) -> np.ndarray:
        """[n, s] seconds of the stages with [n, s] layers; 0 where there is no stage."""
        there = np.arange(split.shape[1])[None, :] < self.stages[:, None]
        return np.where(there, self.layer_s, 0.0) * split + self.edge_s

    def mean(self, other: Timings, share: np.ndarray) -> Timings:
        """The mean of these steps and others, which are [n] shares of all."""
        rest, these = (1 - share)[:, None], share[:, None]
        pairs = zip(self[1:], other[1:], strict=True)
        return Timings(self.stages, *(rest * own + these * others for own, others in pairs))

"""Seconds of the stages of a pipeline, each affine in its layers, and of the hops between them."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

"""Runs steps through a range of layers, which requests enter at layers of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import torch

from runtime.engine.base import HopOutcome, Rows
from runtime.engine.torch.runner import StageRunner
from runtime.protocol.between_workers import Step


class RangeRunner(StageRunner):
    """As StageRunner, but activations come from workers of any other replica and go there, so they are bytes
    on the host."""

    @torch.inference_mode()
    def run_hop(
        self,
        step: Step,
        tables: Mapping[str, Sequence[int]],
        windowed_tables: Mapping[str, Sequence[int]],
        entering: Sequence[Rows | None],
    ) -> HopOutcome:
        """See RangeEngine. Layers before the second sequence's first one run with the first alone, and so on:
        each layer runs once per step, with all that have begun by then."""
        stage, sequences = self._stage, step.sequences
        groups = [
            (layer, list(members)) for layer, members in groupby(sequences, lambda each: each.first_layer)
        ]
        bounds = [*(layer for layer, _ in groups), stage.part.end_layer]
        came = self._came(sum(len(each.tokens) for each in sequences if each.first_layer), entering)
        hidden, begun = None, 0
        for (first, end), (_, members) in zip(pairwise(bounds), groups, strict=True):
            begun += len(members)
            batch = self._batch(sequences[:begun], tables, windowed_tables)
            if first:
                count = sum(len(each.tokens) for each in members)
                hidden = came[:count] if hidden is None else torch.cat([hidden, came[:count]])
                came = came[count:]
            hidden = stage.forward(batch, hidden, part=range(first, end))
        assert hidden is not None
        if stage.rank.is_last:
            computed = hidden
            return HopOutcome(result=self._result(step, lambda: stage.logits(computed, batch)))
        return HopOutcome(self._rows(hidden, [len(each.tokens) for each in sequences]))

    def _came(self, tokens: int, entering: Sequence[Rows | None]) -> torch.Tensor:
        """The rows [tokens, hidden] that come from other replicas, on all ranks."""
        stage = self._stage
        came = torch.empty((tokens, stage.spec.hidden), dtype=stage.dtype, device=stage.device)
        if not tokens:
            return came
        if stage.rank.tp_rank == 0:
            whole = b"".join(rows for rows in entering if rows is not None)
            if len(whole) != came.nbytes:
                raise ValueError(f"{len(whole)} bytes of activations came, not {came.nbytes}")
            came.copy_(torch.frombuffer(bytearray(whole), dtype=stage.dtype).view_as(came))
        return stage.collectives.broadcast(came)

    def _rows(self, hidden: torch.Tensor, lengths: Sequence[int]) -> tuple[Rows, ...]:
        if self._stage.rank.tp_rank:
            return ()
        data = hidden.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
        width, rows, first = hidden.shape[-1] * hidden.dtype.itemsize, list[Rows](), 0
        for length in lengths:
            rows.append(data[first : first + length * width])
            first += length * width
        return tuple(rows)

"""Steps of decodes on a CPU that are replayed: all kernels of a step in one call.

The first step of each number of sequences is recorded, with its inputs in fixed places; later ones write
theirs there. Models that compute by other means than our kernels run kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from runtime import native
from runtime.engine.torch.attention.base import Attention, Batch
from runtime.engine.torch.attention.cpu import CpuAttention, Plan
from runtime.engine.torch.attention.windowed import WindowedAttention
from runtime.engine.torch.block_tables import BlockTables
from runtime.engine.torch.models.base import DecoderStage
from runtime.engine.torch.models.rope import KEPT_ROWS
from runtime.protocol.between_workers import SequenceStep

log = logging.getLogger(__name__)

MOST = 32
"""Sequences. Steps of more take so long that what is saved does not show."""
assert MOST <= KEPT_ROWS, "recorded steps read angles that are in the same memory in each step"
Windowed = tuple[Attention, Callable[[int], tuple[bool, int]]]


class _Places:
    """Where recorded steps read what differs from step to step in one cache: slots, contexts and blocks.

    Parameters
    ----------
    windows : of the layers that have this cache
    longest : blocks of a sequence, which may be more than this cache has: the table of layers with a window
        names blocks, too, that are others' by now
    """

    def __init__(self, attention: Attention, windows: set[int | None], longest: int) -> None:
        self.attention, cache = attention, attention.cache
        self.slots = torch.zeros(MOST, dtype=torch.int64)
        self._slots = self.slots.numpy()
        self._tables = BlockTables(MOST, longest, torch.device("cpu"))
        self._blocks = self._tables.device.numpy()
        self._block_tokens = cache.block_tokens
        self._rows = np.arange(MOST)
        self._spans = {window: np.zeros((MOST, 4), dtype=np.int32) for window in windows}
        for spans in self._spans.values():
            spans[:, 0], spans[:, 3] = self._rows, self._rows * longest

    def put(self, positions: np.ndarray, tables: Sequence[Sequence[int]]) -> None:
        """Write where the tokens at these positions [n] go, and what they attend to."""
        count, size = len(positions), self._block_tokens
        self._tables.put(tables)
        blocks = self._blocks[self._rows[:count], positions // size].astype(np.int64)
        self._slots[:count] = blocks * size + positions % size
        for window, spans in self._spans.items():
            spans[:count, 2] = positions + 1
            if window is not None:
                spans[:count, 1] = np.maximum(positions + 1 - window, 0)

    def plans(self, count: int) -> dict[int | None, Plan]:
        """The attention's plans for steps of so many sequences, by window."""
        tables = self._blocks.reshape(-1)
        return {
            window: Plan(native.Spans(tables, spans[:count]), ()) for window, spans in self._spans.items()
        }


@dataclass(frozen=True, slots=True)
class _Step:
    """Steps of one number of sequences: their batch, what replays them, and where that leaves its result."""

    batch: Batch
    replay: native.Replay
    output: torch.Tensor


class RecordedSteps:
    """The recorded steps of a stage.

    Parameters
    ----------
    attention : over the cache of all layers, or of those without a window
    windowed : as of StageRunner; None: all layers are in the one cache
    """

    def __init__(self, stage: DecoderStage, attention: Attention, windowed: Windowed | None) -> None:
        self._stage, self._place = stage, windowed[1] if windowed else None
        windows, longest = {None, *stage.windows}, attention.cache.blocks
        self._whole = _Places(attention, windows, longest)
        self._windowed = _Places(windowed[0], windows, longest) if windowed else None
        self._tokens = torch.zeros(MOST, dtype=torch.int64)
        self._positions = torch.zeros(MOST, dtype=torch.int64)
        self._rows = torch.arange(MOST)
        self._hidden = torch.zeros((MOST, stage.spec.hidden), dtype=stage.dtype)
        self._arena = native.Arena()
        self._steps: dict[int, _Step] = {}
        self._refused = False

    @classmethod
    def made(
        cls, stage: DecoderStage, attention: Attention, windowed: Windowed | None
    ) -> RecordedSteps | None:
        """Those of a stage whose steps may be replayed; None: they can't."""
        by_kernels = all(isinstance(each, CpuAttention) for each in (attention, *(windowed or ())[:1]))
        return cls(stage, attention, windowed) if by_kernels else None

    def takes(self, sequences: Sequence[SequenceStep]) -> bool:
        """Whether a step of these sequences can be replayed: of single tokens, after each of which one is
        sampled."""
        if self._refused or len(sequences) > MOST:
            return False
        return all(len(each.tokens) == 1 and each.samples for each in sequences)

    def run(
        self,
        sequences: Sequence[SequenceStep],
        tables: Mapping[str, Sequence[int]],
        windowed_tables: Mapping[str, Sequence[int]],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run a step.

        Returns
        -------
        the activations of a step, [tokens, hidden]; on the worker that samples, its logits, valid until the
        next step. None: nothing has run, because steps of this stage can't be recorded
        """
        stage, count = self._stage, len(sequences)
        self._put(sequences, tables, windowed_tables)
        step = self._steps.get(count)
        batch = self._batch(count) if step is None else step.batch
        self._hidden[:count].copy_(stage.enter(batch, hidden))
        if step is not None:
            step.replay()
            stage.collectives.check()
        else:
            step = self._record(batch)
            if step is None:
                return None
        return stage.finished(step.output) if stage.rank.samples else step.output.clone()

    def _put(
        self,
        sequences: Sequence[SequenceStep],
        tables: Mapping[str, Sequence[int]],
        windowed_tables: Mapping[str, Sequence[int]],
    ) -> None:
        count, numbers = len(sequences), [(each.tokens[0], each.position) for each in sequences]
        tokens, positions = np.array(numbers, dtype=np.int64).T
        self._tokens.numpy()[:count] = tokens
        self._positions.numpy()[:count] = positions
        self._whole.put(positions, [tables[each.request_id] for each in sequences])
        if self._windowed is not None:
            self._windowed.put(positions, [windowed_tables[each.request_id] for each in sequences])

    def _record(self, batch: Batch) -> _Step | None:
        """Run a step for the first time, and keep what it calls; None: it can't be repeated."""
        stage, recording = self._stage, native.Recording(self._arena)
        try:
            with recording:
                output = self._hidden[: len(batch.tokens)]
                output = stage.run_layers(output, batch, lambda layer: recording.turn())
                if stage.rank.is_last and (logits := stage.head_logits(output, batch)) is not None:
                    output = logits
        except native.NotRepeatable as refused:
            log.info("steps are run kernel by kernel, since %s can't be repeated", refused)
            self._refused = True
            return None
        step = self._steps[len(batch.tokens)] = _Step(batch, recording.replay(), output)
        return step

    def _batch(self, count: int) -> Batch:
        """A step of so many sequences, whose numbers are where `_put` writes them."""
        whole = self._batch_over(self._whole, count)
        if self._windowed is None or self._place is None:
            return whole
        over = self._batch_over(self._windowed, count)
        attention = WindowedAttention(
            self._whole.attention, self._windowed.attention, self._place, over.tables, over
        )
        return replace(whole, attention=attention)

    def _batch_over(self, places: _Places, count: int) -> Batch:
        return Batch(
            tokens=self._tokens[:count],
            positions=self._positions[:count],
            slots=places.slots[:count],
            sampled=self._rows[:count],
            lengths=(1,) * count,
            offsets=(0,) * count,
            tables=((),) * count,
            attention=places.attention,
            samples_each=True,
            _plans=places.plans(count),
        )

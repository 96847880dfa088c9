"""Decode steps as CUDA graphs: all launches of a step at once, so that the GPU does not wait for the host.

A graph has a fixed number of sequences. A step with fewer repeats its first sequence, which writes the same to the
same places again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.attention.gpu import Decodes, GpuAttention, Plan, padded
from runtime.engine.torch.models.base import DecoderStage
from runtime.protocol.between_workers import SequenceStep

log = logging.getLogger(__name__)

_SMALL = (1, 2, 4, 8, 16, 24, 32)
_STEP = 32
_LARGEST = 256
"""Steps of more sequences keep a GPU busy for longer than their launches take."""
_LONGEST = 1 << 17
"""Tokens of a context beyond which tables of blocks would be too large to copy in each step."""


class DecodeGraphs:
    """The graphs of a stage over one cache.

    Parameters
    ----------
    most : sequences in a step
    """

    def __init__(self, stage: DecoderStage, attention: GpuAttention, most: int) -> None:
        self._stage, self._attention = stage, attention
        cache, device = attention.cache, stage.device
        most = min(most, _LARGEST)
        limit = stage.spec.position_limit or _LONGEST
        blocks = min(cache.blocks, -(-min(limit, _LONGEST) // cache.block_tokens))
        self._longest = blocks * cache.block_tokens
        self._sizes = [size for size in (*_SMALL, *range(2 * _STEP, _LARGEST + 1, _STEP)) if size < most] + [
            most
        ]
        self._numbers = torch.zeros((4, most), dtype=torch.int64, device=device)
        self._tables = torch.zeros((most, blocks), dtype=torch.int32, device=device)
        self._rows = torch.arange(most, device=device)
        self._entering = None
        if not stage.rank.is_first:
            self._entering = torch.zeros((most, stage.spec.hidden), dtype=stage.dtype, device=device)
        self._graphs = dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]]()

    @classmethod
    def made(cls, stage: DecoderStage, attention: object, most: int) -> DecodeGraphs | None:
        """Those of a stage whose decode steps can be replayed; None: they can't."""
        if not isinstance(attention, GpuAttention) or not stage.replays or stage.rank.tp > 1:
            return None
        graphs = cls(stage, attention, most)
        try:
            graphs._capture_all()
        except RuntimeError as error:
            log.warning("decode steps are launched kernel by kernel: %s", error)
            return None
        return graphs

    def takes(self, sequences: Sequence[SequenceStep]) -> bool:
        """Whether a step of these sequences can be replayed."""
        return len(sequences) <= self._sizes[-1] and all(
            len(each.tokens) == 1 and each.position < self._longest for each in sequences
        )

    def run(
        self,
        sequences: Sequence[SequenceStep],
        tables: Mapping[str, Sequence[int]],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits of a step, [sequences, vocab], valid until the next one; before the last stage, activations,
        [sequences, hidden]."""
        count = len(sequences)
        size = next(each for each in self._sizes if each >= count)
        block_tokens = self._attention.cache.block_tokens
        positions = np.fromiter((each.position for each in sequences), dtype=np.int64, count=count)
        blocks = [tables[each.request_id][: each.position // block_tokens + 1] for each in sequences]
        last = np.fromiter((each[-1] for each in blocks), dtype=np.int64, count=count)
        numbers = np.empty((4, size), dtype=np.int64)
        numbers[0, :count] = [each.tokens[0] for each in sequences]
        numbers[1, :count] = positions
        numbers[2, :count] = last * block_tokens + positions % block_tokens
        numbers[3, :count] = positions + 1
        numbers[:, count:] = numbers[:, :1]
        width = max(map(len, blocks))
        table = np.empty((size, width), dtype=np.int32)
        table[:count] = padded(blocks, width)
        table[count:] = table[:1]
        self._numbers[:, :size].copy_(torch.from_numpy(numbers))
        self._tables[:size, :width].copy_(torch.from_numpy(table))
        if self._entering is not None and hidden is not None:
            self._entering[:count].copy_(hidden)
            self._entering[count:size].copy_(hidden[:1].expand(size - count, -1))
        graph, output = self._graphs[size]
        graph.replay()
        # Activations are still being sent when the next step begins.
        return output[:count] if self._stage.rank.is_last else output[:count].clone()

    def _capture_all(self) -> None:
        """Capture the largest first, whose memory the others share."""
        began, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        self._numbers[3] = 1
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, pool)
        torch.cuda.synchronize(self._stage.device)
        log.info("captured %d decode steps in %.1f s", len(self._sizes), time.monotonic() - began)

    @torch.inference_mode()
    def _capture(self, size: int, pool: tuple[int, int]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        batch, stage = self._batch(size), self._stage
        hidden = None if self._entering is None else self._entering[:size]

        def compute() -> torch.Tensor:
            found = stage.forward(batch, hidden, lambda layer: None)
            logits = stage.logits(found, batch) if stage.rank.is_last else found
            assert logits is not None
            return logits

        beside = torch.cuda.Stream(stage.device)
        beside.wait_stream(torch.cuda.current_stream(stage.device))
        with torch.cuda.stream(beside):
            compute()  # compiles kernels, and has libraries take their memory
        torch.cuda.current_stream(stage.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = compute()
        return graph, output

    def _batch(self, size: int) -> Batch:
        """A step whose numbers are where `run` writes them."""
        tokens, positions, slots, contexts = (line[:size] for line in self._numbers)
        rows = self._rows[:size]
        decodes = Decodes(rows, self._tables[:size], contexts, self._attention.splits(size))
        plan = Plan(decodes, ())
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            sampled=rows,
            lengths=(1,) * size,
            offsets=(0,) * size,
            tables=((),) * size,
            attention=self._attention,
            _plans=dict.fromkeys({None, *self._stage.windows}, plan),
        )

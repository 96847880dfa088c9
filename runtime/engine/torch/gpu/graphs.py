"""Steps as CUDA graphs: all launches of a step at once, so that the GPU does not wait for the host.

A graph has a fixed number of tokens, and numbers in fixed places on the device say what they are: decode
graphs have one token for each sequence, mixed graphs some decodes and chunks of prompts. What a step does not
need of a graph is stored nowhere and attends to nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from runtime.engine.torch.attention.base import Batch, Part
from runtime.engine.torch.attention.gpu import TILE_TOKENS, Chunks, Decodes, GpuAttention, Plan, tiles_of
from runtime.engine.torch.block_tables import BlockTables
from runtime.engine.torch.models.base import DecoderStage
from runtime.protocol.between_workers import SequenceStep

log = logging.getLogger(__name__)

DECODES = (1, 2, 4, 8, 16, 24, 32, *range(64, 257, 32))
"""Sequences of decode graphs. More keep a GPU busy for longer than their launches take."""
TOKENS = (32, 64, 128, 256, 512)
"""Tokens of mixed graphs."""
MOST_CHUNKS = 16
MIXED_SPLITS = 16
"""Into how many parts contexts of decodes are divided in mixed graphs."""
_LONGEST = 1 << 17
"""Tokens of a context beyond which tables of blocks would be too large to copy in each step."""


class StepGraphs:
    """The graphs of a stage over one cache.

    Parameters
    ----------
    most : sequences in a step
    tokens : most tokens of prompts in a step
    """

    def __init__(self, stage: DecoderStage, attention: GpuAttention, most: int, tokens: int) -> None:
        self._stage, self._attention = stage, attention
        self._cache, device = attention.cache, stage.device
        self._most = min(most, DECODES[-1])
        limit = min(stage.spec.position_limit or _LONGEST, _LONGEST)
        blocks = min(self._cache.blocks, -(-limit // self._cache.block_tokens))
        self._longest = blocks * self._cache.block_tokens
        self._decodes = [size for size in DECODES if size < self._most] + [self._most]
        largest = min(tokens + self._most, TOKENS[-1])
        self._mixed = [size for size in TOKENS if size < 2 * largest and tokens > 1]
        rows = max(self._most, *self._mixed, 1)
        # Token, position, slot and context of each row; of mixed steps, rows and contexts of decodes, and
        # rows after which a token is sampled.
        self._numbers = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._decoding = torch.zeros((3, self._most + MOST_CHUNKS), dtype=torch.int64, device=device)
        self._tiles = torch.zeros((rows // TILE_TOKENS + MOST_CHUNKS, 4), dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, device=device)
        self._tables = BlockTables(self._most, blocks, device)
        self._chunk_tables = BlockTables(MOST_CHUNKS, blocks, device)
        self._entering = None
        if not stage.rank.is_first:
            self._entering = torch.zeros((rows, stage.spec.hidden), dtype=stage.dtype, device=device)
        # Graphs run one at a time, so they share what they write.
        width = stage.spec.vocab if stage.rank.is_last else stage.spec.hidden
        outputs = min(rows, self._most + MOST_CHUNKS) if stage.rank.is_last else rows
        self._output = torch.empty((outputs, width), dtype=stage.dtype, device=device)
        self._graphs = dict[tuple[str, int], torch.cuda.CUDAGraph]()

    @classmethod
    def made(cls, stage: DecoderStage, attention: GpuAttention, most: int, tokens: int) -> StepGraphs | None:
        """Those of a stage whose steps can be replayed; None: they can't."""
        if not stage.replays or stage.rank.tp > 1:
            return None
        graphs = cls(stage, attention, most, tokens)
        try:
            graphs._capture_all()
        except RuntimeError as error:
            log.warning("steps are launched kernel by kernel: %s", error)
            return None
        return graphs

    def takes(self, sequences: Sequence[SequenceStep]) -> bool:
        """Whether a step of these sequences can be replayed."""
        if any(each.position + len(each.tokens) > self._longest for each in sequences):
            return False
        chunks = sum(len(each.tokens) > 1 for each in sequences)
        if len(sequences) - chunks > self._most or chunks > MOST_CHUNKS:
            return False
        tokens = sum(len(each.tokens) for each in sequences)
        return not chunks or tokens <= max(self._mixed, default=0)

    def run(
        self,
        sequences: Sequence[SequenceStep],
        tables: Mapping[str, Sequence[int]],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a step.

        Returns
        -------
        the activations of a step, [tokens, hidden]; in the last stage, the logits of the sequences that
        sample, valid until the next step
        """
        stage = self._stage
        count = sum(len(each.tokens) for each in sequences)
        is_mixed = count > len(sequences)
        kind, sizes = ("mixed", self._mixed) if is_mixed else ("decode", self._decodes)
        size = next(each for each in sizes if each >= count)
        blocks = [tables[each.request_id] for each in sequences]
        (self._put_mixed if is_mixed else self._put_decodes)(sequences, blocks, size)
        if self._entering is not None and hidden is not None:
            self._entering[:count].copy_(hidden)
        self._graphs[kind, size].replay()
        if not stage.rank.is_last:
            return self._output[:count].clone()  # It is still being sent when the next step begins.
        samples = [row for row, each in enumerate(sequences) if each.samples]
        if is_mixed or len(samples) == count:
            return self._output[: len(samples)]
        return self._output[samples]

    def _put_decodes(
        self, sequences: Sequence[SequenceStep], tables: Sequence[Sequence[int]], size: int
    ) -> None:
        """Write single tokens to where a decode graph of so many reads them."""
        count, block_tokens = len(sequences), self._cache.block_tokens
        numbers = np.zeros((4, size), dtype=np.int64)
        numbers[0, :count] = [each.tokens[0] for each in sequences]
        positions = np.array([each.position for each in sequences])
        blocks = np.array(
            [table[at] for table, at in zip(tables, (positions // block_tokens).tolist(), strict=True)]
        )
        numbers[1, :count] = positions
        numbers[2, :count] = blocks * block_tokens + positions % block_tokens
        numbers[2, count:] = -1
        numbers[3, :count] = positions + 1
        self._numbers[:, :size].copy_(torch.from_numpy(numbers))
        self._tables.put(tables)

    def _put_mixed(
        self, sequences: Sequence[SequenceStep], tables: Sequence[Sequence[int]], size: int
    ) -> None:
        """Write chunks and single tokens to where a mixed graph of so many tokens reads them."""
        numbers = np.zeros((4, size), dtype=np.int64)
        numbers[2] = -1
        decodes, parts = list[tuple[int, int]](), list[Part]()
        decoded, ends, row = list[Sequence[int]](), list[int](), 0
        for each, table in zip(sequences, tables, strict=True):
            length, end = len(each.tokens), each.position + len(each.tokens)
            rows = slice(row, row + length)
            numbers[0, rows] = each.tokens
            numbers[1, rows] = np.arange(each.position, end)
            numbers[2, rows] = self._cache.slots(table, each.position, end)
            if length == 1:
                decodes.append((row, end))
                decoded.append(table)
            else:
                parts.append(Part(row, length, each.position, table))
            row += length
            if each.samples:
                ends.append(row - 1)
        self._numbers[:, :size].copy_(torch.from_numpy(numbers))
        few = np.zeros(self._decoding.shape, dtype=np.int64)
        if decodes:
            few[:2, : len(decodes)] = np.array(decodes).T
        few[2, : len(ends)] = ends
        self._decoding.copy_(torch.from_numpy(few))
        tiles = np.zeros((len(self._tiles), 4), dtype=np.int32)
        needed = tiles_of(parts, TILE_TOKENS)
        tiles[: len(needed)] = needed
        self._tiles.copy_(torch.from_numpy(tiles))
        self._tables.put(decoded)
        self._chunk_tables.put([part.table for part in parts])

    def _capture_all(self) -> None:
        """Capture the largest first, whose memory the others share."""
        began, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        self._numbers[2] = -1
        for size in reversed(self._mixed):
            self._graphs["mixed", size] = self._capture(self._batch(size, is_mixed=True), pool)
        for size in reversed(self._decodes):
            self._graphs["decode", size] = self._capture(self._batch(size, is_mixed=False), pool)
        torch.cuda.synchronize(self._stage.device)
        log.info("captured %d steps in %.1f s", len(self._graphs), time.monotonic() - began)

    @torch.inference_mode()
    def _capture(self, batch: Batch, pool: object) -> torch.cuda.CUDAGraph:
        device, beside = self._stage.device, torch.cuda.Stream(self._stage.device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            self._compute(batch)  # compiles kernels, and has libraries take their memory
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
            self._compute(batch)
        return graph

    def _compute(self, batch: Batch) -> None:
        """Run a step, and leave its activations, or, in the last stage, its logits."""
        stage = self._stage
        entering = None if self._entering is None else self._entering[: len(batch.tokens)]
        found: torch.Tensor | None = stage.forward(batch, entering)
        if stage.rank.is_last and found is not None:
            found = stage.logits(found, batch)
        assert found is not None
        self._output[: len(found)].copy_(found)

    def _batch(self, size: int, is_mixed: bool) -> Batch:
        """A step whose numbers are where `_put_decodes` and `_put_mixed` write them."""
        tokens, positions, slots, contexts = (line[:size] for line in self._numbers)
        count, rows, chunks = min(size, self._most), self._rows[:size], None
        splits, sampled = self._attention.splits(count), rows
        if is_mixed:
            rows, contexts = (line[:count] for line in self._decoding[:2])
            splits, sampled = max(splits, MIXED_SPLITS), self._decoding[2, :size]
            tiles = self._tiles[: size // TILE_TOKENS + min(MOST_CHUNKS, size // 2)]
            chunks = Chunks(tiles, self._chunk_tables.device)
        decodes = Decodes(rows, self._tables.device[:count], contexts, splits)
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            sampled=sampled,
            lengths=(1,) * size,
            offsets=(0,) * size,
            tables=((),) * size,
            attention=self._attention,
            _plans=dict.fromkeys({None, *self._stage.windows}, Plan(decodes, chunks)),
        )

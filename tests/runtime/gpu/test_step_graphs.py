"""Steps that are replayed: what they read on the device is what each step is. Here a replay computes anew
from the numbers in their fixed places, with torch's operators for the kernels."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import LAYERS, VOCAB, WRITERS, greedy
from stage_engine import stage_engine

from runtime.engine.torch.attention import gpu
from runtime.engine.torch.block_tables import BlockTables
from runtime.engine.torch.engine import TorchEngine
from runtime.engine.torch.gpu import graphs
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step, StepResult
from runtime.protocol.message import Sampling, StageShape

BLOCK, BLOCKS, TOKENS, MOST = 8, 60, 12, 4
LENGTHS = (1, 12, 31, 7)


def attend(query, keys, values, slots, scale, window):
    """One token over these slots of the cache."""
    seen = slots[-(window or len(slots)) :]
    group = query.shape[0] // keys.shape[1]
    key, value = (side[seen].repeat_interleave(group, 1) for side in (keys, values))
    scores = torch.einsum("hd,thd->ht", query, key) * (scale or query.shape[1] ** -0.5)
    return torch.einsum("ht,thd->hd", scores.softmax(1), value)


def attend_paged(
    query, keys, values, rows, tables, contexts, block_tokens, output, *, splits, window, scale, cap, sinks
):
    for row, table, context in zip(rows.tolist(), tables, contexts.tolist(), strict=True):
        if context:
            slots = (table[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[:context]
            output[row] = attend(query[row], keys, values, slots, scale, window)


def attend_tiles(
    query, keys, values, tiles, tables, block_tokens, output, *, tile_tokens, window, scale, cap, sinks
):
    for first, length, position, line in tiles.tolist():
        for token in range(length):
            slots = (tables[line][:, None] * block_tokens + torch.arange(block_tokens)).flatten()
            slots = slots[: position + token + 1]
            output[first + token] = attend(query[first + token], keys, values, slots, scale, window)


def store(heads, slots, cached):
    kept = slots >= 0
    cached[slots[kept]] = heads[kept]


def turn_and_store(heads, cosines, sines, slots, keys, values):
    kv_heads = keys.shape[1]
    low, high = heads[:, :-kv_heads, : 2 * cosines.shape[1]].chunk(2, dim=-1)
    cosine, sine = cosines[:, None], sines[:, None]
    turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)
    heads[:, :-kv_heads, : 2 * cosines.shape[1]] = turned
    store(heads[:, -2 * kv_heads : -kv_heads], slots, keys)
    store(heads[:, -kv_heads:], slots, values)


class Replay:
    """Computes again what was captured."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = torch.inference_mode()(compute)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of the steps that were replayed."""
    kernels = SimpleNamespace(
        attend_paged=attend_paged,
        attend_tiles=attend_tiles,
        store=store,
        turn_and_store=turn_and_store,
        splits_for=lambda *_: 1,
    )
    monkeypatch.setitem(sys.modules, "runtime.engine.torch.gpu.kernels", kernels)
    monkeypatch.setattr("runtime.engine.torch.gpu.kernels", kernels, raising=False)
    counts = list[int]()

    def capture(self, batch, pool):
        return Replay(lambda: self._compute(batch))

    def run(self, sequences, tables, hidden):
        counts.append(sum(len(each.tokens) for each in sequences))
        return original(self, sequences, tables, hidden)

    original = graphs.StepGraphs.run
    monkeypatch.setattr(graphs.StepGraphs, "_capture", capture)
    monkeypatch.setattr(graphs.StepGraphs, "run", run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return counts


def engine_of(folder: Path, stages: tuple[StageShape, ...], number: int = 0) -> TorchEngine:
    """The engine of a stage on the CPU that attends as on a GPU, and replays its steps."""
    engine = stage_engine(
        folder, stages, number, kv_budget_tokens=BLOCKS * BLOCK, block_tokens=BLOCK, max_batch=MOST
    )
    own = engine._runner
    own._attention = gpu.GpuAttention(engine.cache)
    own._graphs = graphs.StepGraphs.made(own._stage, own._attention, MOST, 40)
    assert own._graphs is not None
    return engine


WHOLE = (StageShape(workers=("w/0",), first_layer=0, end_layer=LAYERS),)
TWO = (
    StageShape(workers=("w/0",), first_layer=0, end_layer=2),
    StageShape(workers=("w/1",), first_layer=2, end_layer=LAYERS),
)


class Pipeline:
    """Engines of a replica's stages, in one process."""

    def __init__(self, folder: Path, stages: tuple[StageShape, ...]) -> None:
        self.engines = [engine_of(folder, stages, number) for number in range(len(stages))]
        sent = deque[torch.Tensor]()
        for engine in self.engines:
            collectives = engine._stage.collectives
            collectives.send = sent.append
            collectives.receive = lambda shape, dtype: sent.popleft()

    def begin(self, number: int, tables: dict[str, list[int]]) -> None:
        """Have all engines know a request, in no block yet."""
        tables[str(number)] = []
        start = SequenceStart(request_id=str(number), sampling=Sampling(max_tokens=99))
        for engine in self.engines:
            engine.begin(Step(step=0, starts=(start,), sequences=()))

    def run(self, step: Step, tables: dict[str, list[int]]) -> StepResult | None:
        """Run a step through all stages."""
        return [engine.run(step, tables, {}, None) for engine in self.engines][-1]


@pytest.mark.parametrize("stages", [WHOLE, TWO], ids=["whole", "two stages"])
@pytest.mark.parametrize(("family", "seed"), [("llama", 1), ("opt", 2), ("mistral", 3)])
def test_replayed_steps_give_the_tokens_of_transformers(
    family: str, seed: int, stages: tuple[StageShape, ...], replayed: list[int], tmp_path: Path
) -> None:
    """Steps of random chunks of random requests, in any order, some of which end in no token, with one
    request that begins anew halfway, in other blocks."""
    folder = WRITERS[family](tmp_path / family)
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = greedy(folder, prompts, TOKENS)
    pipeline = Pipeline(folder, stages)
    free = list(range(BLOCKS))
    rng.shuffle(free)
    texts, done, tables = [list(prompt) for prompt in prompts], [0] * len(prompts), {}
    for number in range(len(prompts)):
        pipeline.begin(number, tables)
    steps, again = 0, rng.randrange(len(prompts))
    while any(len(text) < len(prompt) + TOKENS for text, prompt in zip(texts, prompts, strict=True)):
        if steps == 9:  # it was preempted
            free = [*tables[str(again)], *free]
            pipeline.begin(again, tables)
            done[again] = 0
        live = [n for n, text in enumerate(texts) if len(text) < len(prompts[n]) + TOKENS]
        rng.shuffle(live)
        sequences = list[SequenceStep]()
        for number in live[: rng.randint(1, MOST)]:
            part = texts[number][done[number] :][: rng.choice([1, 1, 5, 9])]
            table, end = tables[str(number)], done[number] + len(part)
            table += [free.pop() for _ in range(-(-end // BLOCK) - len(table))]
            sequences.append(
                SequenceStep(
                    request_id=str(number),
                    tokens=tuple(part),
                    position=done[number],
                    index=0,
                    samples=end == len(texts[number]),
                )
            )
            done[number] = end
        result = pipeline.run(Step(step=1, starts=(), sequences=tuple(sequences)), tables)
        assert result is not None
        sampled = [int(each.request_id) for each in sequences if each.samples]
        for number, token in zip(sampled, result.tokens, strict=True):
            texts[number].append(token)
        steps += 1
    assert [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)] == expected
    assert len(replayed) == len(stages) * steps > 20


def test_tables_may_have_more_blocks_than_are_replayed() -> None:
    """A request may have blocks for more tokens than the longest context of a graph."""
    tables, long = BlockTables(2, 3, torch.device("cpu")), [5, 6, 7, 8]
    tables.put([[1], long])
    assert tables.device.tolist() == [[1, 0, 0], [5, 6, 7]]
    long.append(9)
    tables.put([[2, 3], long])
    assert tables.device.tolist() == [[2, 3, 0], [5, 6, 7]]


def test_larger_steps_and_longer_contexts_are_not_replayed(replayed: list[int], tmp_path: Path) -> None:
    engine = engine_of(WRITERS["llama"](tmp_path / "llama"), WHOLE)
    made = engine._runner._graphs

    def sequences(*shapes: tuple[int, int]) -> list[SequenceStep]:
        return [
            SequenceStep(request_id=str(n), tokens=(5,) * length, position=at, index=0, samples=True)
            for n, (length, at) in enumerate(shapes)
        ]

    assert made.takes(sequences(*[(1, 100)] * MOST))
    assert not made.takes(sequences(*[(1, 100)] * (MOST + 1)))
    assert made.takes(sequences((40, 0), (1, 3)))
    assert not made.takes(sequences((65, 0)))
    assert not made.takes(sequences((1, BLOCKS * BLOCK)))
    assert not made.takes(sequences(*[(2, 0)] * (graphs.MOST_CHUNKS + 1)))

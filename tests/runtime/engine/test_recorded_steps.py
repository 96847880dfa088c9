"""Steps of decodes that are replayed give the bits of the same steps run kernel by kernel."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import quantised
import torch
from checkpoints import (
    LAYERS,
    VOCAB,
    WRITERS,
    write_deepseek_v3,
    write_gpt_oss_mxfp4,
    write_llama,
    write_qwen3_moe,
)
from quantised import quantise
from stage_engine import stage_engine
from transformers import AutoModelForCausalLM

from runtime import native
from runtime.engine.torch import recorded
from runtime.engine.torch.engine import TorchEngine
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step, StepResult
from runtime.protocol.message import Sampling, StageShape
from runtime.protocol.to_workers import WindowedLayers

if not native.serves(torch.float32, torch.device("cpu")):
    assert shutil.which("g++") is None, "installed without compiled kernels, which g++ can build"
    pytest.skip("neither compiled kernels nor a compiler", allow_module_level=True)

BLOCK, BLOCKS, TOKENS = 8, 120, 14
LENGTHS = (1, 12, 31, 7, 3)
OWN = 3
"""Blocks of a request in layers with a window of 9 tokens, of which a step runs 5 at most."""
WHOLE = (StageShape(workers=("w/0",), first_layer=0, end_layer=LAYERS),)
TWO = (
    StageShape(workers=("w/0",), first_layer=0, end_layer=2),
    StageShape(workers=("w/1",), first_layer=2, end_layer=LAYERS),
)
RANKS = (StageShape(workers=("w/0", "w/1"), first_layer=0, end_layer=LAYERS),)
UNEVEN = (
    StageShape(workers=("w/0", "w/1"), first_layer=0, end_layer=3),
    StageShape(workers=("w/2",), first_layer=3, end_layer=LAYERS),
)
ORDERED = ("GPTQ 4 bits, desc_act, zeros", "compressed-tensors int4, actorder")
WINDOWED = {"mistral": tuple(range(LAYERS)), "gemma3": (0, 1, 3, 4), "gpt_oss": (0, 2, 4)}


def share_memory(engines: Sequence[TorchEngine]) -> None:
    """Have the tensor-parallel ranks of a stage, each of which runs in a thread, sum through memory."""
    descriptor, handle = native.memory_for(len(engines))
    for rank, engine in enumerate(engines):
        engine._stage.collectives._exchange = native.Exchange(handle, rank, len(engines), 60)
    os.close(descriptor)


class Ranks:
    """Has such ranks sum by other means than kernels."""

    def __init__(self, engines: Sequence[TorchEngine]) -> None:
        self._barrier = threading.Barrier(len(engines), timeout=60)
        self._parts: list[torch.Tensor | None] = [None] * len(engines)
        for rank, engine in enumerate(engines):
            collectives = engine._stage.collectives
            collectives._tp_group = self
            collectives._summed = partial(self._summed, rank)
            collectives._gathered = partial(self._gathered, rank)

    def _exchanged(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = tensor.clone()
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()
        return parts

    def _summed(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self._exchanged(rank, tensor)))

    def _gathered(self, rank: int, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = self._exchanged(rank, tensor)
        return None if rank else torch.cat(parts, dim=-1)


class Pipeline:
    """Engines of a replica's workers in one process, and what their layers see of steps."""

    def __init__(
        self,
        folder: Path,
        stages: Sequence[StageShape],
        dtype: str,
        replays: bool,
        windowed: bool = False,
        join: Callable[[Sequence[TorchEngine]], object] = share_memory,
    ) -> None:
        self.stages = [
            [
                _engine(folder, tuple(stages), number, rank, dtype, windowed)
                for rank in range(len(each.workers))
            ]
            for number, each in enumerate(stages)
        ]
        self.engines = [engine for engines in self.stages for engine in engines]
        self.texts, self.results = list[list[int]](), list[StepResult]()
        self._threads = ThreadPoolExecutor(max(map(len, self.stages)))
        sent: list[torch.Tensor] = []
        for engine in self.engines:
            collectives = engine._stage.collectives
            first = collectives.rank.tp_rank == 0
            collectives.send = sent.append if first else lambda hidden: None
            collectives.receive = lambda shape, dtype: sent.pop()
            if not replays:
                engine._runner._recorded = None
        for engines in self.stages:
            if len(engines) > 1:
                join(engines)

    def serve(self, seed: int, lengths: Sequence[int] = LENGTHS, largest: int = 64) -> None:
        """Steps of random chunks of random requests until each has its tokens; one begins anew in other
        blocks. In layers with a window, each request has OWN blocks in turn."""
        rng = random.Random(seed)
        prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
        free = list(range(BLOCKS))
        rng.shuffle(free)
        self.texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        tables: dict[str, list[int]] = {}
        windowed: dict[str, list[int]] = {}
        for number in range(len(prompts)):
            self._begin(number, tables, windowed)
        again, steps = rng.randrange(len(prompts)), 0
        while live := [n for n, text in enumerate(self.texts) if len(text) < len(prompts[n]) + TOKENS]:
            if steps == 9:
                self._begin(again, tables, windowed)
                done[again] = 0
            rng.shuffle(live)
            sequences = list[SequenceStep]()
            for number in live[: rng.randint(1, len(live))]:
                text, name = self.texts[number], str(number)
                part = text[done[number] :][: rng.choice([1, 5, largest])]
                end = done[number] + len(part)
                blocks = range(len(tables[name]), -(-end // BLOCK))
                tables[name] += [free.pop() for _ in blocks]
                windowed[name] += [number * OWN + block % OWN for block in blocks]
                sequences.append(
                    SequenceStep(
                        request_id=name,
                        tokens=tuple(part),
                        position=done[number],
                        index=0,
                        samples=end == len(text),
                    )
                )
                done[number] = end
            step = Step(step=1, starts=(), sequences=tuple(sequences))
            result = self._run(step, tables, windowed)
            assert result is not None
            self.results.append(result)
            sampled = [int(each.request_id) for each in sequences if each.samples]
            for number, token in zip(sampled, result.tokens, strict=True):
                self.texts[number].append(token)
            steps += 1

    def _run(self, step: Step, *tables: dict[str, list[int]]) -> StepResult | None:
        """A step; the result of the worker that samples."""
        results = list[StepResult | None]()
        for engines in self.stages:
            run = [self._threads.submit(engine.run, step, *tables, None) for engine in engines]
            results = [each.result() for each in run]
        return results[0]

    def _begin(self, number: int, *tables: dict[str, list[int]]) -> None:
        for each in tables:
            each[str(number)] = []
        start = SequenceStart(request_id=str(number), sampling=Sampling(max_tokens=99, logprobs=5))
        for engine in self.engines:
            engine.begin(Step(step=0, starts=(start,), sequences=()))


def _engine(
    folder: Path, stages: tuple[StageShape, ...], number: int, rank: int, dtype: str, windowed: bool
) -> TorchEngine:
    limited = None
    if windowed:
        budget = len(LENGTHS) * OWN * BLOCK
        limited = WindowedLayers(layers=WINDOWED[folder.name], window=9, kv_budget_tokens=budget)
    return stage_engine(
        folder,
        stages,
        number,
        rank,
        dtype=dtype,
        kv_budget_tokens=BLOCKS * BLOCK,
        block_tokens=BLOCK,
        max_batch=len(LENGTHS),
        threads=2,
        windowed=limited,
    )


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each replay has: one, or more where something is computed apart."""
    counts, original = list[int](), native.Replay.__call__

    def replay(self: native.Replay) -> None:
        counts.append(len(self._parts))
        original(self)

    monkeypatch.setattr(native.Replay, "__call__", replay)
    return counts


def compare(
    folder: Path,
    stages: Sequence[StageShape],
    dtype: str,
    seed: int,
    windowed: bool = False,
    join: Callable[[Sequence[TorchEngine]], object] = share_memory,
) -> None:
    """Serve the same requests with and without replays."""
    found = []
    for replays in (True, False):
        pipeline = Pipeline(folder, stages, dtype, replays, windowed, join)
        if windowed:
            pipeline.serve(seed, (1, 12, 150, 7, 3), largest=5)
        else:
            pipeline.serve(seed)
        found.append((pipeline.texts, pipeline.results))
    assert found[0] == found[1]


def checkpoint(family: str, folder: Path) -> Path:
    """Heads have a size that attention is compiled for, as DeepSeek's latents do anyway."""
    sizes = {} if family.startswith("deepseek") else {"head_dim": 16}
    return WRITERS[family](folder / family, **sizes)


@pytest.mark.parametrize("stages", [WHOLE, TWO], ids=["whole", "two stages"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WRITERS)
def test_replays_give_the_same_bits(
    family: str, dtype: str, stages: Sequence[StageShape], replays: list[int], tmp_path: Path
) -> None:
    compare(checkpoint(family, tmp_path), stages, dtype, seed_of(family, dtype))
    assert len(replays) > 5
    assert max(replays) == 1


@pytest.mark.parametrize("stages", [RANKS, UNEVEN], ids=["two ranks", "uneven"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "llama", "opt", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("join", [share_memory, Ranks], ids=["memory", "apart"])
def test_ranks_replay_their_sums(
    family: str,
    stages: Sequence[StageShape],
    join: Callable[[Sequence[TorchEngine]], object],
    replays: list[int],
    tmp_path: Path,
) -> None:
    """In one call, or between calls where ranks sum by other means."""
    compare(checkpoint(family, tmp_path), stages, "float32", seed_of(family), join=join)
    assert len(replays) > 10
    if join is Ranks:
        assert max(replays) >= 4 * stages[0].end_layer
    else:
        assert max(replays) == 1


@pytest.mark.parametrize("family", WINDOWED)
def test_replays_find_layers_with_a_cache_of_their_own(
    family: str, replays: list[int], tmp_path: Path
) -> None:
    """The longest sequence has more blocks than that cache."""
    compare(checkpoint(family, tmp_path), TWO, "float32", 5, windowed=True)
    assert len(replays) > 5


@pytest.mark.parametrize(
    "form", ["GPTQ 4 bits", "compressed-tensors int4, zeros", "W8A8", "compressed-tensors fp8"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_multiply_by_quantised_weights(
    form: str, dtype: str, replays: list[int], tmp_path: Path
) -> None:
    plain = write_llama(tmp_path / "plain", head_dim=16)
    quantise(plain, form, tmp_path / "llama")
    compare(tmp_path / "llama", WHOLE, dtype, 11)
    assert len(replays) > 5


@pytest.mark.parametrize("form", quantised.FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_multiply_by_quantised_experts(
    form: str, dtype: str, replays: list[int], tmp_path: Path
) -> None:
    """Experts whose inputs are put in another order are computed between calls."""
    plain = write_qwen3_moe(tmp_path / "plain")
    quantise(plain, form, tmp_path / "quantised")
    compare(tmp_path / "quantised", WHOLE, dtype, 12)
    assert len(replays) > 5
    assert (max(replays) > 1) == (form in ORDERED)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_multiply_by_packed_experts(
    family: str, dtype: str, replays: list[int], tmp_path: Path
) -> None:
    """In mxfp4, and in 16 bits whatever is computed in."""
    if family == "gpt_oss":
        folder = write_gpt_oss_mxfp4(tmp_path / "model")
    else:
        folder = write_qwen3_moe(tmp_path / "model")
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        half.save_pretrained(folder)
    compare(folder, WHOLE, dtype, 13)
    assert len(replays) > 5 and max(replays) == 1


@pytest.mark.parametrize("sizes", [{"kv_lora_rank": 25}, {"qk_nope_head_dim": 15}])
def test_others_run_kernel_by_kernel(sizes: dict[str, int], replays: list[int], tmp_path: Path) -> None:
    """Latents, or parts of heads, for which no kernels are compiled."""
    compare(write_deepseek_v3(tmp_path / "model", **sizes), WHOLE, "float32", 3)
    assert not replays


def test_more_sequences_than_are_recorded(
    replays: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorded, "MOST", 2)
    compare(write_llama(tmp_path / "llama", head_dim=16), WHOLE, "float32", 4)
    assert len(replays) > 2


def test_only_kernels_are_recorded() -> None:
    x, weight = torch.ones(2, 32), torch.full((32,), 2.0)
    recording = native.Recording(native.Arena())
    with pytest.raises(native.NotRepeatable, match="mul"), recording:
        native.rms_norm(x, weight, 1e-6) * 2
    assert torch.equal(x * 2, torch.full((2, 32), 2.0))  # nothing is recorded any more


def test_recording_imports_no_compiler() -> None:
    """Torch's takes seconds to import, in each worker that records its first step."""
    record = (
        "import sys, torch; from runtime import native\n"
        "x, weight = torch.ones(4, 64), torch.ones(64)\n"
        "with native.Recording(native.Arena()): native.rms_norm(x[1:], weight, 0.1)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", record], check=True)


def test_what_is_computed_apart_is_computed_again() -> None:
    x, weight = torch.rand(3, 64), torch.rand(64)
    with native.Recording(native.Arena()) as recording:
        normed = native.rms_norm(x, weight, 1e-6)
        output = native.rms_norm(native.apart(lambda rows: rows.flip(0).mul(2), normed), weight, 1e-6)
    replay = recording.replay()
    for _ in range(2):
        x.copy_(torch.rand(3, 64))
        replay()
        expected = native.rms_norm(native.rms_norm(x, weight, 1e-6).flip(0).mul(2), weight, 1e-6)
        assert torch.equal(output, expected)


def test_what_a_layer_writes_stays_until_the_next_one_is_done() -> None:
    """Three layers, the first and the third of which write to the same place."""
    arena, x = native.Arena(), torch.rand(3, 64)
    weight = torch.rand(64)
    with native.Recording(arena) as recording:
        outputs = []
        for _ in range(3):
            outputs.append(native.rms_norm(outputs[-1] if outputs else x, weight, 1e-6))
            recording.turn()
    first, second, third = (output.data_ptr() for output in outputs)
    assert first == third != second
    replay, found = recording.replay(), outputs[-1].clone()
    outputs[-1].zero_()
    replay()
    assert torch.equal(outputs[-1], found)
    x.copy_(torch.rand(3, 64))
    replay()
    assert not torch.equal(outputs[-1], found)


def seed_of(*parts: str) -> int:
    """A seed that is the same in every run."""
    return sum("".join(parts).encode())

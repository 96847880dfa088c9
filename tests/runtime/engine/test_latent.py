"""Latent attention on CPUs: with keys and values expanded for chunks of prompts, beside decodes and short
chunks, as without."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, write_deepseek_v2, write_deepseek_v3
from one_process import whole_model

from runtime import native
from runtime.engine.torch import latent
from runtime.engine.torch.attention import make_attention
from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.attention.cpu import Chunk
from runtime.engine.torch.models.base import DecoderStage
from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.pool import PagedCache

WIDE = {"kv_lora_rank": 120}
"""Latents of 128 with the rotated part, heads of 24, for which kernels of 32 are compiled."""
BLOCK = 4
STEPS = [
    [12, 0, 31, 9],
    [1, 40, 1, 8],
    [1, 1, 7, 2],
    [30, 1, 1, 1],
    [1, 1, 1, 1],
    [2, 1, 25, 60],
]
"""New tokens of each request in each step."""

if not native.serves(torch.float32, torch.device("cpu")):
    assert shutil.which("g++") is None, "installed without compiled kernels, which g++ can build"
    pytest.skip("neither compiled kernels nor a compiler", allow_module_level=True)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Chunk, bool]]:
    """Chunks, and whether their keys and values were expanded."""
    found: list[tuple[Chunk, bool]] = []
    expands = latent.ByKernels._expands

    def noted(self: latent.ByKernels, chunk: Chunk) -> bool:
        found.append((chunk, expands(self, chunk)))
        return found[-1][1]

    monkeypatch.setattr(latent.ByKernels, "_expands", noted)
    return found


@torch.inference_mode()
def outputs(stage: DecoderStage, kv: str) -> torch.Tensor:
    """Logits after each step of each request that has tokens in it; unused memory is not a number."""
    rng = random.Random(17)
    most = [sum(lengths) for lengths in zip(*STEPS, strict=True)]
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in most]
    blocks = [-(-count // BLOCK) for count in most]
    cache = PagedCache(replace(stage.cache_shape, format=kv_format(kv)), sum(blocks), BLOCK)
    if kv == "plain":
        cache.pool.fill_(torch.nan)
    attention, order = make_attention(cache), rng.sample(range(sum(blocks)), sum(blocks))
    tables = [[order.pop() for _ in range(count)] for count in blocks]
    done, found = [0] * len(prompts), []
    for lengths in STEPS:
        some = [number for number, length in enumerate(lengths) if length]
        parts = [prompts[n][done[n] : done[n] + lengths[n]] for n in some]
        starts = [done[n] for n in some]
        batch = Batch.make(attention, parts, starts, [tables[n] for n in some], [True] * len(some))
        logits = stage.logits(stage.forward(batch, None), batch)
        assert logits is not None
        found.append(logits.clone())
        for n in some:
            done[n] += lengths[n]
    return torch.cat(found)


@pytest.mark.parametrize("kv", ["plain", "fp8", "int8"])
@pytest.mark.parametrize("write", [write_deepseek_v2, write_deepseek_v3])
def test_kernels_give_what_operators_do(
    write: type, kv: str, decided: list[tuple[Chunk, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In packed caches, where roundings differ by what other orders of sums change."""
    folder = write(tmp_path / "model", **WIDE)
    found = outputs(whole_model(folder), kv)
    assert {expanded for _, expanded in decided} == {False, True}
    assert any(chunk.offset for chunk, expanded in decided if expanded)
    monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    expected = outputs(whole_model(folder), kv)
    assert found.isfinite().all()
    if kv == "plain":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    else:
        off = (found - expected).abs()
        assert off.median() < 1e-3 and off.mean() < 0.02 * expected.abs().mean()


def test_bfloat16_is_as_exact_expanded(
    decided: list[tuple[Chunk, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_deepseek_v3(tmp_path / "model", **WIDE)
    exact = outputs(whole_model(folder), "plain")
    expanded = outputs(whole_model(folder, "bfloat16"), "plain").float()
    assert any(each for _, each in decided)
    monkeypatch.setattr(latent.ByKernels, "_expands", lambda self, chunk: False)
    absorbed = outputs(whole_model(folder, "bfloat16"), "plain").float()
    assert (expanded - exact).abs().median() < 1.3 * (absorbed - exact).abs().median()


def test_long_contexts_before_few_tokens_are_not_expanded() -> None:
    """Of DeepSeek-V3: the fewest operations, counted one by one."""
    rank, rope, nope, value = 512, 64, 128, 128
    attention = latent.ByKernels.__new__(latent.ByKernels)
    attention._wide, attention._narrow = rank + rope, 192
    sizes = latent.LatentAttention(
        query_rank=None, latent_rank=rank, nope_dim=nope, rope_dim=rope, value_dim=value
    )
    unused = torch.empty(0)
    attention._of = latent.LatentHeads(sizes, 1, unused, unused, None, True, None)  # type: ignore[arg-type]
    for length, offset in [
        (8, 0),
        (8, 100),
        (64, 4000),
        (100, 100),
        (150, 9000),
        (200, 9000),
        (512, 100_000),
    ]:
        pairs = sum(offset + own + 1 for own in range(length))
        own = length * rank * (nope + value)  # of queries and results, or of the chunk's keys and values
        absorbed = own + pairs * 2 * (rank + rope)
        expanded = own + offset * rank * (nope + value) + pairs * 2 * 192
        chunk = Chunk(0, length, offset, None)  # type: ignore[arg-type]
        assert attention._expands(chunk) == (expanded < absorbed)


def test_heads_wider_than_any_kernel_are_not_expanded(
    decided: list[tuple[Chunk, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_deepseek_v3(tmp_path / "model", qk_nope_head_dim=600, v_head_dim=12)
    found = outputs(whole_model(folder), "plain")
    assert decided and not any(expanded for _, expanded in decided)
    monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    torch.testing.assert_close(found, outputs(whole_model(folder), "plain"), rtol=1e-4, atol=1e-4)

"""KV caches in fp8 and int8: logits of every family against transformers whose keys and values are rounded
likewise, and tokens that do not depend on where a KV cache was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYERS, WRITERS, by_transformers, write_deepseek_v2, write_llama
from engine_harness import Cluster, Shape
from one_process import PROMPTS, decoded, run, whole_model
from rounded_cache import ROUNDINGS, RoundedCache
from stage_shapes import replica_cells

from runtime import native
from runtime.protocol.message import Sampling

TOKENS, HEAD_DIM, LATENT = 12, 16, 24 + 8
LONGER = [*PROMPTS, *([n * step % 250 for n in range(1, 40)] for step in (3, 5, 7))]


@pytest.mark.filterwarnings("ignore:`past_key_values`")
@pytest.mark.parametrize("kv", ROUNDINGS)
@pytest.mark.parametrize("family", WRITERS)
def test_logits_are_those_of_rounded_keys_and_values(tmp_path: Path, family: str, kv: str) -> None:
    """Up to values that lie between two codes, which another order of additions may round the other way: what
    that does to logits is small beside what rounding does."""
    folder = WRITERS[family](tmp_path / "model")
    stage, model, rounding = whole_model(folder), by_transformers(folder, torch.float32), ROUNDINGS[kv]
    with torch.inference_mode():
        exact, ours = run(stage, LONGER), run(stage, LONGER, kv=kv)
        caches = [RoundedCache(model.config, rounding) for _ in LONGER]
        outputs = [
            model(torch.tensor([prompt]), past_key_values=cache)
            for prompt, cache in zip(LONGER, caches, strict=True)
        ]
        theirs = torch.stack([output.logits[0, -1] for output in outputs])
    error = (theirs - exact).abs().mean()
    assert error > 1e-3 * exact.abs().mean()
    assert (ours - theirs).abs().mean() < 0.2 * error


@pytest.mark.parametrize("kv", ROUNDINGS)
def test_operators_of_torch_round_as_the_kernels_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """Whether a prompt comes at once or in two steps."""
    folder = write_llama(tmp_path / "model", head_dim=HEAD_DIM)
    with torch.inference_mode():
        by_kernels = run(whole_model(folder), LONGER, kv=kv)
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
        stage = whole_model(folder)
        torch.testing.assert_close(run(stage, LONGER, kv=kv), by_kernels, rtol=0.02, atol=0.02)
        cut = run(stage, LONGER[2:], 30, kv)
        torch.testing.assert_close(cut, by_kernels[2:], rtol=0.02, atol=0.02)


REPLICAS: dict[str, Shape] = {
    "p": [(2, 0, 2), (1, 2, LAYERS)],
    "d": [(1, 0, 3), (2, 3, LAYERS)],
    "whole": [(1, 0, LAYERS)],
}


@pytest.mark.parametrize(
    ("kv", "write", "head_bytes"),
    [("int8", write_llama, 2 * (HEAD_DIM + 4)), ("fp8", write_deepseek_v2, LATENT)],
)
def test_a_kv_cache_is_the_same_wherever_it_was_computed(
    tmp_path: Path, kv: str, write: Any, head_bytes: int
) -> None:
    """Tokens of replicas that prefill and decode, with unlike stages, are those of one that does both; what
    moves is what is stored, scales included."""
    folder = write(tmp_path / "model", **({"head_dim": HEAD_DIM} if write is write_llama else {}))
    heads = whole_model(folder).spec.kv_heads
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    expected = decoded(folder, LONGER, TOKENS, kv)
    routes = [("p", "d"), ("p", "whole"), ("whole", "d"), ("whole", "whole"), ("d", "d")]
    with Cluster(folder, REPLICAS, kv_format=kv, reuse_prefixes=False) as cluster:
        for prefill, decode in routes:
            for number, prompt in enumerate(LONGER):
                cluster.submit(f"{prefill}>{decode}#{number}", prompt, sampling, prefill, decode)
        for prefill, decode in routes:
            for number, prompt in enumerate(LONGER):
                outcome = cluster.finish(f"{prefill}>{decode}#{number}")
                assert outcome.tokens == expected[number], (prefill, decode, number)
                if prefill != decode:
                    assert outcome.moved is not None
                    cells = replica_cells(cluster.stages[decode], heads)
                    assert outcome.moved.bytes_received == len(prompt) * cells * head_bytes

"""The torch engine on a GPU: the same tokens as transformers, together or apart, by every transport."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import LAYERS, VOCAB, WRITERS, greedy
from engine_harness import Cluster, Shape

from cost_model.errors import InputError
from runtime.protocol.from_workers import Failed
from runtime.protocol.message import Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, LENGTHS = 40, (1, 3, 12, 31, 60)
ONE: Shape = [(1, 0, LAYERS)]
CRAMPED = {"block_tokens": 4, "max_prefill_tokens": 24, "max_mixed_tokens": 8, "kv_budget_tokens": 480}


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS for _ in range(2)]


@pytest.mark.parametrize("family", WRITERS)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts in chunks, decodes beside them, replayed decodes, and KV caches that move between processes."""
    folder = WRITERS[family](tmp_path / family)
    expected = greedy(folder, prompts(), TOKENS)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    settings = {"device": "cuda:0", "dtype": "float32", "max_mixed_tokens": 16}
    with Cluster(folder, {"p": ONE, "d": ONE}, **settings) as cluster:
        names = {}
        for target in ("p", "d"):
            for number, prompt in enumerate(prompts()):
                names[target, number] = f"{target} {number}"
                cluster.submit(names[target, number], prompt, sampling, "p", target)
        for (target, number), name in names.items():
            assert cluster.finish(name).tokens == expected[number], (target, number)


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
def test_a_full_cache_and_cancelled_requests(transport: str, tmp_path: Path) -> None:
    """Blocks go to other requests as soon as they are free."""
    folder = WRITERS["llama"](tmp_path / "llama")
    expected = greedy(folder, prompts(), TOKENS)
    settings = {"device": "cuda:0", "dtype": "float32", "kv_transport": transport, "patient": True, **CRAMPED}
    with Cluster(folder, {"p": ONE, "d": ONE}, **settings) as cluster:
        for turn in range(4):
            names = [f"{turn} {number}" for number in range(len(prompts()))]
            for number, (name, prompt) in enumerate(zip(names, prompts(), strict=True)):
                others = Sampling(max_tokens=TOKENS, ignore_eos=True)
                cluster.submit(f"cancelled {name}", prompt, others, "p", "d")
                cluster.submit(name, prompt, others, "p", "d" if number % 2 else "p")
                for replica in ("p", "d"):
                    cluster.cancel(f"cancelled {name}", replica)
            for number, name in enumerate(names):
                assert cluster.finish(name).tokens == expected[number], (turn, number)


def test_a_cache_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """With the sizes, before any request comes."""
    folder = WRITERS["llama"](tmp_path / "llama")
    free = torch.cuda.mem_get_info()[1]
    tokens = 2 * free // (LAYERS * 2 * 4 * 8 * 4)
    cluster = Cluster(folder, {"p": ONE}, device="cuda:0", dtype="float32", kv_budget_tokens=tokens)
    try:
        cluster.spawn(cluster.replicas)
        cluster.connect()
        message = cluster.controls["p/0"].receive()
        assert isinstance(message, Failed)
        assert "GiB" in message.text and InputError.__name__ not in message.text
    finally:
        cluster.kill()

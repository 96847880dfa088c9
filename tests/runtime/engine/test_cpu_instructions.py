"""Processors with other instructions round differently; that changes a token only if two are nearly tied."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, WRITERS
from instructions import needs_avx512

from cost_model.errors import InputError
from runtime.engine.torch.sampling.noise import draw_keys, gumbel, token_hashes
from runtime.launcher.processes import AVX2_ONLY, limit_instructions

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
NEAR = 1e-4
"""Log probabilities differ by less than this; where streams differ, so do those of the two tokens."""


def answers(folder: Path, requests: list[Any], **environment: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    process = subprocess.run(
        [sys.executable, str(SUPPORT / "instruction_tokens.py"), str(folder)],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(process.stdout)


def scores(logprobs: list[float], temperature: float, seed: int, index: int) -> np.ndarray:
    """[vocab] values whose largest the sampler picks."""
    device = torch.device("cpu")
    noise = gumbel(token_hashes(VOCAB, device), draw_keys([(seed, index)], device))[0].numpy()
    return np.array(logprobs) + temperature * noise


@needs_avx512
@pytest.mark.parametrize("family", ["llama", pytest.param("opt", marks=pytest.mark.slow)])
def test_streams_are_equal_up_to_near_ties(family: str, tmp_path: Path) -> None:
    folder, draw = WRITERS[family](tmp_path / family), random.Random(11)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 60))] for _ in range(12)]
    requests = [[prompt, heat, seed] for seed, prompt in enumerate(prompts) for heat in (0.0, 0.8)]
    wide, narrow = answers(folder, requests), answers(folder, requests, **AVX2_ONLY)
    assert wide["capability"] == "AVX512" and narrow["capability"] == "AVX2"
    whole = 0
    for (_, heat, seed), one, other in zip(requests, wide["answers"], narrow["answers"], strict=True):
        pairs = list(zip(one["tokens"], other["tokens"], strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        whole += same == len(pairs)
        shared = slice(0, same + 1)
        assert np.allclose(one["logprobs"][shared], other["logprobs"][shared], rtol=0, atol=NEAR)
        if same < len(pairs):
            found = scores(one["logprobs"][same], heat, seed, same)
            assert abs(found[pairs[same][0]] - found[pairs[same][1]]) < NEAR
    assert whole > 0.9 * len(requests)


def test_processors_that_are_not_x86_refuse_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    before = dict(os.environ)
    limit_instructions("auto")
    with pytest.raises(InputError, match="this processor is aarch64"):
        limit_instructions("avx2")
    assert dict(os.environ) == before

"""A whole model of the torch engine in the test's process, and its logits beside those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from checkpoints import LAYERS, by_transformers

from runtime.engine.rank import Rank
from runtime.engine.torch.attention import make_attention
from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.models import load_stage
from runtime.engine.torch.models.base import DecoderStage
from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.message import StageShape

CPU = torch.device("cpu")
PROMPTS = [[3, 17, 99, 250, 42, 7], [8], [120] * 40]


def whole_model(folder: Path, dtype: str = "auto") -> DecoderStage:
    stages = (StageShape(workers=("w",), first_layer=0, end_layer=LAYERS),)
    return load_stage(str(folder), dtype, CPU, Collectives(Rank.find(stages, "w"), CPU))


def run(stage: DecoderStage, prompts: list[list[int]], cut: int = 0, kv: str = "plain") -> torch.Tensor:
    """Last-token logits [prompts, vocab], with each prompt in two steps: up to token `cut`, and from there
    on. `kv` names the format of the KV cache."""
    blocks = -(-max(map(len, prompts)) // 4)
    shape = replace(stage.cache_shape, format=kv_format(kv))
    attention = make_attention(PagedCache(shape, blocks * len(prompts), 4))
    tables = [list(range(n, blocks * len(prompts), len(prompts))) for n in range(len(prompts))]
    logits = None
    for first, end in ((0, cut), (cut, None)) if cut else ((0, None),):
        parts = [prompt[first:end] for prompt in prompts]
        batch = Batch.make(attention, parts, [first] * len(parts), tables, [True] * len(parts))
        logits = stage.logits(stage.forward(batch, None), batch)
    assert logits is not None
    return logits


def decoded(folder: Path, prompts: list[list[int]], tokens: int, kv: str) -> list[list[int]]:
    """Greedy tokens with a KV cache in this format, each computed from its whole sequence anew."""
    stage, sequences = whole_model(folder), [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        for _ in range(tokens):
            for sequence, logits in zip(sequences, run(stage, sequences, kv=kv), strict=True):
                sequence.append(int(logits.argmax()))
    return [sequence[-tokens:] for sequence in sequences]


def amend(folder: Path, **values: object) -> None:
    """Change values of a checkpoint's config.json, or remove them with None."""
    config = {**json.loads((folder / "config.json").read_text()), **values}
    kept = {key: value for key, value in config.items() if key not in values or value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def reference(folder: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = by_transformers(folder, dtype)
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])

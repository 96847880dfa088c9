"""Models and loader inside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYERS, write_llama, write_opt
from transformers import AutoModelForCausalLM

from cost_model.errors import InputError
from runtime.engine.attention import Batch
from runtime.engine.cache import CacheShape, CacheTable
from runtime.engine.models import load_stage
from runtime.engine.models.base import DecoderStage
from runtime.engine.parallel import Links, Place
from runtime.kv_layout import Part
from runtime.messages import StageShape

CPU = torch.device("cpu")
PROMPTS = [[3, 17, 99, 250, 42, 7], [8], [120] * 40]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "one kv head": {"kv_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 16},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    "llama3": {"rope_parameters": LLAMA3},
}


def whole_model(folder: Path, dtype: str = "auto") -> DecoderStage:
    stages = (StageShape(workers=("w",), first_layer=0, end_layer=LAYERS),)
    return load_stage(str(folder), dtype, CPU, Links(Place.find(stages, "w"), CPU))


def run(stage: DecoderStage, prompts: list[list[int]], cut: int = 0) -> torch.Tensor:
    """Last-token logits [prompts, vocab], each prompt in two steps: before and from token `cut` on."""
    table = CacheTable(CacheShape(stage.part, stage.spec.head_dim, stage.dtype, CPU))
    caches = tuple(table.create(str(n), len(prompt) + 3) for n, prompt in enumerate(prompts))
    logits = None
    for first, end in ((0, cut), (cut, None)) if cut else ((0, None),):
        parts = [prompt[first:end] for prompt in prompts]
        batch = Batch(
            tokens=torch.tensor([token for part in parts for token in part]),
            positions=torch.cat([torch.arange(first, first + len(part)) for part in parts]),
            lengths=tuple(len(part) for part in parts),
            offsets=(first,) * len(parts),
            caches=caches,
        )
        logits = stage.logits(stage.forward(batch, None, lambda layer: None), batch)
    assert logits is not None
    return logits


def reference(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_variants_give_the_reference_logits(tmp_path: Path, variant: str) -> None:
    folder = write_llama(tmp_path / "llama", **VARIANTS[variant])
    with torch.inference_mode():
        torch.testing.assert_close(run(whole_model(folder), PROMPTS), reference(folder, PROMPTS))


def test_opt_gives_the_reference_logits(tmp_path: Path) -> None:
    folder = write_opt(tmp_path / "opt")
    with torch.inference_mode():
        torch.testing.assert_close(
            run(whole_model(folder), PROMPTS), reference(folder, PROMPTS), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("cut", [1, 5])
def test_a_prompt_in_two_pieces_gives_the_same_logits(tmp_path: Path, cut: int) -> None:
    stage = whole_model(write_llama(tmp_path / "llama"))
    prompts = [PROMPTS[0], PROMPTS[2]]
    with torch.inference_mode():
        torch.testing.assert_close(run(stage, prompts, cut), run(stage, prompts))


def test_shards_names_and_types(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    whole = whole_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    sharded = whole_model(tmp_path / "shards")
    assert whole.checkpoint.bytes_read == sharded.checkpoint.bytes_read > 0
    with torch.inference_mode():
        assert torch.equal(run(whole, PROMPTS), run(sharded, PROMPTS))
        half = whole_model(folder, "bfloat16")
        assert half.checkpoint.bytes_read * 2 == whole.checkpoint.bytes_read
        torch.testing.assert_close(run(half, PROMPTS).float(), run(whole, PROMPTS), rtol=0.3, atol=0.3)


def test_names_without_prefix_are_found(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama", tied=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.save_pretrained(tmp_path / "bare")
    with torch.inference_mode():
        assert torch.equal(run(whole_model(tmp_path / "bare"), PROMPTS), run(whole_model(folder), PROMPTS))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_layer_norm_before", False),
        ("word_embed_proj_dim", 32),
        ("activation_function", "gelu"),
        ("num_attention_heads", 0),
        ("hidden_size", "many"),
    ],
)
def test_an_opt_that_is_not_computed_is_refused(tmp_path: Path, key: str, value: object) -> None:
    folder = write_opt(tmp_path / "opt")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(InputError, match=key):
        whole_model(folder)


def test_unknown_rope_and_dtype_name_what_is_known(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    with pytest.raises(InputError, match="float32, float16, bfloat16"):
        whole_model(folder, "int3")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="default, linear, llama3"):
        whole_model(folder)


def test_a_cache_holds_its_part_only() -> None:
    table = CacheTable(CacheShape(Part(3, 5, 2, 4), 8, torch.float32, CPU))
    cache = table.create("r", 10)
    assert cache.layer(4).shape == (2, 2, 10, 8)
    assert cache.heads(3, 3, 4, 6).shape == (2, 1, 6, 8)
    cache.heads(3, 3, 4, 6).fill_(1.0)
    assert cache.layer(3)[:, 1, :6].eq(1).all()
    table.drop("r")
    assert len(table) == 0

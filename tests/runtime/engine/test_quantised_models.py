"""Quantised checkpoints of every format against the same weights in float32 in `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYERS, VOCAB, WRITERS, greedy
from engine_harness import Cluster, Shape
from one_process import PROMPTS, amend, reference, run, whole_model
from quantised import FORMATS, ROUNDED, bytes_of_8, quantise, the_same_in_transformers, without_lowest_code
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from runtime import native
from runtime.protocol.message import Sampling

MODELS = {name: "llama" for name in FORMATS} | {
    "AWQ": "mixtral",
    "GPTQ 8 bits": "qwen2",
    "compressed-tensors int8, zeros": "opt",
    "W8A8, zeros": "qwen2",
    "W8A8, static": "phi3",
    "W8A8, static, zeros": "qwen3",
    "fp8 by blocks": "qwen3",
    "compressed-tensors fp8": "mistral",
    "GPTQ 4 bits": "qwen3_moe",
    "GPTQ 4 bits, desc_act, zeros": "phi3",
    "compressed-tensors int4": "gemma2",
    "compressed-tensors int8": "deepseek_v2",
    "compressed-tensors fp8, per tensor": "gemma3",
    "fp8 by blocks of 128": "deepseek_v3",
}
"""Each format with one family."""


def written(folder: Path, family: str, name: str, **changes: object) -> tuple[Path, Path]:
    """The folders of a quantised model, and of what transformers reads to compute the same: the same weights
    in float32, or, where activations are rounded, too, what rounds them."""
    stored, plain = folder / "quantised", folder / "plain"
    quantise(WRITERS[family](folder / "original", **changes), name, stored, plain)
    return stored, the_same_in_transformers(family, name, stored, plain)


@pytest.fixture(autouse=True)
def codes_without_the_lowest() -> Iterator[None]:
    with without_lowest_code():
        yield


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize(("name", "family"), [*MODELS.items(), *((name, "qwen3_moe") for name in ROUNDED)])
def test_logits_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, family: str, kernel: str
) -> None:
    """Where activations are rounded, a last digit may decide which of two codes one gets: there, the median
    prompt counts, and another may be off by less than what all the rounding changes."""
    if kernel == "torch":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    quantised, plain = written(tmp_path, family, name)
    with torch.inference_mode():
        found, expected = run(whole_model(quantised), PROMPTS), reference(plain, PROMPTS)
        if name in ROUNDED:
            unrounded = reference(tmp_path / "plain", PROMPTS)
            assert (found - expected).abs().max() < (unrounded - expected).abs().max()
            close = (found - expected).abs().amax(1).argsort()[: len(PROMPTS) // 2 + 1]
            found, expected = found[close], expected[close]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


READ_BY_TRANSFORMERS: dict[str, Any] = {
    **{name: CompressedTensorsConfig(dequantize=True) for name in FORMATS if "compressed-tensors" in name},
    "fp8 by blocks": FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 32)),
}
del READ_BY_TRANSFORMERS["compressed-tensors int4, actorder"]  # which it no longer reads


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_these_files_as_the_same_weights(tmp_path: Path, name: str) -> None:
    """So the files of the other tests are what they should be."""
    quantised, plain = written(tmp_path, "llama", name)
    model = AutoModelForCausalLM.from_pretrained(
        quantised, dtype=torch.float32, quantization_config=READ_BY_TRANSFORMERS[name]
    )
    with torch.inference_mode():
        found = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    torch.testing.assert_close(found, reference(plain, PROMPTS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["AWQ", "compressed-tensors int8", "compressed-tensors fp8"])
def test_activations_of_16_bits_are_as_exact_as_in_transformers(tmp_path: Path, name: str) -> None:
    quantised, plain = written(tmp_path, "llama", name)
    prompts = [*PROMPTS, *([(n * step) % VOCAB for n in range(1, 50)] for step in range(1, 8))]
    with torch.inference_mode():
        exact, theirs = reference(plain, prompts), reference(plain, prompts, torch.bfloat16)
        ours = run(whole_model(quantised, "bfloat16"), prompts)
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


def test_formats_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As older versions of Model Optimizer write them."""
    quantised, _ = written(tmp_path, "llama", "Model Optimizer fp8")
    with torch.inference_mode():
        expected = run(whole_model(quantised), PROMPTS)
        amend(quantised, quantization_config=None)
        formats = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
        (quantised / "hf_quant_config.json").write_text(json.dumps(formats))
        assert torch.equal(run(whole_model(quantised), PROMPTS), expected)


def test_a_quantised_head(tmp_path: Path) -> None:
    """Its outputs are not those of whole words."""
    quantised, plain = written(tmp_path, "llama", "compressed-tensors int8")
    for folder in (quantised, plain):
        tensors = load_file(folder / "model.safetensors")
        parts, value = bytes_of_8(tensors.pop("lm_head.weight"), symmetric=True)
        stored = {f"lm_head.{suffix}": part for suffix, part in parts.items()}
        tensors |= {"lm_head.weight": value} if folder == plain else stored
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        found, expected = run(whole_model(quantised), PROMPTS), reference(plain, PROMPTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_fused_matrix_may_be_plain(tmp_path: Path) -> None:
    """Of query, key and value, as where a config excludes some names."""
    quantised, plain = written(tmp_path, "qwen2", "AWQ")
    weights, tensors = (load_file(folder / "model.safetensors") for folder in (plain, quantised))
    for name in ("model.layers.1.self_attn.k_proj", "model.layers.2.mlp.gate_proj"):
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[f"{name}.{suffix}"]
        tensors[f"{name}.weight"] = weights[f"{name}.weight"]
    save_file(tensors, quantised / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        found, expected = run(whole_model(quantised), PROMPTS), reference(plain, PROMPTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SHAPES: dict[str, Shape] = {"tp2-tp1": [(2, 0, 2), (1, 2, LAYERS)], "pp2": [(1, 0, 3), (1, 3, LAYERS)]}
TOKENS = 24


@pytest.mark.parametrize(
    ("name", "family", "changes"),
    [
        ("AWQ", "mixtral", {}),
        ("GPTQ 4 bits, desc_act, zeros", "qwen2", {}),
        ("fp8 by blocks", "llama", {}),
        ("W8A8", "llama", {}),
        ("W8A8, zeros", "gemma2", {}),
        ("W8A8", "qwen3_moe", {}),
        ("W8A8, zeros", "mixtral", {"num_local_experts": 3}),  # whose widths two ranks divide
    ],
)
def test_replicas_of_any_shape_give_the_tokens_of_transformers(
    tmp_path: Path, name: str, family: str, changes: dict[str, object]
) -> None:
    """Colocated, and with the KV cache moved between uneven pipelines."""
    quantised, plain = written(tmp_path, family, name, **changes)
    expected = greedy(plain, PROMPTS, TOKENS)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    with Cluster(quantised, SHAPES) as cluster:
        for source, target in product(SHAPES, SHAPES):
            for number, prompt in enumerate(PROMPTS):
                cluster.submit(f"{source}>{target}#{number}", prompt, sampling, source, target)
        for source, target in product(SHAPES, SHAPES):
            for number, tokens in enumerate(expected):
                outcome = cluster.finish(f"{source}>{target}#{number}")
                assert outcome.tokens == tokens, (source, target, number)

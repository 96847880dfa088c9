"""Models and the loader inside one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    LAYERS,
    VOCAB,
    WRITERS,
    write_deepseek_v2,
    write_deepseek_v3,
    write_gemma2,
    write_gemma3,
    write_gpt_oss,
    write_gpt_oss_mxfp4,
    write_llama,
    write_mistral,
    write_mixtral,
    write_opt,
    write_phi3,
    write_qwen2,
    write_qwen3,
    write_qwen3_moe,
)
from one_process import CPU, PROMPTS, amend, reference, run, whole_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cost_model.config import architecture_from_folder
from cost_model.errors import InputError
from runtime import native
from runtime.engine.torch import linear
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import CacheShape, PagedCache

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK_YARN = {
    **YARN,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
    "beta_fast": 8,
    "beta_slow": 2,
    "truncate": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [9.0] * 4,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (write_llama, {}),
    "llama, tied": (write_llama, {"tied": True}),
    "llama, one kv head": (write_llama, {"kv_heads": 1}),
    "llama, biases": (write_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": (write_llama, {"head_dim": 16}),
    "llama, linear": (
        write_llama,
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 9.0}},
    ),
    "llama, llama3": (write_llama, {"rope_parameters": LLAMA3}),
    "llama, yarn": (write_llama, {"rope_parameters": YARN, "head_dim": 32}),
    "llama, yarn with mscale": (write_llama, {"rope_parameters": DEEPSEEK_YARN, "head_dim": 32}),
    "llama, yarn with factor": (write_llama, {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "deepseek_v2": (write_deepseek_v2, {}),
    "deepseek_v2, lite": (
        write_deepseek_v2,
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.1},
        },
    ),
    "deepseek_v3": (write_deepseek_v3, {}),
    "deepseek_v3, direct queries": (
        write_deepseek_v3,
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "n_shared_experts": 2},
    ),
    "deepseek_v3, wide latents": (write_deepseek_v3, {"kv_lora_rank": 120}),
    "deepseek_v3, yarn": (
        write_deepseek_v3,
        {"rope_parameters": DEEPSEEK_YARN, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "gemma2": (write_gemma2, {}),
    "gemma2, tied": (write_gemma2, {"tied": True, "attn_logit_softcapping": None}),
    "gemma2, no cap": (write_gemma2, {"final_logit_softcapping": None, "sliding_window": 1}),
    "gemma3": (write_gemma3, {}),
    "gemma3, scaled": (
        write_gemma3,
        {
            "tied": True,
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            },
        },
    ),
    "gpt_oss": (write_gpt_oss, {}),
    "gpt_oss, mxfp4": (write_gpt_oss_mxfp4, {}),
    "gpt_oss, all": (
        write_gpt_oss,
        {"num_experts_per_tok": 4, "attention_bias": False, "tied": True, "swiglu_alpha": 1.0},
    ),
    "mistral": (write_mistral, {}),
    "mistral, no window": (write_mistral, {"sliding_window": None}),
    "mistral, window of one": (write_mistral, {"sliding_window": 1}),
    "phi3": (write_phi3, {}),
    "phi3, window": (write_phi3, {"sliding_window": 7, "tied": True}),
    "phi3, longrope": (
        write_phi3,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "qwen2": (write_qwen2, {}),
    "qwen2, no window": (write_qwen2, {"use_sliding_window": False}),
    "qwen2, yarn": (write_qwen2, {"rope_parameters": YARN, "tied": True}),
    "qwen2, layer types": (
        write_qwen2,
        {"layer_types": 2 * ["sliding_attention", "full_attention"] + ["full_attention"]},
    ),
    "qwen3": (write_qwen3, {}),
    "qwen3, tied": (write_qwen3, {"tied": True, "attention_bias": True}),
    "qwen3, window": (write_qwen3, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3_moe": (write_qwen3_moe, {}),
    "qwen3_moe, other layers": (
        write_qwen3_moe,
        {"mlp_only_layers": None, "decoder_sparse_step": 2, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen3_moe, window": (write_qwen3_moe, {"use_sliding_window": True, "sliding_window": 5}),
    "mixtral": (write_mixtral, {}),
    "mixtral, one of three": (write_mixtral, {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "mixtral, all": (write_mixtral, {"num_experts_per_tok": 4, "sliding_window": 11}),
    "opt": (write_opt, {}),
}


@pytest.fixture(autouse=True)
def packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack weights as for models of a realistic size; workers of other tests keep their small matrices
    plain."""
    monkeypatch.setattr(linear, "_SMALL", 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_reference_logits(tmp_path: Path, variant: str) -> None:
    write, overrides = VARIANTS[variant]
    folder = write(tmp_path / "model", **overrides)
    stage = whole_model(folder)
    with torch.inference_mode():
        torch.testing.assert_close(run(stage, PROMPTS), reference(folder, PROMPTS), rtol=1e-4, atol=1e-4)
        for cut in (1, 5, 39):
            prompts = [prompt for prompt in PROMPTS if len(prompt) > cut]
            torch.testing.assert_close(run(stage, prompts, cut), run(stage, prompts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", WRITERS)
def test_the_cost_model_counts_what_the_engine_loads(tmp_path: Path, family: str) -> None:
    folder = WRITERS[family](tmp_path / "model")
    architecture, stage = architecture_from_folder(folder), whole_model(folder)
    assert stage.checkpoint.bytes_read == 4 * architecture.total_params
    cells = stage.cache_shape.part.cells * stage.cache_shape.bytes_per_token_cell
    assert cells == architecture.kv_bytes_per_token


def test_packed_experts_have_the_bytes_that_the_cost_model_counts(tmp_path: Path) -> None:
    folder = write_gpt_oss_mxfp4(tmp_path / "model")
    assert whole_model(folder).checkpoint.bytes_read == architecture_from_folder(folder).total_bytes


@pytest.mark.parametrize(
    ("write", "overrides", "window", "full_layers"),
    [
        (write_llama, {}, None, ()),
        (write_mistral, {}, 9, ()),
        (write_mistral, {"sliding_window": None}, None, ()),
        (write_qwen2, {"max_window_layers": 0}, 9, ()),
        (write_qwen2, {}, 9, (0, 1)),
        (write_qwen3, {}, None, ()),
    ],
)
def test_the_cost_model_knows_the_windows_of_all_layers(
    tmp_path: Path,
    write: Callable[..., Path],
    overrides: dict[str, Any],
    window: int | None,
    full_layers: tuple[int, ...],
) -> None:
    folder = write(tmp_path / "model", **overrides)
    for amended in ({}, {"layer_types": None}):
        amend(folder, **amended)
        found = architecture_from_folder(folder)
        assert (found.sliding_window, found.full_attention_layers) == (window, full_layers)


@pytest.mark.parametrize("family", WRITERS)
def test_half_precision_is_as_exact_as_in_transformers(tmp_path: Path, family: str) -> None:
    folder = WRITERS[family](tmp_path / "model")
    prompts = [*PROMPTS, *([(n * step) % VOCAB for n in range(1, 50)] for step in range(1, 8))]
    with torch.inference_mode():
        exact = reference(folder, prompts)
        theirs = reference(folder, prompts, torch.bfloat16)
        ours = run(whole_model(folder, "bfloat16"), prompts)
    # Medians, since a router that chooses another expert by its last digit changes all of a token.
    assert (ours - exact).abs().median() < 1.3 * (theirs - exact).abs().median()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", WRITERS)
def test_every_family_runs_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """As on a machine that has no compiler."""
    monkeypatch.setattr(native.library, "loaded", lambda: None)
    folder, each = WRITERS[family](tmp_path / "model"), getattr(torch, dtype)
    prompts = [*PROMPTS, *([(n * step) % VOCAB for n in range(1, 50)] for step in range(1, 8))]
    with torch.inference_mode():
        exact, ours = reference(folder, prompts), run(whole_model(folder, dtype), prompts)
        if dtype == "float32":
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)
        else:
            theirs = reference(folder, prompts, each)
            assert (ours - exact).abs().median() < 1.3 * (theirs - exact).abs().median()


OPTIONAL = (
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "norm_topk_prob",
)


@pytest.mark.parametrize("family", sorted(set(WRITERS) - {"opt"}))
def test_what_a_file_leaves_out_is_the_familys_default(tmp_path: Path, family: str) -> None:
    folder = WRITERS[family](tmp_path / "model")
    amend(folder, **dict.fromkeys(OPTIONAL))
    with torch.inference_mode():
        torch.testing.assert_close(
            run(whole_model(folder), PROMPTS), reference(folder, PROMPTS), rtol=1e-4, atol=1e-4
        )


def test_longrope_limits_sequences_to_the_trained_length(tmp_path: Path) -> None:
    folder = write_phi3(tmp_path / "model", rope_parameters=LONGROPE, original_max_position_embeddings=128)
    assert whole_model(folder).spec.position_limit == 128
    expected = reference(folder, PROMPTS)
    old = {"type": "su", "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"]}
    amend(folder, rope_parameters=None, rope_theta=500.0, rope_scaling=old)
    with torch.inference_mode():
        torch.testing.assert_close(run(whole_model(folder), PROMPTS), expected)
    for partial in (0.4, 2.0, "half"):
        amend(folder, partial_rotary_factor=partial)
        with pytest.raises(InputError, match="partial_rotary_factor"):
            whole_model(folder)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    folder = write_deepseek_v3(tmp_path / "model", n_group=1, topk_group=1)
    expected = reference(folder, PROMPTS)
    amend(folder, model_type="kimi_k2")
    with torch.inference_mode():
        torch.testing.assert_close(run(whole_model(folder), PROMPTS), expected, rtol=1e-4, atol=1e-4)


def test_scaling_in_the_words_of_older_files(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    amend(folder, rope_parameters=None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    with torch.inference_mode():
        torch.testing.assert_close(run(whole_model(folder), PROMPTS), reference(folder, PROMPTS))


def test_a_file_that_names_no_layer_types_means_the_same_windows(tmp_path: Path) -> None:
    folder = write_qwen2(tmp_path / "model")
    named = whole_model(folder)
    amend(folder, layer_types=None)
    with torch.inference_mode():
        assert torch.equal(run(whole_model(folder), PROMPTS), run(named, PROMPTS))


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


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    folder = write_gemma3(tmp_path / "model")
    expected = reference(folder, PROMPTS)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.weight": torch.ones(3)}, folder / "model.safetensors")
    with torch.inference_mode():
        torch.testing.assert_close(run(whole_model(folder), PROMPTS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("opt", "do_layer_norm_before", False),
        ("opt", "word_embed_proj_dim", 32),
        ("opt", "activation_function", "gelu"),
        ("opt", "num_attention_heads", 0),
        ("opt", "hidden_size", "many"),
        ("llama", "hidden_act", "gelu"),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt_oss", "quantization_config", {"quant_method": "awq"}),
        ("gpt_oss", "quantization_config", "mxfp8"),
        ("llama", "num_key_value_heads", 3),
        ("llama", "head_dim", 7),
        ("llama", "model_type", "gemma"),
        ("llama", "model_type", ["llama"]),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("llama", "rope_parameters", {"rope_type": "linear"}),
        ("llama", "rope_parameters", {"rope_type": "linear", "factor": "x"}),
        ("llama", "rope_parameters", {"rope_type": "longrope"}),
        ("mistral", "layer_types", ["full_attention"] * LAYERS),
        ("phi3", "rope_parameters", {"rope_type": "longrope", "short_factor": [1.0]}),
        ("mistral", "sliding_window", -1),
        ("mistral", "num_key_value_heads", None),
        ("qwen2", "layer_types", ["full_attention"]),
        ("qwen3", "layer_types", ["sliding_attention"] * LAYERS),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "kv_lora_rank", None),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "attn_logit_softcapping", -1.0),
        ("gemma3", "layer_types", ["chunked_attention"] * LAYERS),
        ("gemma3", "rope_parameters", {"sliding_attention": {"rope_type": "odd"}}),
        ("mixtral", "num_experts_per_tok", 5),
        ("mixtral", "num_local_experts", None),
        ("qwen3_moe", "num_experts_per_tok", 7),
        ("qwen3_moe", "mlp_only_layers", 3),
    ],
)
def test_a_config_that_is_not_computed_is_refused(
    tmp_path: Path, family: str, key: str, value: object
) -> None:
    folder = WRITERS[family](tmp_path / "model")
    amend(folder, **{key: value})
    with pytest.raises(InputError, match=key.replace("rope_parameters", "rope_(parameters|scaling)")):
        whole_model(folder)


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"{name}.*I8"):
        whole_model(folder)


def test_unknown_rope_and_dtype_name_what_is_known(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    with pytest.raises(InputError, match="float32, float16, bfloat16"):
        whole_model(folder, "int3")
    amend(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(InputError, match="default, linear, llama3, longrope, yarn"):
        whole_model(folder)


def test_a_cache_holds_its_part_only() -> None:
    cache = PagedCache(CacheShape(Part(3, 5, 2, 4), 8, torch.float32, CPU), 3, 4)
    assert cache.layer(4).shape == (2, 12, 2, 8)
    cache.pool.fill_(0.0)
    cache.layer(3)[:, :, 1].fill_(1.0)
    assert cache.pool[0, :, :, 1].eq(1).all()
    assert cache.pool.sum() == 2 * 12 * 8

"""Tiny random checkpoints in Hugging Face's format, and the tokens that transformers generates from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from quantised import round_inputs
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

VOCAB = 251  # odd, so that no tensor-parallel degree splits it evenly
LAYERS = 5
EXPANDED = "expanded"
"""A folder beside quantised weights, with the same in a format that transformers runs here."""


def write_llama(folder: Path, **overrides: object) -> Path:
    """A Llama with grouped-query attention: 5 layers, hidden 64, 8 heads of 8, 4 of them for keys."""
    return _write(LlamaForCausalLM, LlamaConfig, folder, **overrides)


def write_mistral(folder: Path, **overrides: object) -> Path:
    """The Llama with a sliding window of 9 tokens."""
    return _write(MistralForCausalLM, MistralConfig, folder, **{"sliding_window": 9, **overrides})


def write_mixtral(folder: Path, **overrides: object) -> Path:
    """The Llama with 4 experts, 2 of them for each token, and no window."""
    return _write(MixtralForCausalLM, MixtralConfig, folder, **{"num_local_experts": 4, **overrides})


def write_qwen2(folder: Path, **overrides: object) -> Path:
    """The Llama with a sliding window of 9 tokens from layer 2 on."""
    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    return _write(Qwen2ForCausalLM, Qwen2Config, folder, **{**windows, **overrides})


def write_qwen3(folder: Path, **overrides: object) -> Path:
    """The Llama with heads of 16, and no window."""
    return _write(Qwen3ForCausalLM, Qwen3Config, folder, **{"head_dim": 16, **overrides})


def write_qwen3_moe(folder: Path, **overrides: object) -> Path:
    """The Qwen 3 with 6 experts of width 48, 2 of them for each token, in all layers but one."""
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
    }
    return _write(Qwen3MoeForCausalLM, Qwen3MoeConfig, folder, **{"head_dim": 16, **experts, **overrides})


def write_gemma2(folder: Path, **overrides: object) -> Path:
    """The Llama with heads of 16, windows of 9 tokens in layers 0, 2 and 4, and caps that squeeze much."""
    windows = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 12.0}
    return _write(Gemma2ForCausalLM, Gemma2Config, folder, **{**windows, **caps, **overrides})


def write_gemma3(folder: Path, **overrides: object) -> Path:
    """The Llama with heads of 16, and windows of 9 tokens in all layers but layer 2."""
    windows = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3}
    return _write(Gemma3ForCausalLM, Gemma3TextConfig, folder, **{**windows, **overrides})


def write_phi3(folder: Path, **overrides: object) -> Path:
    """The Llama with query, key and value in one matrix, gate and up in another; three of four values of a
    head are rotated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return _write(
        Phi3ForCausalLM, Phi3Config, folder, **{"rope_parameters": rope, "pad_token_id": 0, **overrides}
    )


def write_gpt_oss(folder: Path, **overrides: object) -> Path:
    """The Llama with 4 experts, 2 of them for each token, sinks, and windows of 9 tokens in layers 0, 2 and
    4; the experts' gates and ups are clamped often."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 2.0}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 32}
    sizes = {"head_dim": 16, "sliding_window": 9, "rope_parameters": rope}
    return _write(GptOssForCausalLM, GptOssConfig, folder, **{**experts, **sizes, **overrides})


def write_gpt_oss_mxfp4(folder: Path) -> Path:
    """The gpt-oss with random experts in mxfp4, and the same ones in 16 bits in the folder "expanded"."""
    into_mxfp4(write_gpt_oss(folder / EXPANDED), folder)
    return folder


def into_mxfp4(plain: Path, into: Path) -> None:
    """Write a gpt-oss with random experts in mxfp4, and replace those of the plain one by the same."""
    tensors = load_file(plain / "model.safetensors")
    packed, generator = dict(tensors), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        size = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 126, size, generator=generator).to(torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, into / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}
    (into / "config.json").write_text(json.dumps(config))


def write_deepseek_v2(folder: Path, **overrides: object) -> Path:
    """The DeepSeek-V3 below in the words of DeepSeek-V2, with experts in all layers."""
    latent = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    heads = {"qk_nope_head_dim": 16, "v_head_dim": 12, "kv_heads": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    experts |= {"moe_intermediate_size": 48, "topk_method": "group_limited_greedy"}
    return _write(
        DeepseekV2ForCausalLM, DeepseekV2Config, folder, **{**latent, **heads, **experts, **overrides}
    )


def write_deepseek_v3(folder: Path, **overrides: object) -> Path:
    """The Llama with latents of 24 and rotated keys of 8; 8 experts in 4 groups, 3 of them from 2 groups for
    each token, and a shared one, in all layers but the first."""
    latent = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
    heads = {"qk_nope_head_dim": 16, "v_head_dim": 12, "kv_heads": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    experts |= {"moe_intermediate_size": 48, "first_k_dense_replace": 1}
    return _write(
        DeepseekV3ForCausalLM, DeepseekV3Config, folder, **{**latent, **heads, **experts, **overrides}
    )


def write_opt(folder: Path, head_dim: int = 8) -> Path:
    """An OPT: 5 layers, hidden 64, heads of head_dim, tied head."""
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=64 // head_dim,
        word_embed_proj_dim=64,
        max_position_embeddings=512,
        init_std=0.3,
        dtype="float32",
    )
    return _save(OPTForCausalLM, config, folder)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "deepseek_v2": write_deepseek_v2,
    "deepseek_v3": write_deepseek_v3,
    "gemma2": write_gemma2,
    "gemma3": write_gemma3,
    "gpt_oss": write_gpt_oss,
    "llama": write_llama,
    "mistral": write_mistral,
    "mixtral": write_mixtral,
    "opt": write_opt,
    "phi3": write_phi3,
    "qwen2": write_qwen2,
    "qwen3": write_qwen3,
    "qwen3_moe": write_qwen3_moe,
}


def by_transformers(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A checkpoint's model in transformers, with weights of this type."""
    readable = folder / EXPANDED if (folder / EXPANDED).exists() else folder
    model = AutoModelForCausalLM.from_pretrained(readable, dtype=dtype, experts_implementation="eager")
    round_inputs(model, readable)
    return model


@torch.inference_mode()
def greedy(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt, by transformers in float32, without early stopping."""
    model = by_transformers(folder, torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def _write(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    folder: Path,
    *,
    kv_heads: int = 4,
    tied: bool = False,
    **overrides: object,
) -> Path:
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        dtype="float32",
        **overrides,
    )
    return _save(model_class, config, folder)


def _save(model_class: type[PreTrainedModel], config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(7)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("sinks"):
                parameter.normal_()
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.1)
            elif "embed_tokens" in name and config.tie_word_embeddings:
                parameter.normal_(std=0.02)  # otherwise a tied head would repeat the last token forever
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder

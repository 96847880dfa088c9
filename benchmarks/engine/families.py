"""Random checkpoints of several families, of some 60 to 250 million parameters, to time engines with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 8192
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 384}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 256},
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "num_experts": 16, **_EXPERTS},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768},
    "gpt_oss": {
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 384,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
    },
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 256},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 256},
    "phi3": {},
    "opt": {"ffn_dim": 3072, "word_embed_proj_dim": 768, "do_layer_norm_before": True},
    "deepseek_v3": {
        "num_key_value_heads": 12,
        "q_lora_rank": 384,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
}
"""What each family's config has beside, or instead of, what all have: 12 layers of 768."""


def make_model(folder: Path, family: str = "llama") -> None:
    """Write a random checkpoint in float32 (KeyError: unknown family)."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family]}, dtype="float32")
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.01)
    model.save_pretrained(folder)

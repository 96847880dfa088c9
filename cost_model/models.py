"""The models that ship by name, as the facts of their published config.json files."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

from cost_model.architecture import ModelArchitecture
from cost_model.config import architecture_from_config, architecture_from_folder
from cost_model.errors import InputError


def _decoder(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, position: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": position,
        **more,
    }


def _moe(kind: str, experts: int, active: int, *sizes: int, **more: Any) -> dict[str, Any]:
    """A mixture of experts; sizes as of _decoder, of which ffn is that of an expert."""
    counts = {"num_local_experts": experts, "num_experts_per_tok": active}
    return _decoder(*sizes) | {"model_type": kind} | counts | more


def _qwen3_moe(layers: int, hidden: int, heads: int, expert_ffn: int) -> dict[str, Any]:
    return _decoder(
        layers,
        hidden,
        heads,
        4,
        3 * hidden,
        151936,
        40960,
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_ffn,
    )


def _deepseek(heads: int, experts: int, dense_layers: int, vocab: int, position: int) -> dict[str, Any]:
    """DeepSeek-V3 and the Kimi K2 models, which differ in these sizes only."""
    return _decoder(
        61,
        7168,
        heads,
        heads,
        18432,
        vocab,
        position,
        model_type="deepseek_v3",
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=experts,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=dense_layers,
    )


def _gemma2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int) -> dict[str, Any]:
    return _decoder(
        layers, hidden, heads, kv_heads, ffn, 256000, 8192, model_type="gemma2", head_dim=head_dim
    )


def _opt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


_BLOOM_176B = {
    "model_type": "bloom",
    "n_layer": 70,
    "hidden_size": 14336,
    "n_head": 112,
    "vocab_size": 250880,
    "seq_length": 2048,
}

# Qwen-72B and InternLM-20B have model types of their own; by shape they are Qwen 2 (biases on q, k and v
# only) and Llama. Qwen-72B's published intermediate_size of 49152 is both halves of its gated block.
SHIPPED: dict[str, dict[str, Any]] = {
    "llama-2-7b": _decoder(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _decoder(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _decoder(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-30b": _decoder(60, 6656, 52, 52, 17920, 32000, 2048),
    "llama-3-8b": _decoder(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _decoder(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": _decoder(32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _decoder(80, 8192, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _decoder(126, 16384, 128, 8, 53248, 128256, 131072),
    "codellama-34b": _decoder(48, 8192, 64, 8, 22016, 32000, 16384),
    "internlm-20b": _decoder(60, 5120, 40, 40, 13824, 103168, 4096),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "bloom-176b": _BLOOM_176B,
    "qwen-72b": _decoder(80, 8192, 64, 64, 24576, 152064, 32768, model_type="qwen2"),
    "qwen3-8b": _decoder(36, 4096, 32, 8, 12288, 151936, 40960, model_type="qwen3", head_dim=128),
    "qwen3-32b": _decoder(64, 5120, 64, 8, 25600, 151936, 40960, model_type="qwen3", head_dim=128),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
    # Version 0.3, without the sliding window of 0.1.
    "mistral-7b": _decoder(32, 4096, 32, 8, 14336, 32768, 32768, model_type="mistral", sliding_window=None),
    "mixtral-8x7b": _moe("mixtral", 8, 2, 32, 4096, 32, 8, 14336, 32000, 32768),
    "mixtral-8x22b": _moe("mixtral", 8, 2, 56, 6144, 48, 8, 16384, 32000, 65536),
    "phi-4": _decoder(40, 5120, 40, 10, 17920, 100352, 16384, model_type="phi3"),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14336, 256),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 36864, 128),
    # The text part, without the 0.4 B of the vision tower.
    "gemma-3-27b": _decoder(
        62,
        5376,
        32,
        16,
        21504,
        262208,
        131072,
        model_type="gemma3_text",
        head_dim=128,
        sliding_window=1024,
    ),
    "gpt-oss-20b": _moe("gpt_oss", 32, 4, 24, 2880, 64, 8, 2880, 201088, 131072, head_dim=64),
    "gpt-oss-120b": _moe("gpt_oss", 128, 4, 36, 2880, 64, 8, 2880, 201088, 131072, head_dim=64),
    "minimax-m2.5": _moe("minimax_m2", 256, 8, 62, 3072, 48, 8, 1536, 200064, 196608, head_dim=128),
    "deepseek-v3": _deepseek(128, 256, 3, 129280, 163840),
    "deepseek-r1": _deepseek(128, 256, 3, 129280, 163840),
    "kimi-k2.5": _deepseek(64, 384, 1, 163840, 262144),
    "deepseek-r1-distill-qwen-14b": _decoder(48, 5120, 40, 8, 13824, 152064, 131072, model_type="qwen2"),
}

_ALIASES = {"llama1-30b": "llama-30b", "llama-33b": "llama-30b", "bloom": "bloom-176b"}
_SUFFIXES = re.compile(r"(?:[-_. ](?:hf|chat|instruct|it|base|v0(?:\.\d+)+))+$")


def _loose(name: str) -> str:
    """Letters and digits of a name without its organisation, "meta" and suffixes such as -chat-hf."""
    bare = name.strip().lower().rstrip("/").rpartition("/")[2].removeprefix("meta-")
    return re.sub(r"[^a-z0-9]", "", _SUFFIXES.sub("", bare))


@cache
def shipped_model(name: str) -> ModelArchitecture:
    """The shipped model of exactly that name (KeyError if there is none)."""
    return architecture_from_config(SHIPPED[name], name, "shipped models")


def find_model(model: str | Path | ModelArchitecture) -> ModelArchitecture:
    """The model of a folder with a Hugging Face config.json, or a shipped model by a loosely spelled name.

    Case, dashes, underscores, dots, the organisation ("meta-llama/") and the suffixes -hf, -chat,
    -instruct, -base and -v0.1 do not matter. An architecture is returned as it is.

    Raises
    ------
    InputError : neither; with the nearest known name
    """
    if isinstance(model, ModelArchitecture):
        return model
    path, name_or_dir = Path(model), str(model)
    try:
        has_config = (path / "config.json").is_file() or (path.name == "config.json" and path.is_file())
        is_folder = path.is_dir()
    except OSError:
        has_config = is_folder = False
    if has_config and name_or_dir:
        return architecture_from_folder(path)
    known = {_loose(name): name for name in SHIPPED} | {_loose(alias): n for alias, n in _ALIASES.items()}
    wanted = _loose(name_or_dir)
    if wanted in known:
        return shipped_model(known[wanted])
    if is_folder and name_or_dir:
        raise InputError(name_or_dir, "config.json", "is missing", "name a folder with a Hugging Face model")
    near = difflib.get_close_matches(wanted[:100], known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]]}?" if near else f"shipped: {', '.join(SHIPPED)}"
    raise InputError(
        name_or_dir or "''", "", "is neither a shipped model nor a folder with a config.json", hint
    )

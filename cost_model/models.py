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
    "codellama-34b": _decoder(48, 8192, 64, 8, 22016, 32000, 16384),
    "internlm-20b": _decoder(60, 5120, 40, 40, 13824, 103168, 4096),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "bloom-176b": _BLOOM_176B,
    "qwen-72b": _decoder(80, 8192, 64, 64, 24576, 152064, 32768, model_type="qwen2"),
    "qwen3-32b": _decoder(64, 5120, 64, 8, 25600, 151936, 40960, model_type="qwen3", head_dim=128),
    "mixtral-8x7b": _decoder(
        32,
        4096,
        32,
        8,
        14336,
        32000,
        32768,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "deepseek-r1-distill-qwen-14b": _decoder(48, 5120, 40, 8, 13824, 152064, 131072, model_type="qwen2"),
}

_ALIASES = {"llama1-30b": "llama-30b", "llama-33b": "llama-30b", "bloom": "bloom-176b"}
_SUFFIXES = re.compile(r"(?:[-_. ](?:hf|chat|instruct|it|base|v\d+(?:\.\d+)*))+$")


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

"""Read a model's shape from a Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.architecture import Family, ModelArchitecture, WeightType
from cost_model.dtypes import WEIGHT_BYTES
from cost_model.errors import InputError
from cost_model.fields import checked_name
from cost_model.files import read_text
from cost_model.quantization import quantised_weights

_MAX_CONFIG_BYTES = 1 << 20
_LARGEST = 10**7

_DTYPES: dict[str, WeightType] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "opt": "opt",
    "bloom": "bloom",
}
_KV_HEADS_DEFAULT_TO_HEADS = {"llama", "opt", "bloom"}


@dataclass(frozen=True)
class _Config:
    """The raw keys, read with the errors that a user can act on."""

    raw: dict[str, Any]
    source: str

    def error(self, key: str, problem: str, remedy: str) -> InputError:
        """An error about a key of this file."""
        return InputError(self.source, key, problem, remedy)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is there, as a positive integer."""
        key = next((k for k in keys if self.raw.get(k) is not None), None)
        if key is None:
            if default is not None:
                return default
            raise self.error(keys[0], "is missing", "take the config.json of the model's own folder")
        value = self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            raise self.error(key, f"is {_shown(value)}", f"it must be a whole number from 1 to {_LARGEST}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}", "it must be true or false")
        return value

    def refuse(self, key: str, unwanted: bool) -> None:
        """A variant that the counts and the engines do not cover."""
        if self.flag(key, not unwanted) == unwanted:
            raise self.error(key, f"{str(unwanted).lower()} is not supported", "choose another model")


def architecture_from_folder(path: Path) -> ModelArchitecture:
    """The shape of the model in a folder with a config.json (or of that file itself), named after the folder.

    Raises
    ------
    InputError : no readable config.json, or one that `architecture_from_config` refuses
    """
    file = path / "config.json" if path.is_dir() else path
    source = str(file)
    text = read_text(file, _MAX_CONFIG_BYTES)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(source, f"line {error.lineno}", f"is not JSON ({error.msg})", "correct it") from None
    except (RecursionError, ValueError):
        raise InputError(source, "", "is not a model's config", "take the model's own config.json") from None
    if not isinstance(config, dict):
        raise InputError(source, "", "is not a JSON object", "take the model's own config.json")
    name = checked_name(file.resolve().parent.name, source, remedy="rename the folder")
    return architecture_from_config(config, name or "model", source)


def architecture_from_config(config: dict[str, Any], name: str, source: str) -> ModelArchitecture:
    """The shape that a Hugging Face config describes.

    Parameters
    ----------
    config : the keys of config.json; model_type is one of llama, mistral, qwen2, qwen3, mixtral, opt, bloom
    name : what to call the model
    source : the file, for errors

    Raises
    ------
    InputError : unknown model_type or dtype; a key missing or not a positive whole number; heads that do not
        divide; an unknown quantisation, post-norm OPT or biased Llama, which nothing here models
    """
    reader = _Config(config, source)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        near = difflib.get_close_matches(str(kind)[:100], _FAMILIES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        problem = "is missing" if kind is None else f"{_shown(kind)} is not known"
        raise reader.error("model_type", problem, f"{hint}known: {known}")

    hidden = reader.integer("hidden_size", "n_embed")
    heads = reader.integer("num_attention_heads", "n_head")
    default_kv = heads if kind in _KV_HEADS_DEFAULT_TO_HEADS else None
    kv_heads = reader.integer("num_key_value_heads", default=default_kv)
    if heads % kv_heads:
        raise reader.error(
            "num_key_value_heads", f"{kv_heads} does not divide {heads} heads", "correct one of them"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise reader.error("hidden_size", f"{hidden} does not divide by {heads} heads", "give head_dim")
    dtype = _dtype(reader)
    width = WEIGHT_BYTES[dtype]
    shape: dict[str, Any] = {
        "name": name,
        "family": _FAMILIES[kind],
        "layers": reader.integer("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": reader.integer("head_dim", default=hidden // heads or 1),
        "vocab": reader.integer("vocab_size"),
        "tied_embeddings": reader.flag("tie_word_embeddings", default=kind in {"opt", "bloom"}),
        "weight_type": dtype,
        "weight_bytes": width,
        "activation_bytes": width,
        "kv_value_bytes": width,
    }
    if config.get("quantization_config") is not None:
        shape |= quantised_weights(config["quantization_config"], shape["layers"], source)
    variant = {"opt": _opt, "bloom": _bloom}.get(kind, _llama_like)
    return ModelArchitecture(**shape, **variant(reader))


def _llama_like(config: _Config) -> dict[str, Any]:
    """Llama, Mistral, Qwen 2 and 3, Mixtral: gated feed-forward, RMS norms, rotary positions."""
    kind = config.raw["model_type"]
    if kind != "qwen2":
        config.refuse("attention_bias", unwanted=True)
    config.refuse("mlp_bias", unwanted=True)
    shape: dict[str, Any] = {
        "ffn": config.integer("intermediate_size"),
        "max_position": config.integer("max_position_embeddings"),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "sliding_window": _sliding_window(config),
    }
    if kind == "mixtral":
        shape["experts"] = config.integer("num_local_experts")
        shape["active_experts"] = config.integer("num_experts_per_tok")
        if shape["active_experts"] > shape["experts"]:
            problem = f"{shape['active_experts']} of {shape['experts']} experts"
            raise config.error("num_experts_per_tok", problem, "it cannot exceed num_local_experts")
    return shape


def _opt(config: _Config) -> dict[str, Any]:
    """OPT: plain feed-forward, biases, learned positions that start at row 2."""
    config.refuse("do_layer_norm_before", unwanted=False)
    config.refuse("_remove_final_layer_norm", unwanted=True)
    config.refuse("enable_bias", unwanted=False)
    hidden = config.integer("hidden_size")
    if config.integer("word_embed_proj_dim", default=hidden) != hidden:
        problem = "differs from hidden_size, which is not supported"
        raise config.error("word_embed_proj_dim", problem, "choose another model")
    return {
        "ffn": config.integer("ffn_dim"),
        "gated_ffn": False,
        "max_position": config.integer("max_position_embeddings"),
        "learned_positions": True,
        "position_offset": 2,
        "biases": True,
    }


def _bloom(config: _Config) -> dict[str, Any]:
    """BLOOM: plain feed-forward four times as wide, biases, ALiBi (no position table)."""
    return {
        "ffn": 4 * config.integer("hidden_size", "n_embed"),
        "gated_ffn": False,
        "max_position": config.integer("seq_length", default=2048),
        "biases": True,
    }


def _sliding_window(config: _Config) -> int | None:
    """Tokens that attention looks back, where it is limited in every layer. Where it is in some only (Qwen),
    none counts as limited, so that cost and memory are upper bounds."""
    raw, kind = config.raw, config.raw["model_type"]
    if kind in {"mistral", "mixtral"}:
        if kind == "mistral" and "sliding_window" not in raw:
            return 4096  # the family's default
        return None if raw.get("sliding_window") is None else config.integer("sliding_window")
    if not kind.startswith("qwen") or not config.flag("use_sliding_window", default=False):
        return None
    kinds = raw.get("layer_types")
    everywhere = (
        set(kinds) == {"sliding_attention"} if isinstance(kinds, list) else raw.get("max_window_layers") == 0
    )
    return config.integer("sliding_window") if everywhere else None


def _dtype(config: _Config) -> WeightType:
    """Format of the weights: `dtype` or `torch_dtype`, 16 bits where neither is given."""
    key = next((k for k in ("dtype", "torch_dtype") if config.raw.get(k) is not None), None)
    if key is None:
        return "bf16"
    dtype = str(config.raw[key]).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.error(key, f"{_shown(config.raw[key])} is not known", f"known: {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _shown(value: Any) -> str:
    """A value as it is shown in an error."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."

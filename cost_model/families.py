"""What the keys of config.json mean in each family of models, by its model_type.

Defaults of keys, where a family has them, are those of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cost_model.architecture import Family, LatentAttention
from cost_model.config_keys import ConfigKeys

_MOST_MIXED_LAYERS = 10_000
"""More layers than any model has; where they differ, each is looked at."""

Shape = dict[str, Any]
"""Fields of ModelArchitecture."""


class FamilyReader(NamedTuple):
    """A model_type: the engine's model class, and what reads its keys."""

    family: Family
    read: Callable[[ConfigKeys], Shape]


def _decoder(config: ConfigKeys, tied: bool = False, **defaults: int) -> Shape:
    """Sizes that all families have; `defaults` of kv_heads, head_dim, heads, vocab and max_position."""
    hidden = config.integer("hidden_size", "n_embed")
    heads = config.integer("num_attention_heads", "n_head", default=defaults.get("heads"))
    # 0 stands for as many KV heads as query heads.
    kv_default = heads if defaults.get("kv_heads") == 0 else defaults.get("kv_heads")
    kv_heads = config.integer("num_key_value_heads", default=kv_default)
    if heads % kv_heads:
        raise config.error(
            "num_key_value_heads", f"{kv_heads} does not divide {heads} heads", "correct one of them"
        )
    head_dim = defaults.get("head_dim")
    if head_dim is None and config.raw.get("head_dim") is None and hidden % heads:
        raise config.error("hidden_size", f"{hidden} does not divide by {heads} heads", "give head_dim")
    return {
        "layers": config.integer("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.integer("head_dim", default=head_dim or hidden // heads or 1),
        "vocab": config.integer("vocab_size", default=defaults.get("vocab")),
        "tied_embeddings": config.flag("tie_word_embeddings", default=tied),
    }


def _gated(config: ConfigKeys, tied: bool = False, **defaults: int) -> Shape:
    """Gated feed-forward, RMS norms, rotary positions."""
    shape = _decoder(config, tied, **defaults)
    return shape | {
        "ffn": config.integer("intermediate_size"),
        "max_position": config.integer("max_position_embeddings", default=defaults.get("max_position")),
    }


def _without_biases(config: ConfigKeys, tied: bool = False, **defaults: int) -> Shape:
    """The same, refused if it has biases."""
    shape = _gated(config, tied, **defaults)
    config.refuse("attention_bias", unwanted=True)
    config.refuse("mlp_bias", unwanted=True)
    return shape


def _llama(config: ConfigKeys) -> Shape:
    return _without_biases(config, kv_heads=0)


def _mistral(config: ConfigKeys) -> Shape:
    shape = _without_biases(config)
    if "sliding_window" not in config.raw:
        return shape | {"sliding_window": 4096}
    return shape | _window_everywhere(config)


def _mixtral(config: ConfigKeys) -> Shape:
    return _without_biases(config) | _window_everywhere(config) | _experts(config, "num_local_experts")


def _qwen2(config: ConfigKeys) -> Shape:
    """Biases on q, k and v, whatever attention_bias says."""
    shape = _gated(config)
    config.refuse("mlp_bias", unwanted=True)
    return shape | {"qkv_bias": True} | _qwen_window(config, shape["layers"])


def _qwen3(config: ConfigKeys) -> Shape:
    shape = _without_biases(config)
    return shape | {"qk_norm": True} | _qwen_window(config, shape["layers"])


def _qwen3_moe(config: ConfigKeys) -> Shape:
    """Some layers may have a plain feed-forward block: those of mlp_only_layers, and all but every
    decoder_sparse_step-th."""
    shape = _without_biases(config) | {"qk_norm": True} | _experts(config, "num_experts", "num_local_experts")
    if config.flag("use_sliding_window", default=False):
        shape |= _window_everywhere(config)
    step = config.integer("decoder_sparse_step", default=1)
    plain = config.raw.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain):
        raise config.error("mlp_only_layers", "is not a list of layers", "correct it")
    experts = {layer for layer in range(step - 1, _layers_that_differ(config), step)} - set(plain)
    dense = shape["layers"] - len(experts)
    return shape | _expert_width(config, shape["ffn"], dense)


def _phi3(config: ConfigKeys) -> Shape:
    """Phi-3 and Phi-4; Q, K and V are one matrix, as are both halves of the gate, which changes no count."""
    return _without_biases(config, kv_heads=0) | _window_everywhere(config)


def _gemma2(config: ConfigKeys) -> Shape:
    """Four norms per layer, and a window in every second one, the first included."""
    shape = _without_biases(config, tied=True, head_dim=256)
    return shape | {"other_layer_params": 2 * shape["hidden"]} | _windows_alternate(config, 4096, period=2)


def _gemma3(config: ConfigKeys) -> Shape:
    """Four norms per layer, norms of q and k, and a window in five of six layers."""
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 256, "vocab": 262_208, "max_position": 131_072}
    shape = _without_biases(config, tied=True, **sizes)
    shape |= {"other_layer_params": 2 * shape["hidden"], "qk_norm": True}
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    window = _windows_alternate(config, 4096, period)
    if config.flag("use_bidirectional_attention", default=False) and "sliding_window" in window:
        window["sliding_window"] = window["sliding_window"] // 2 + 1
    return shape | window


def _gpt_oss(config: ConfigKeys) -> Shape:
    """Experts and router with biases, an attention sink per head, and a window in every second layer, the
    first included."""
    shape = _gated(config, head_dim=64, max_position=131_072)
    biased = config.flag("attention_bias", default=True)
    shape |= {"qkv_bias": biased, "expert_biases": True}
    shape |= {"other_layer_params": shape["heads"] + (shape["hidden"] if biased else 0)}
    return shape | _experts(config, "num_local_experts") | _windows_alternate(config, 128, period=2)


def _minimax_m2(config: ConfigKeys) -> Shape:
    """The queries of all heads are normalised together, as are the keys."""
    config.refuse("use_qk_norm", unwanted=False)
    config.require("shared_intermediate_size", 0)
    shape = _without_biases(config, head_dim=128)
    norms = (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
    return shape | {"other_layer_params": norms} | _experts(config, "num_local_experts")


def _deepseek_v3(config: ConfigKeys, dense: int = 3, shared: int = 0) -> Shape:
    """DeepSeek-V3 and R1, Kimi K2: latent attention, dense layers first, shared experts. Layers that predict
    further tokens (num_nextn_predict_layers) do not count. `dense` and `shared` are defaults."""
    config.require("moe_layer_freq", 1)
    shape = _without_biases(config, kv_heads=0, head_dim=1)
    latent = LatentAttention(
        query_rank=None
        if "q_lora_rank" in config.raw and config.raw["q_lora_rank"] is None
        else config.integer("q_lora_rank", default=1536),
        latent_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )
    shape |= {"latent": latent, "kv_heads": 1, "head_dim": latent.nope_dim + latent.rope_dim}
    shape |= _experts(config, "n_routed_experts", "num_local_experts")
    dense = min(config.integer("first_k_dense_replace", default=dense, least=0), shape["layers"])
    width = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", default=shared, least=0) * width
    return shape | _expert_width(config, shape["ffn"], dense) | {"shared_ffn": shared}


def _deepseek_v2(config: ConfigKeys) -> Shape:
    return _deepseek_v3(config, dense=0, shared=2)


def _opt(config: ConfigKeys) -> Shape:
    """Plain feed-forward, biases, learned positions that start at row 2."""
    shape = _decoder(config, tied=True, kv_heads=0)
    config.refuse("do_layer_norm_before", unwanted=False)
    config.refuse("_remove_final_layer_norm", unwanted=True)
    config.refuse("enable_bias", unwanted=False)
    if config.integer("word_embed_proj_dim", default=shape["hidden"]) != shape["hidden"]:
        problem = "differs from hidden_size, which is not supported"
        raise config.error("word_embed_proj_dim", problem, "choose another model")
    return shape | {
        "ffn": config.integer("ffn_dim"),
        "gated_ffn": False,
        "max_position": config.integer("max_position_embeddings"),
        "learned_positions": True,
        "position_offset": 2,
        "biases": True,
    }


def _bloom(config: ConfigKeys) -> Shape:
    """Plain feed-forward four times as wide, biases, ALiBi (no position table)."""
    return _decoder(config, tied=True, kv_heads=0) | {
        "ffn": 4 * config.integer("hidden_size", "n_embed"),
        "gated_ffn": False,
        "max_position": config.integer("seq_length", default=2048),
        "biases": True,
    }


def _experts(config: ConfigKeys, *keys: str) -> Shape:
    """How many experts there are, by the first of `keys`, and how many of them a token uses."""
    experts = config.integer(*keys)
    active = config.integer("num_experts_per_tok")
    if active > experts:
        problem = f"{active} of {experts} experts"
        raise config.error("num_experts_per_tok", problem, f"it cannot exceed {keys[0]}")
    return {"experts": experts, "active_experts": active}


def _expert_width(config: ConfigKeys, ffn: int, dense_layers: int) -> Shape:
    """The width of experts where it is a key of its own, and how many layers have none."""
    width = config.integer("moe_intermediate_size")
    if not dense_layers:
        return {"ffn": width}
    return {"dense_layers": dense_layers} | ({"expert_ffn": width} if width != ffn else {})


def _window_everywhere(config: ConfigKeys) -> Shape:
    """A window in every layer, if there is one."""
    if config.raw.get("sliding_window") is None:
        return {}
    return {"sliding_window": config.integer("sliding_window")}


def _windows_alternate(config: ConfigKeys, default: int, period: int) -> Shape:
    """A window in all layers but every period-th, unless layer_types says which."""
    if "sliding_window" in config.raw and config.raw["sliding_window"] is None:
        return {}
    window = config.integer("sliding_window", default=default)
    return _windows(config, window, lambda layer: (layer + 1) % period > 0)


def _qwen_window(config: ConfigKeys, layers: int) -> Shape:
    """A window, if it is used, in the layers from max_window_layers on, unless layer_types says which."""
    if not config.flag("use_sliding_window", default=False):
        return {}
    unlimited = config.integer("max_window_layers", default=28, least=0)
    return _windows(config, config.integer("sliding_window", default=4096), lambda layer: layer >= unlimited)


def _windows(config: ConfigKeys, window: int, limited: Callable[[int], bool]) -> Shape:
    """This window in the layers that layer_types names; without that key, in those that are `limited`."""
    layers, kinds = _layers_that_differ(config), config.raw.get("layer_types")
    if kinds is None:
        full = tuple(layer for layer in range(layers) if not limited(layer))
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error("layer_types", f"is not a list of {layers} layers", "correct it")
    elif wrong := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
        known = "known: sliding_attention, full_attention"
        raise config.error("layer_types", f"{str(wrong[0])[:60]!a} is not known", known)
    else:
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}


def _layers_that_differ(config: ConfigKeys) -> int:
    """How many layers there are, few enough to look at each."""
    return config.integer("num_hidden_layers", most=_MOST_MIXED_LAYERS)


FAMILIES: dict[str, FamilyReader] = {
    "llama": FamilyReader("llama", _llama),
    "mistral": FamilyReader("llama", _mistral),
    "qwen2": FamilyReader("llama", _qwen2),
    "qwen3": FamilyReader("llama", _qwen3),
    "mixtral": FamilyReader("mixtral", _mixtral),
    "opt": FamilyReader("opt", _opt),
    "bloom": FamilyReader("bloom", _bloom),
    "phi3": FamilyReader("phi3", _phi3),
    "gemma2": FamilyReader("gemma2", _gemma2),
    "gemma3": FamilyReader("gemma3", _gemma3),
    "gemma3_text": FamilyReader("gemma3", _gemma3),
    "qwen3_moe": FamilyReader("qwen3_moe", _qwen3_moe),
    "gpt_oss": FamilyReader("gpt_oss", _gpt_oss),
    "minimax_m2": FamilyReader("minimax_m2", _minimax_m2),
    "deepseek_v2": FamilyReader("deepseek_v3", _deepseek_v2),
    "deepseek_v3": FamilyReader("deepseek_v3", _deepseek_v3),
    "kimi_k2": FamilyReader("deepseek_v3", _deepseek_v3),
    "kimi_k25": FamilyReader("deepseek_v3", _deepseek_v3),
}

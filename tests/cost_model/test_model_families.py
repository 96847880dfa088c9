"""Each family's config.json against the model that `transformers` builds from it, and fuzzed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.architecture import ModelArchitecture
from cost_model.config import architecture_from_config
from cost_model.errors import InputError
from cost_model.families import FAMILIES
from cost_model.models import SHIPPED, find_model

DECODER = {
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = ["sliding_attention", "full_attention", *(["sliding_attention"] * 5)]

SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3Config", {}),
    "phi3-tied": ("Phi3Config", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16}),
    "gemma3-own-layers": ("Gemma3TextConfig", {"layer_types": MIXED, "tie_word_embeddings": False}),
    "qwen2-mixed": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen3-moe": ("Qwen3MoeConfig", MIXTURE | {"head_dim": 16}),
    "qwen3-moe-dense-layers": (
        "Qwen3MoeConfig",
        MIXTURE | {"mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "gpt-oss": ("GptOssConfig", MIXTURE | {"head_dim": 16}),
    "gpt-oss-without-biases": ("GptOssConfig", MIXTURE | {"head_dim": 16, "attention_bias": False}),
    "minimax-m2": ("MiniMaxM2Config", MIXTURE | {"head_dim": 16}),
    "deepseek-v2": ("DeepseekV2Config", LATENT | {"first_k_dense_replace": 1}),
    "deepseek-v3": ("DeepseekV3Config", LATENT | {"first_k_dense_replace": 2}),
    "deepseek-shared": ("DeepseekV3Config", LATENT | {"n_shared_experts": 3, "first_k_dense_replace": 0}),
    "deepseek-direct": ("DeepseekV3Config", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 7}),
}


def read(config: dict[str, Any]) -> ModelArchitecture:
    """The shape of a config."""
    return architecture_from_config(config, "small", "small/config.json")


@pytest.fixture(scope="module")
def built():
    """From a class and its keys: the config, and the model on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def build(class_name: str, keys: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        config = getattr(transformers, class_name)(**keys)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if config.tie_word_embeddings:
            model.tie_weights()
        return json.loads(config.to_json_string()), model

    return build


@pytest.mark.parametrize("kind", SMALL)
def test_counts_and_windows_equal_those_of_transformers(kind, built):
    class_name, change = SMALL[kind]
    config, model = built(class_name, DECODER | change)
    read_back = read(config)
    assert read_back.total_params == sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert read_back.layer_params == pytest.approx(sum(layers) / len(layers))
    assert read_back.largest_layer_bytes / read_back.activation_bytes == max(layers)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    limited = kinds.count("sliding_attention") / len(layers)
    assert (read_back.window.share if read_back.window else 0) == pytest.approx(limited)


@pytest.mark.parametrize("kind", ["gemma3", "kimi_k25"])
def test_the_text_part_of_a_nested_config(kind):
    text = DECODER | (LATENT if kind == "kimi_k25" else {})
    whole = {"model_type": kind, "text_config": text, "dtype": "float32", "tie_word_embeddings": False}
    inner = "deepseek_v3" if kind == "kimi_k25" else "gemma3_text"
    assert read(whole) == read(text | {"model_type": inner, "dtype": "float32", "tie_word_embeddings": False})
    with pytest.raises(InputError, match=r"text_config\.hidden_size"):
        read(whole | {"text_config": text | {"hidden_size": 0}})
    with pytest.raises(InputError, match=r"text_config\.quantization_config\.quant_method"):
        read(whole | {"text_config": text | {"quantization_config": {"bits": 4}}})


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"layer_types": ["linear_attention"] * 7}, "layer_types"),
        ("gemma2", {"num_hidden_layers": 10**7}, "num_hidden_layers"),
        ("gemma3", {"text_config": 5}, "text_config"),
        ("phi3", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", MIXTURE | {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("qwen3_moe", MIXTURE | {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("minimax_m2", MIXTURE | {"use_qk_norm": False}, "use_qk_norm"),
        ("deepseek_v3", LATENT | {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", LATENT | {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", LATENT | {"n_shared_experts": 10**7, "moe_intermediate_size": 10**7}, "shared_ffn"),
    ],
)
def test_what_is_not_modelled_is_refused(kind, change, key):
    with pytest.raises(InputError) as caught:
        read(DECODER | change | {"model_type": kind})
    assert caught.value.key == key and caught.value.remedy
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


KEYS = sorted(
    {key for config in SHIPPED.values() for key in config} | {"layer_types", "text_config", "dtype"}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from(sorted(SHIPPED)),
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(KEYS), JSON | st.integers(0, 10**7), max_size=5),
)
def test_any_config_is_read_or_refused_in_one_line(shipped, kind, changes):
    try:
        model = read(SHIPPED[shipped] | {"model_type": kind} | changes)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert 0 < model.active_params <= model.total_params
        assert model.active_layer_params <= model.layer_params
        assert model.layer_bytes <= model.largest_layer_bytes
        assert ModelArchitecture.model_validate_json(model.model_dump_json()) == model


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_no_run_of_layers_has_more_full_attention_than_its_share_and_the_excess(full):
    shape = find_model("mistral-7b").model_dump() | {"layers": len(full), "sliding_window": 8}
    layers = tuple(layer for layer, unlimited in enumerate(full) if unlimited)
    model = ModelArchitecture(**shape | {"full_attention_layers": layers})
    share = sum(full) / len(full)
    most = max(
        sum(full[first:end]) - share * (end - first)
        for first in range(len(full))
        for end in range(first, len(full) + 1)
    )
    assert model.full_attention_excess == pytest.approx(most)


@pytest.mark.parametrize("name", SHIPPED)
def test_models_are_written_and_read_again(name):
    model = find_model(name)
    assert ModelArchitecture(**model.model_dump()) == model
    assert ModelArchitecture.model_validate_json(model.model_dump_json()) == model


def test_models_that_need_no_newer_field_are_written_as_they_were():
    assert list(find_model("llama-2-70b").model_dump()) == [
        "name",
        "family",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "gated_ffn",
        "vocab",
        "tied_embeddings",
        "max_position",
        "learned_positions",
        "position_offset",
        "biases",
        "qkv_bias",
        "qk_norm",
        "experts",
        "active_experts",
        "sliding_window",
        "weight_type",
        "weight_bytes",
        "activation_bytes",
        "kv_value_bytes",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"dense_layers": 62},
        {"full_attention_layers": [3, 2]},
        {"full_attention_layers": [61]},
        {"kv_heads": 2},
    ],
)
def test_shapes_that_contradict_themselves_are_refused(change):
    with pytest.raises(ValueError, match="should"):
        ModelArchitecture(**find_model("deepseek-v3").model_dump() | change)

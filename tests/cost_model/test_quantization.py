"""The `quantization_config` of a config.json: formats, bytes against tensor shapes, and bad input."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.config import architecture_from_config, architecture_from_folder
from cost_model.errors import InputError
from cost_model.models import SHIPPED
from cost_model.quantization import ActivationScheme, weight_scheme

LAYERS = 4
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**SHAPE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
# One layer's matrices, rows by columns: q, o, k, v, gate, up, down.
ATTENTION = [(512, 512), (512, 512), (128, 512), (128, 512)]
FFN = [(1024, 512), (1024, 512), (512, 1024)]
REST = 2 * (2 * LAYERS * 512 + 512 + 2 * 1000 * 512)
"""Bytes of the norms, token table and LM head, in 16 bits."""


def model_of(quantization, shape=SHAPE):
    return architecture_from_config({**shape, "quantization_config": quantization}, "small", "config.json")


def tensors(stored, matrices=(*ATTENTION, *FFN)):
    """Bytes of a checkpoint whose matrices are stored so: rows, columns -> bytes of all tensors of one."""
    return REST + LAYERS * sum(stored(rows, columns) for rows, columns in matrices)


def grouped(bits, scale_bits, group):
    return lambda rows, columns: rows * columns * bits / 8 + rows * (columns // group) * scale_bits / 8


def compressed(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


METHODS = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", lambda r, c: r * c),
    "fp8 by blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8_block",
        lambda r, c: r * c + 4 * (r // 128) * (c // 128),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", grouped(4, 16 + 4, 128)),
    "awq, symmetric": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False},
        "int4",
        grouped(4, 16, 64),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", grouped(4, 16 + 4, 32)),
    "gptq, symmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        "int4",
        grouped(4, 16, 32),
    ),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8", grouped(8, 24, 128)),
    "compressed int4": (
        compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
        "int4",
        grouped(4, 16, 32),
    ),
    "compressed fp8": (compressed(num_bits=8, type="float", strategy="channel"), "fp8", lambda r, c: r * c),
    "compressed int8": (compressed(num_bits=8, type="int", strategy="channel"), "int8", lambda r, c: r * c),
    "compressed nvfp4": (
        compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "nvfp4",
        grouped(4, 8, 16),
    ),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", grouped(4, 8, 16)),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", lambda r, c: r * c),
}


@pytest.mark.parametrize(("quantization", "weights", "stored"), METHODS.values(), ids=METHODS)
def test_bytes_are_those_of_the_tensors(quantization, weights, stored):
    """Scales per tensor or channel are not counted."""
    model = model_of(quantization)
    assert model.weight_type == weights
    assert model.total_bytes == pytest.approx(tensors(stored), rel=1e-12)
    assert model.activation_bytes == model.kv_value_bytes == 2


def test_mxfp4_is_of_experts_only():
    """As in gpt-oss: attention, router, norms, token table and LM head stay in 16 bits."""
    model = model_of({"quant_method": "mxfp4"}, MIXTRAL)
    experts = 4 * sum(rows * columns for rows, columns in FFN) * (4 + 8 / 32) / 8
    others = 2 * (sum(rows * columns for rows, columns in ATTENTION) + 4 * 512)
    assert model.total_bytes == pytest.approx(REST + LAYERS * (experts + others), rel=1e-12)


@pytest.mark.parametrize(
    "names",
    [
        ["lm_head", "re:.*self_attn.*"],
        ["model.layers.*.self_attn", "model.embed_tokens"],
        ["self_attn"],
        [f"model.layers.{k}.self_attn*" for k in range(LAYERS)],
    ],
)
def test_attention_left_in_16_bits(names):
    plain, excluded = (
        model_of({"quant_method": "fp8", "modules_to_not_convert": listed}) for listed in (["lm_head"], names)
    )
    attention = LAYERS * sum(rows * columns for rows, columns in ATTENTION)
    assert excluded.total_bytes - plain.total_bytes == attention


BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {**BY_TOKEN, "strategy": "tensor", "dynamic": False, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


@pytest.mark.parametrize(
    ("weights", "inputs", "expected"),
    [
        (INT8, [BY_TOKEN], ActivationScheme(symmetric=True, static=False)),
        (INT8, [STATIC], ActivationScheme(symmetric=False, static=True)),
        (INT8, [None], None),
        (INT8, [BY_TOKEN, None], None),
        (INT8, [{**BY_TOKEN, "strategy": "tensor"}], None),
        (INT8, [{**BY_TOKEN, "num_bits": 4}], None),
        (INT8, [{**BY_TOKEN, "type": "float"}], None),
        ({**INT8, "num_bits": 4, "group_size": 32}, [BY_TOKEN], None),
    ],
)
def test_how_activations_are_rounded(weights, inputs, expected):
    """Where it is not the same for all layers, or as for no kernel, nothing is."""
    groups = {f"{n}": {"weights": weights, "input_activations": each} for n, each in enumerate(inputs)}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert weight_scheme(quantization, "config.json", "quantization_config").activations == expected


def test_a_few_layers_left_in_16_bits_do_not_count():
    names = ["lm_head", "model.layers.0.self_attn", "model.layers.1.mlp.gate"]
    assert not model_of({"quant_method": "fp8", "ignore": names}).only_experts_quantised


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({}, "quant_method"),
        ([], ""),
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "gptq", "bits": 3}, "bits"),
        ({"quant_method": "awq", "bits": 8}, "bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": "128"}, "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config_groups.a"),
        (compressed(num_bits=2, type="int"), "config_groups.group_0.weights.num_bits"),
    ],
)
def test_bad_quantisation_is_one_line_with_key_and_remedy(quantization, key):
    with pytest.raises(InputError) as caught:
        model_of(quantization)
    assert caught.value.key.removeprefix("quantization_config").removeprefix(".") == key
    assert caught.value.remedy and "\n" not in str(caught.value)


_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)
_keys = st.sampled_from(
    ["bits", "group_size", "weight_block_size", "quant_algo", "config_groups", "ignore", "zero_point"]
)


@given(
    st.sampled_from([quantization for quantization, _, _ in METHODS.values()]),
    st.dictionaries(_keys | st.just("quant_method"), _values, max_size=3),
)
def test_any_quantisation_is_read_or_refused(quantization, changes):
    try:
        model = model_of({**quantization, **changes})
    except InputError as error:
        assert "\n" not in str(error) and error.remedy
    else:
        assert 0 < model.layer_bytes < 4 * model.layer_params


@pytest.mark.parametrize("name", SHIPPED)
def test_models_in_16_bits_have_no_field_about_quantisation(name):
    """Their placements keep their bytes."""
    model = architecture_from_config(SHIPPED[name], name, "shipped")
    assert "only_experts_quantised" not in model.model_dump(mode="json")
    assert model.total_bytes == 2 * model.total_params and model.layer_bytes == 2 * model.layer_params


def test_gpt_oss_20b_takes_what_its_checkpoint_takes():
    """13.76 GB of safetensors on the Hugging Face Hub; the shape is that of its config.json."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
    assert model_of({"quant_method": "mxfp4"}, config).total_bytes == pytest.approx(13.76e9, rel=0.005)


FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("said", "kv_value_bytes"),
    [
        ({}, 2.0),
        ({"kv_cache_scheme": None}, 2.0),
        ({"kv_cache_scheme": FP8_KV}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None}, 2.0),
    ],
)
def test_kv_caches_have_the_format_that_the_checkpoint_has_scales_for(said, kv_value_bytes):
    weights = compressed(num_bits=8, type="float")
    assert model_of({**weights, **said}).kv_value_bytes == kv_value_bytes


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, r"kv_cache_scheme\.num_bits: 4 is not known"),
        ({"kv_cache_scheme": 8}, "kv_cache_scheme: is not a JSON object"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo: 'NVFP4' is not known"),
    ],
)
def test_kv_caches_of_other_formats_are_refused(said, why):
    with pytest.raises(InputError, match=why):
        model_of({**compressed(num_bits=8, type="float"), **said})


def test_formats_beside_the_config(tmp_path):
    """NVIDIA Model Optimizer writes a file of its own, in which names are patterns."""
    folder = tmp_path / "small-nvfp4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    formats = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    formats["exclude_modules"] = ["lm_head", "model.layers.*.self_attn*"]
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": formats}))
    model = architecture_from_folder(folder)
    assert (model.weight_type, model.kv_value_bytes, model.only_experts_quantised) == ("nvfp4", 1.0, True)
    assert architecture_from_folder(folder / "config.json") == model
    for text, why in (
        ("[]", r"hf_quant_config\.json: is not a JSON object"),
        ('{"quantization": 4}', r"hf_quant_config\.json: quantization: is not a JSON"),
        ('{"quantization": {"quant_algo": "W1"}}', r"hf_quant_config\.json: quantization\.quant_algo: 'W1'"),
    ):
        beside.write_text(text)
        with pytest.raises(InputError, match=why):
            architecture_from_folder(folder)
    (folder / "config.json").write_text(json.dumps({**SHAPE, "quantization_config": {"quant_method": "fp8"}}))
    assert architecture_from_folder(folder).weight_type == "fp8"

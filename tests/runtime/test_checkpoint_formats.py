"""Which checkpoints the engines serve for placements with quantised weights."""

from __future__ import annotations

import json

import pytest

from cost_model.dtypes import in_formats
from cost_model.errors import InputError
from cost_model.models import find_model
from hexgen2.placement import Placement
from runtime.checkpoint import check_formats, check_kv_format

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
CHECKPOINTS = {
    "bf16": None,
    "fp8": {"quant_method": "fp8"},
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "int4 in groups of 32": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.fixture
def serve(tmp_path):
    from cost_model.config import architecture_from_config

    model = architecture_from_config(CONFIG, "tiny", "test")

    def check(engine, planned, there, kv=None, asked="auto"):
        config = CONFIG | ({"quantization_config": CHECKPOINTS[there]} if CHECKPOINTS[there] else {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        placement = Placement.model_construct(model=in_formats(model, planned, kv))
        check_kv_format(placement, engine, asked, "placement.json")
        check_formats(placement, tmp_path, engine)

    return check


@pytest.mark.parametrize(
    ("planned", "there"),
    [("bf16", "bf16"), ("fp16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"), ("int4", "int4")],
)
def test_vllm_serves_what_the_checkpoint_has_and_makes_fp8_of_16_bits(serve, planned, there):
    serve("vllm", planned, there)


@pytest.mark.parametrize(("planned", "there"), [("int4", "bf16"), ("bf16", "fp8"), ("fp8", "int4")])
def test_vllm_makes_no_other_format(serve, planned, there):
    with pytest.raises(InputError, match=f"has {there} weights, but .* for {planned}; name a checkpoint in"):
        serve("vllm", planned, there)


@pytest.mark.parametrize(
    ("planned", "there"), [("fp16", "bf16"), ("fp32", "bf16"), ("fp8", "fp8"), ("int4", "int4")]
)
def test_torch_serves_what_the_checkpoint_has(serve, planned, there):
    serve("torch", planned, there)


@pytest.mark.parametrize(
    ("planned", "there", "kv", "words"),
    [
        (
            "fp8",
            "bf16",
            None,
            "has bf16 weights, but the placement was made for fp8; name a checkpoint in fp8",
        ),
        ("bf16", "int4", None, "has int4 weights, but the placement was made for bf16; name a checkpoint"),
        ("int4", "int4 in groups of 32", None, "has 0.5781 bytes per weight, but .* for 0.5195; search"),
        ("nvfp4", "nvfp4", None, "does not run nvfp4 weights; use --engine vllm, or .* int4, int8, fp8"),
        ("bf16", "bf16", "int4", "model.kv_type.*has no KV caches in int4; search with --kv int8"),
    ],
)
def test_torch_makes_no_other_format(serve, planned, there, kv, words):
    with pytest.raises(InputError, match=words):
        serve("torch", planned, there, kv)


@pytest.mark.parametrize("kv", ["fp32", "fp16", "bf16", "fp8", "int8"])
def test_torch_stores_kv_caches_in_8_bits_and_more(serve, kv):
    serve("torch", "bf16", "bf16", kv)


def test_a_kv_format_that_is_asked_for_wins_over_the_plan_on_torch_alone(serve):
    serve("torch", "bf16", "bf16", "int4", "int8")
    with pytest.raises(InputError, match=r"--kv-cache-dtype.* only applies to --engine torch; .* --kv int8"):
        serve("vllm", "bf16", "bf16", "bf16", "int8")
    with pytest.raises(InputError, match=r"--kv-cache-dtype.* only applies to --engine torch; .* --kv bf16"):
        serve("emulated", "bf16", "bf16", "fp8", "plain")


def test_torch_runs_the_mxfp4_of_gpt_oss(tmp_path):
    model = find_model("gpt-oss-20b")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    config |= {"num_hidden_layers": model.layers, "hidden_size": model.hidden, "num_experts_per_tok": 4}
    config |= {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads}
    config |= {"intermediate_size": model.ffn, "vocab_size": model.vocab, "num_local_experts": model.experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = Placement.model_construct(model=in_formats(model, "mxfp4"))
    check_formats(packed, tmp_path, "torch")
    with pytest.raises(InputError, match=r"made for bf16; .*or search with --model"):
        check_formats(Placement.model_construct(model=model), tmp_path, "torch")


def test_an_emulated_fleet_has_no_weights(serve):
    serve("emulated", "int4", "bf16")

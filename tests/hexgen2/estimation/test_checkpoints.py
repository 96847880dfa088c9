"""Hugging Face ids: which model they name, and in which formats."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import InputError
from cost_model.models import SHIPPED
from hexgen2.estimation.checkpoints import checkpoint, model_of_id

IDS = {
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "qwen3-235b-a22b",
    "nvidia/Qwen3-235B-A22B-NVFP4": "qwen3-235b-a22b",
    "qwen/qwen3-32b": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-30B-A3B-AWQ": "qwen3-30b-a3b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-405B-Instruct": "llama-3.1-405b",
    "meta-llama/Llama-3.1-405B-Instruct-FP8": "llama-3.1-405b",
    "meta-llama/Llama-2-70b-chat-hf": "llama-2-70b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-R1-0528-FP4-v2": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2.5",
    "moonshotai/Kimi-K2-Thinking": "kimi-k2.5",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "google/gemma-2-27b-it": "gemma-2-27b",
}


@pytest.mark.parametrize("name", IDS)
def test_ids_name_models(name):
    assert model_of_id(name).name == IDS[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_model_that_ships_is_known_by_its_name(name):
    found = model_of_id(f"someone/{name.upper()}-FP8")
    assert found.model_dump(exclude={"name"}) == model_of_id(found.name).model_dump(exclude={"name"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("zhipuai/GLM-5", "GLM-5 has sparse attention"),
        ("zai-org/GLM-5-FP8", "GLM-5 has sparse attention"),
        ("Qwen/Qwen3.5-397B-A17B", "Qwen3.5 has linear attention"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next has linear attention"),
        ("deepseek-ai/DeepSeek-V3.2", "DeepSeek-V3.2 has sparse attention"),
        ("deepseek-ai/DeepSeek-V2", "'deepseek-ai/DeepSeek-V2' is not the id of a known model"),
        ("acme/Frontier-1T", "'acme/Frontier-1T' is not the id of a known model"),
        ("", "'' is not the id of a known model"),
        ("-fp8", "is not the id of a known model"),
        ("a\0b", "is not the id of a known model"),
    ],
)
def test_unknown_architectures_are_named(name, why):
    with pytest.raises(InputError, match=why):
        model_of_id(name)


def test_a_folder_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHIPPED["qwen3-8b"]))
    assert model_of_id(str(tmp_path)).layers == 36


@given(st.text(max_size=30))
def test_any_text_is_a_model_or_refused(name):
    with contextlib.suppress(InputError):
        assert model_of_id(name)


@pytest.mark.parametrize(
    ("name", "label", "weights", "kv_bytes", "only_experts"),
    [
        ("Qwen/Qwen3-32B", "fp8", "fp8", 1.0, False),
        ("Qwen/Qwen3-32B", "", "bf16", 2.0, False),
        ("Qwen/Qwen3-235B-A22B-FP8", "fp8", "fp8_block", 1.0, False),
        ("deepseek-ai/DeepSeek-R1", "fp8", "fp8_block", 1.0, False),
        ("nvidia/DeepSeek-R1-NVFP4", "nvfp4", "nvfp4", 1.0, True),
        ("meta-llama/Llama-3.1-70B", "nvfp4", "nvfp4", 1.0, False),
        ("moonshotai/Kimi-K2.5", "int4_wo", "int4", 1.0, True),
        ("openai/gpt-oss-120b", "nvfp4", "mxfp4", 1.0, True),
        ("openai/gpt-oss-120b", "w4a16_mxfp4", "mxfp4", 1.0, True),
        ("openai/gpt-oss-120b", "bf16", "bf16", 2.0, False),
    ],
)
def test_labels_are_formats(name, label, weights, kv_bytes, only_experts):
    found = checkpoint(name, label, "")
    assert (found.weight_type, found.kv_value_bytes) == (weights, kv_bytes)
    assert found.only_experts_quantised is only_experts


def test_a_kv_format_that_is_given_decides():
    assert checkpoint("Qwen/Qwen3-32B", "fp8", "bf16").kv_value_bytes == 2.0
    assert checkpoint("Qwen/Qwen3-32B", "", "fp8_e4m3").kv_value_bytes == 1.0
    assert checkpoint("Qwen/Qwen3-32B", "fp8", "auto").kv_value_bytes == 1.0
    for weights, kv in (("fp3", ""), ("", "fp3")):
        with pytest.raises(InputError, match="the format 'fp3' is not known"):
            checkpoint("Qwen/Qwen3-32B", weights, kv)

"""Model shapes: parameter counts compared with published figures and with transformers, and bad configs."""

import json

import pytest

from cost_model.architecture import ModelArchitecture
from cost_model.config import architecture_from_config, architecture_from_folder
from cost_model.errors import InputError
from cost_model.models import SHIPPED, find_model

PUBLISHED = {
    "llama-2-7b": 6.74e9,
    "llama-2-13b": 13.02e9,
    "llama-2-70b": 68.98e9,
    "llama-30b": 32.5e9,
    "llama-3-8b": 8.03e9,
    "llama-3-70b": 70.55e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.55e9,
    "codellama-34b": 33.74e9,
    "internlm-20b": 20.1e9,
    "opt-13b": 12.85e9,
    "opt-30b": 29.97e9,
    "opt-66b": 65.7e9,
    "bloom-176b": 176.25e9,
    "qwen-72b": 72.3e9,
    "qwen3-32b": 32.76e9,
    "llama-3.1-405b": 405.85e9,
    "qwen3-8b": 8.19e9,
    "qwen3-30b-a3b": 30.53e9,
    "qwen3-235b-a22b": 235.1e9,
    "mistral-7b": 7.248e9,
    "mixtral-8x7b": 46.7e9,
    "mixtral-8x22b": 140.6e9,
    "phi-4": 14.66e9,
    "gemma-2-9b": 9.24e9,
    "gemma-2-27b": 27.23e9,
    "gemma-3-27b": 27.01e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 116.8e9,
    "minimax-m2.5": 228.7e9,
    "deepseek-v3": 671e9,
    "deepseek-r1": 671e9,
    "kimi-k2.5": 1.026e12,
    "deepseek-r1-distill-qwen-14b": 14.77e9,
}


def test_every_shipped_model_has_a_published_count():
    assert set(PUBLISHED) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_have_their_published_size(name):
    model = find_model(name)
    assert model.name == name
    assert model.total_params == pytest.approx(PUBLISHED[name], rel=0.005)


def test_kv_cache_of_llama_2_70b():
    assert find_model("llama-2-70b").kv_bytes_per_token * 1024 == pytest.approx(335.5e6, rel=1e-3)


ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "mixtral-8x22b": 39e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    # Published without the token table: 3.6 B and 5.1 B.
    "gpt-oss-20b": 3.6e9 + 201088 * 2880,
    "gpt-oss-120b": 5.1e9 + 201088 * 2880,
    # Published without the token table and the LM head.
    "minimax-m2.5": 10e9 + 2 * 200064 * 3072,
    "deepseek-v3": 37e9,
    "kimi-k2.5": 32e9,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_uses(name):
    model = find_model(name)
    assert model.active_params == pytest.approx(ACTIVE[name], rel=0.03)
    layers = model.total_params - model.layers * model.layer_params
    assert model.active_params == pytest.approx(model.layers * model.active_layer_params + layers)


def test_a_latent_cache_holds_576_values_per_token_and_layer():
    model = find_model("deepseek-v3")
    assert model.kv_bytes_per_token_layer == (512 + 64) * 2
    assert model.kv_bytes_per_token == 61 * 1152
    # DeepSeek-V2, section 2.1: as many as grouped-query attention with 2.25 heads of 128.
    assert model.kv_values_per_token_layer == 2.25 * 2 * 128


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("llama2-70b", "llama-2-70b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("Llama_2_70B", "llama-2-70b"),
        ("Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("llama1_30b", "llama-30b"),
        ("huggyllama/llama-30b", "llama-30b"),
        ("facebook/opt-66b", "opt-66b"),
        ("OPT 30B", "opt-30b"),
        ("Qwen/Qwen-72B", "qwen-72b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("CodeLlama-34b-Instruct-hf", "codellama-34b"),
        ("bigscience/bloom", "bloom-176b"),
    ],
)
def test_names_match_loosely(spelling, name):
    assert find_model(spelling).name == name


@pytest.mark.parametrize("wrong", ["llama-2-71b", "qwen2-72b", "", "gpt", "x" * 5000, "a\0b"])
def test_unknown_names(wrong):
    with pytest.raises(InputError) as caught:
        find_model(wrong)
    assert len(str(caught.value).splitlines()) == 1
    assert "did you mean" in str(caught.value) or "shipped:" in str(caught.value)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def test_a_folder_wins_over_a_shipped_name(tmp_path, monkeypatch):
    folder = tmp_path / "llama-2-7b"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("llama-2-7b").layers == 32, "a folder without a config.json is no model"
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
    model = find_model("llama-2-7b")
    assert (model.layers, model.name) == (3, "llama-2-7b")
    assert model.weight_bytes == model.kv_value_bytes == 4
    assert find_model(str(folder / "config.json")) == find_model(str(folder)) == model


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"hidden_size": 63}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"dtype": []}, "dtype"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        ({"model_type": "mixtral"}, "num_local_experts"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"model_type": "opt"}, "ffn_dim"),
        ({"model_type": "opt", "ffn_dim": 8, "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ({"model_type": "opt", "ffn_dim": 8, "do_layer_norm_before": False}, "do_layer_norm_before"),
    ],
)
def test_bad_configs_name_file_key_and_remedy(change, key):
    with pytest.raises(InputError) as caught:
        architecture_from_config(LLAMA | change, "m", "m/config.json")
    assert caught.value.key == key and caught.value.remedy
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_broken_config_files(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        architecture_from_folder(tmp_path)


def test_unknown_model_type_lists_the_known():
    with pytest.raises(InputError, match=r"did you mean llama.*known: llama, mistral, qwen2"):
        architecture_from_config({"model_type": "lama"}, "m", "f")


SMALL = {
    "llama-gqa": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 8}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
OPT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "ffn_dim": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
}
BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 8, "vocab_size": 128}


@pytest.fixture(scope="module")
def count_with_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def count(class_name: str, keys: dict) -> tuple[int, ModelArchitecture]:
        config = getattr(transformers, class_name)(**keys)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if config.tie_word_embeddings:
            model.tie_weights()
        architecture = architecture_from_config(json.loads(config.to_json_string()), "small", "small")
        return sum(parameter.numel() for parameter in model.parameters()), architecture

    return count


@pytest.mark.parametrize("kind", SMALL)
def test_counts_equal_transformers(kind, count_with_transformers):
    class_name, change = SMALL[kind]
    keys = {key: value for key, value in LLAMA.items() if key != "model_type"} | change
    expected, architecture = count_with_transformers(class_name, keys)
    assert architecture.total_params == expected


@pytest.mark.parametrize(("class_name", "keys"), [("OPTConfig", OPT), ("BloomConfig", BLOOM)])
def test_counts_equal_transformers_with_biases(class_name, keys, count_with_transformers):
    expected, architecture = count_with_transformers(class_name, keys)
    assert architecture.total_params == expected
    assert architecture.tied_embeddings

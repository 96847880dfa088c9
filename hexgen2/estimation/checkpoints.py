"""Published checkpoints: the model that a Hugging Face id names, in the formats that a run used."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from cost_model.architecture import ModelArchitecture
from cost_model.dtypes import SIXTEEN_BIT, in_formats
from cost_model.errors import InputError
from cost_model.models import SHIPPED, find_model

_FORMAT_SUFFIX = re.compile(
    r"[-_.](?:fp8|fp4|nvfp4|mxfp4|bf16|fp16|int4|int8|awq|gptq|autoround|block|dynamic|hf|chat|instruct|it|base"
    r"|thinking|w4a16|w8a8|w8a16|g128|g32|mixed|eagle\d?|v\d+(?:\.\d+)?|fp8-kv|\d{4})$",
    re.IGNORECASE,
)

# Ids that name a model of the same shape as one that ships.
_SAME_SHAPE = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3.1-terminus": "deepseek-v3",
    "kimi-k2": "kimi-k2.5",
    "kimi-k2.6": "kimi-k2.5",
    "minimax-m2": "minimax-m2.5",
    "minimax-m2.1": "minimax-m2.5",
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
}

# Why some well-known models cannot be predicted.
_UNKNOWN_OPERATORS = (
    (re.compile(r"glm-5"), "GLM-5", "sparse attention"),
    (re.compile(r"deepseek-v3\.2"), "DeepSeek-V3.2", "sparse attention"),
    (re.compile(r"deepseek-v4"), "DeepSeek-V4", "sparse attention"),
    (re.compile(r"qwen3\.[5-9]"), "Qwen3.5", "linear attention"),
    (re.compile(r"qwen3-next"), "Qwen3-Next", "linear attention"),
    (re.compile(r"kimi-linear"), "Kimi Linear", "linear attention"),
    (re.compile(r"minimax-(?:m1|text)"), "MiniMax-01", "linear attention"),
    (re.compile(r"llama-?4"), "Llama 4", "attention in chunks"),
    (re.compile(r"nemotron"), "Nemotron", "state-space layers, or layers that differ"),
)

_WEIGHTS = {
    **dict.fromkeys(("nvfp4", "fp4"), "nvfp4"),
    **dict.fromkeys(("mxfp4", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4a8_mxfp4_fp8"), "mxfp4"),
    **dict.fromkeys(("fp8", "fp8_ootb", "fp8_static"), "fp8"),
    "fp8_block": "fp8_block",
    **dict.fromkeys(("int4", "int4_wo", "w4a16", "awq", "gptq"), "int4"),
    **dict.fromkeys(("int8", "int8_wo", "w8a8", "sq"), "int8"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
}
_KV = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "fp8"),
    "int8": "int8",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), "bf16"),
}
# Families whose fp8 checkpoints have a scale per block of 128 x 128, and families of which quantisation to 4
# bits leaves attention in 16 bits (the checkpoints of Moonshot AI, and those of NVIDIA).
_BLOCKWISE = ("deepseek_v3", "minimax_m2", "qwen3_moe")
_ATTENTION_IN_16_BITS = ("deepseek_v3", "minimax_m2")


@lru_cache(maxsize=256)
def checkpoint(model_path: str, weights: str, kv: str) -> ModelArchitecture:
    """The model of a checkpoint, with weights and KV cache in the formats of a run.

    gpt-oss keeps its own mxfp4 whatever the run's label says, unless that is a 16-bit format. The KV cache is
    assumed to have 8 bits (fp8) where weights are quantised, and 16 bits otherwise.

    Parameters
    ----------
    model_path : Hugging Face id, or a folder with a config.json
    weights : label such as "fp8_block", "nvfp4" or "int4_wo"; "": 16 bits
    kv : label such as "fp8"; "" or "auto": as assumed

    Raises
    ------
    InputError : unknown architecture or format
    """
    model = model_of_id(model_path)
    wanted = _format("weights", weights, _WEIGHTS, "bf16")
    if model.family == "gpt_oss" and wanted not in SIXTEEN_BIT:
        wanted = "mxfp4"
    if wanted == "fp8" and model.family in _BLOCKWISE:
        wanted = "fp8_block"
    assumed = "bf16" if wanted in SIXTEEN_BIT else "fp8"
    found = in_formats(model, wanted, _format("KV cache", kv, _KV, assumed))
    if wanted in ("int4", "nvfp4") and model.family in _ATTENTION_IN_16_BITS:
        found = found.model_copy(update={"only_experts_quantised": True})
    return found


def model_of_id(model_path: str) -> ModelArchitecture:
    """The shipped model that a Hugging Face id names, or that of a folder; organisation, case and suffixes
    such as -Instruct, -FP8 or -0528 do not matter.

    Raises
    ------
    InputError : neither; for some well-known models, which operators are unknown
    """
    name = model_path.strip()
    if _is_folder(name):
        return find_model(name)
    for pattern, model, operators in _UNKNOWN_OPERATORS:
        if pattern.search(name.lower()):
            problem = f"{model} has {operators}, which no cost model here knows"
            raise InputError("model_path", "", problem, "leave such rows out")
    bare = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while bare:
        found = _found(_SAME_SHAPE.get(bare, bare))
        if found is not None:
            return found
        shorter = _FORMAT_SUFFIX.sub("", bare)
        if shorter == bare:
            break
        bare = shorter
    remedy = f"known: {', '.join(SHIPPED)}, and folders with a config.json"
    raise InputError("model_path", "", f"{name[:60]!r} is not the id of a known model", remedy)


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except (OSError, ValueError):
        return False


def _found(name: str) -> ModelArchitecture | None:
    """The model of that name or folder, if it can be had."""
    try:
        return find_model(name)
    except (InputError, OSError, ValueError):
        return None


def _format(what: str, label: str, known: dict[str, str], default: str) -> str:
    text = label.strip().lower()
    if text in ("", "auto", "none"):
        return default
    if text not in known:
        remedy = f"use one of {', '.join(known)}"
        raise InputError(what, "", f"the format {label[:40]!r} is not known", remedy)
    return known[text]

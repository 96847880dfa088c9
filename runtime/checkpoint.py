"""Finds the checkpoint of a launch and checks it against the placement."""

from __future__ import annotations

import json
from pathlib import Path

from cost_model.architecture import WeightType
from cost_model.config import architecture_from_folder
from cost_model.dtypes import SIXTEEN_BIT
from cost_model.errors import InputError
from hexgen2.placement import Placement
from runtime.api.tokenizer import check_tokenizer_files
from runtime.options import KV_CACHE_DTYPES, TORCH, TORCH_PACKED_KV, TORCH_QUANTISED, VLLM

TORCH_FAMILIES = (
    "llama",
    "mixtral",
    "opt",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
)
"""What the torch engine runs (runtime/engine/torch/models), without loading torch to find out."""
NOT_BY_HEADS = {
    "gemma2": "capped scores",
    "gpt_oss": "attention sinks",
    "deepseek_v3": "latent attention",
}
"""Families with attention that attention workers do not compute, and what is uncommon about it."""
MATCHED = ("layers", "hidden", "heads", "kv_heads", "vocab")
BYTES_TOLERANCE = 0.01
"""By how much the bytes of a weight may differ from the placement's: other groups have other scales."""
_KEY = "quantization_config"
GPU_DTYPES = ("bfloat16", "float16")


def check_family(placement: Placement, engine: str, source: str) -> None:
    """Refuse a model or a stage that can be planned, but that the engine has no code for.

    Raises
    ------
    InputError : so it is; the remedy names the engine that does
    """
    family = placement.model.family
    if engine == TORCH and family not in TORCH_FAMILIES:
        problem = f"the torch engine does not run {family} models"
        raise InputError(source, "model.family", problem, f"launch it with --engine {VLLM}")
    if engine == TORCH and placement.attention_workers and family in NOT_BY_HEADS:
        problem = f"attention workers do not compute {NOT_BY_HEADS[family]} ({family})"
        raise InputError(source, "attention_workers", problem, "search a placement without them")
    for r, replica in enumerate(placement.replicas):
        for s, stage in enumerate(replica.stages):
            groups, parts = stage.attention_data_parallel > 1, stage.expert_parallel > 1
            # The emulated engine divides KV caches by heads alone; where experts are makes no difference.
            if engine != VLLM and (groups or (parts and engine == TORCH)):
                key = "attention_data_parallel" if groups else "expert_parallel"
                problem = f"the {engine} engine does not run it"
                remedy = f"launch it with --engine {VLLM}, or set it to 1"
                raise InputError(source, f"replicas[{r}].stages[{s}].{key}", problem, remedy)


def checkpoint_folder(placement: Placement, model_path: Path | None, source: str) -> Path:
    """The folder of the checkpoint, checked against the placement's model.

    Parameters
    ----------
    model_path : None: the placement's model names the folder
    source : what error messages call the placement

    Raises
    ------
    InputError : the folder is missing, its model has another shape than the placement's, or has no tokenizer
    """
    folder = model_path or Path(placement.model.name)
    if not folder.is_dir():
        where = ("--model-path", "") if model_path else (source, "model.name")
        remedy = "name the folder of the checkpoint with --model-path"
        raise InputError(*where, f"{folder} is not a folder", remedy)
    found = architecture_from_folder(folder)
    for key in MATCHED:
        planned, there = getattr(placement.model, key), getattr(found, key)
        if planned != there:
            problem = f"is {there}, but the placement was made for {planned}"
            remedy = "give the model that the placement was made for, or search a new placement"
            raise InputError(str(folder / "config.json"), key, problem, remedy)
    windows = [(model.sliding_window, model.full_attention_layers) for model in (placement.model, found)]
    if placement.model.sliding_window is not None and windows[0] != windows[1]:
        problem = f"is {found.sliding_window}, in other layers than the placement was made for"
        if found.sliding_window != placement.model.sliding_window:
            problem = f"is {found.sliding_window}, but the placement was made for {windows[0][0]}"
        remedy = "give the model that the placement was made for, or search a new placement"
        raise InputError(str(folder / "config.json"), "sliding_window", problem, remedy)
    check_tokenizer_files(folder)
    return folder


def check_kv_format(placement: Placement, engine: str, asked: str, source: str) -> None:
    """Check that an engine can store KV caches in the format that is asked for or planned.

    Parameters
    ----------
    asked : --kv-cache-dtype

    Raises
    ------
    InputError : the torch engine has no KV caches in 4 bits; other engines follow the placement alone
    """
    if asked != KV_CACHE_DTYPES[0]:
        if engine != TORCH:
            remedy = f"leave it out, and search with --kv {asked if asked in TORCH_PACKED_KV else 'bf16'}"
            raise InputError("--kv-cache-dtype", asked, f"only applies to --engine {TORCH}", remedy)
        return
    if engine == TORCH and placement.model.kv_type == "int4":
        remedy = "search with --kv int8, or launch with --kv-cache-dtype int8"
        raise InputError(source, "model.kv_type", "the torch engine has no KV caches in int4", remedy)


def check_formats(placement: Placement, folder: Path, engine: str) -> None:
    """Check that an engine can serve the checkpoint in the format of weights that the placement plans with.

    Raises
    ------
    InputError : vLLM cannot make these weights of the checkpoint's; torch, which serves weights as they are,
        is to serve others
    """
    model, config = placement.model, str(folder / "config.json")
    there = architecture_from_folder(folder)
    if engine == VLLM:
        _check_vllm(model.weight_type, there.weight_type, config)
    if engine != TORCH:
        return
    served = ("mxfp4",) if model.family == "gpt_oss" else TORCH_QUANTISED
    if there.weight_type not in (*SIXTEEN_BIT, *served):
        problem = f"the torch engine does not run {there.weight_type} weights"
        remedy = f"use --engine vllm, or a checkpoint in {', '.join(served)} or 16 bits"
        raise InputError(config, _KEY, problem, remedy)
    plain = model.weight_type in SIXTEEN_BIT and there.weight_type in SIXTEEN_BIT
    if not plain and model.weight_type != there.weight_type:
        problem = f"has {there.weight_type} weights, but the placement was made for {model.weight_type}"
        remedy = (
            f"name a checkpoint in {model.weight_type} with --model-path, or search with --model {folder}"
        )
        raise InputError(config, _KEY, problem, remedy)
    if not plain and abs(model.weight_bytes / there.weight_bytes - 1) > BYTES_TOLERANCE:
        problem = (
            f"has {there.weight_bytes:.4g} bytes per weight, but the placement was made for "
            f"{model.weight_bytes:.4g}"
        )
        raise InputError(config, _KEY, problem, f"search a placement with --model {folder}")


def _check_vllm(planned: WeightType, there: WeightType, source: str) -> None:
    """Check that vLLM can serve a checkpoint with weights of a format as those that a placement plans with.
    It makes fp8 of 16 bits as it loads them; other formats need a quantised checkpoint.

    Raises
    ------
    InputError : it cannot, with `source`
    """
    same = planned == there or (planned in SIXTEEN_BIT and there in SIXTEEN_BIT)
    if same or (planned == "fp8" and there in SIXTEEN_BIT):
        return
    problem = f"has {there} weights, but the placement was made for {planned}"
    remedy = f"name a checkpoint in {planned} with --model-path, or search a placement for this one"
    if planned not in SIXTEEN_BIT and there in SIXTEEN_BIT:
        remedy += ", with --weights fp8 if vLLM is to quantise it"
    raise InputError(source, "quantization_config", problem, remedy)


def gpu_dtype(folder: Path | None) -> str:
    """The data type that a checkpoint names for its weights, else bfloat16; folder None: no checkpoint."""
    if folder is None:
        return GPU_DTYPES[0]
    config = json.loads((folder / "config.json").read_text())
    named = config.get("dtype") or config.get("torch_dtype")
    return named if named in GPU_DTYPES else GPU_DTYPES[0]

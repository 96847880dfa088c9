"""Finds the checkpoint of a launch and checks it against the placement."""

from __future__ import annotations

import json
from pathlib import Path

from cost_model.config import architecture_from_folder
from cost_model.errors import InputError
from hexgen2.placement import Placement
from runtime.api.tokenizer import check_tokenizer_files
from runtime.options import TORCH, VLLM

TORCH_FAMILIES = ("llama", "mixtral", "opt")
"""What the torch engine runs (runtime/engine/torch/models), without loading torch to find out."""
MATCHED = ("layers", "hidden", "heads", "kv_heads", "vocab")
GPU_DTYPES = ("bfloat16", "float16")


def check_family(placement: Placement, engine: str, source: str) -> None:
    """Refuse a model that can be planned, but that the torch engine has no code for.

    Raises
    ------
    InputError : so it is; the remedy names the engine that does
    """
    family = placement.model.family
    if engine == TORCH and family not in TORCH_FAMILIES:
        problem = f"the torch engine does not run {family} models"
        raise InputError(source, "model.family", problem, f"launch it with --engine {VLLM}")


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
    check_tokenizer_files(folder)
    return folder


def gpu_dtype(folder: Path | None) -> str:
    """The data type that a checkpoint names for its weights, else bfloat16; folder None: no checkpoint."""
    if folder is None:
        return GPU_DTYPES[0]
    config = json.loads((folder / "config.json").read_text())
    named = config.get("dtype") or config.get("torch_dtype")
    return named if named in GPU_DTYPES else GPU_DTYPES[0]

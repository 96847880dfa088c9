"""Model families by the `model_type` of a checkpoint's config.json."""

from __future__ import annotations

import torch

from runtime.engine.loader import Checkpoint, CheckpointConfig
from runtime.engine.models.base import DecoderStage
from runtime.engine.models.llama import LlamaStage
from runtime.engine.models.opt import OptStage
from runtime.engine.parallel import Links

FAMILIES: dict[str, type[DecoderStage]] = {"llama": LlamaStage, "opt": OptStage}


def load_stage(folder: str, dtype: str, device: torch.device, links: Links) -> DecoderStage:
    """Load a worker's part of a checkpoint.

    Raises
    ------
    InputError : the checkpoint is of an unknown family, incomplete or damaged
    """
    config = CheckpointConfig.load(folder)
    name = config.get("model_type", "")
    if name not in FAMILIES:
        raise config.error(
            "model_type", f"{name!r} is unknown", f"choose one of {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    checkpoint = Checkpoint(folder, dtype, device, family.prefixes)
    stage = family(checkpoint, links)
    checkpoint.close()
    return stage

"""Model families by the `model_type` of a checkpoint's config.json."""

from __future__ import annotations

import torch

from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.loader import Checkpoint, CheckpointConfig
from runtime.engine.torch.models.base import DecoderStage
from runtime.engine.torch.models.deepseek import DeepseekV3Stage
from runtime.engine.torch.models.deepseek_v2 import DeepseekV2Stage
from runtime.engine.torch.models.gemma import Gemma2Stage, Gemma3Stage
from runtime.engine.torch.models.gpt_oss import GptOssStage
from runtime.engine.torch.models.llama import LlamaStage
from runtime.engine.torch.models.mistral import MistralStage
from runtime.engine.torch.models.mixtral import MixtralStage
from runtime.engine.torch.models.opt import OptStage
from runtime.engine.torch.models.phi import Phi3Stage
from runtime.engine.torch.models.qwen import Qwen2Stage, Qwen3MoeStage, Qwen3Stage

FAMILIES: dict[str, type[DecoderStage]] = {
    "deepseek_v2": DeepseekV2Stage,
    "deepseek_v3": DeepseekV3Stage,
    "gemma2": Gemma2Stage,
    "gemma3_text": Gemma3Stage,
    "gpt_oss": GptOssStage,
    "kimi_k2": DeepseekV3Stage,
    "llama": LlamaStage,
    "mistral": MistralStage,
    "mixtral": MixtralStage,
    "opt": OptStage,
    "phi3": Phi3Stage,
    "qwen2": Qwen2Stage,
    "qwen3": Qwen3Stage,
    "qwen3_moe": Qwen3MoeStage,
}


def load_stage(folder: str, dtype: str, device: torch.device, collectives: Collectives) -> DecoderStage:
    """Load a worker's part of a checkpoint.

    Raises
    ------
    InputError : the checkpoint's family or its quantisation is unknown, or it is incomplete or damaged
    """
    config = CheckpointConfig.load(folder)
    name = config.get("model_type", "")
    if not isinstance(name, str) or name not in FAMILIES:
        raise config.error(
            "model_type", f"{name!r} is unknown", f"choose one of {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    return family(Checkpoint(folder, dtype, device, family.prefixes), collectives)

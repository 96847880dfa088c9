"""How engines are launched for published runs, where no column of a run says it."""

from __future__ import annotations

from cost_model.architecture import ModelArchitecture
from cost_model.hardware import Accelerator


def stream_interval(engine: str, model: ModelArchitecture) -> int:
    """Tokens that are sent at a time: ten of DeepSeek under TensorRT-LLM (stream_interval in the public
    recipes of InferenceMAX, 2025, which the TTFT of its runs shows), otherwise one."""
    return 10 if engine == "trtllm" and model.latent is not None else 1


def look_steps(engine: str, model: ModelArchitecture, gpu: Accelerator, clients: int) -> int:
    """Decode steps from one look for new requests to the next (SGLang's scheduler_recv_interval): 10, or 30
    for many clients, of DeepSeek under SGLang on B200 in the same recipes, otherwise one."""
    if engine == "sglang" and model.latent is not None and gpu.name == "B200":
        return 10 if clients < 16 else 30
    return 1

"""How the torch engine runs a placement: what a user may choose at the launch."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 16
CHUNK_TOKENS = 512
DTYPES = ("auto", "float32", "bfloat16", "float16")
GPU_TRANSPORTS, CPU_TRANSPORTS = ("cuda_ipc", "nccl"), ("shm",)
KV_TRANSPORTS = ("auto", *CPU_TRANSPORTS, "tcp", "gloo", *GPU_TRANSPORTS)


@dataclass(frozen=True)
class EngineOptions:
    """Options of `hexgen2 launch`.

    Attributes
    ----------
    dtype : type of weights and KV cache on all workers; "auto": float32 as soon as one of them is a CPU, else
        that of the checkpoint
    block_tokens : tokens in a block of the KV cache
    chunk_tokens : prompt tokens in a step that decodes, too
    reuse_prefixes : let prompts share the KV cache of a common beginning
    kv_transport : the way of KV caches between workers; "auto": the best that both have
    emulate_links : move KV caches no faster than the placement's links would
    """

    dtype: str = "auto"
    block_tokens: int = BLOCK_TOKENS
    chunk_tokens: int = CHUNK_TOKENS
    reuse_prefixes: bool = True
    kv_transport: str = "auto"
    emulate_links: bool = False


DEFAULTS = EngineOptions()

"""Options of a launch, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_model.lengths import BLOCK_TOKENS
from hexgen2.schedulers import BUCKETS, FLOW
from runtime.routing.fair_queue import QUEUE_LIMIT

RESTARTS = 5
REPLAN_AFTER_S = 30.0
QUEUE_TIMEOUT_S = 60.0
KV_SCALE = 64.0
TORCH, EMULATED, VLLM = "torch", "emulated", "vllm"
ENGINES = (TORCH, EMULATED, VLLM)
INSTRUCTIONS = ("auto", "avx2")
TORCH_QUANTISED = ("int4", "int8", "fp8", "fp8_block")
"""Formats of quantised weights that the torch engine runs."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
TORCH_PACKED_KV = ("fp8", "int8")
"""Formats of KV caches in 8 bits that the torch engine runs."""
PLAIN_KV = "plain"
KV_CACHE_DTYPES = ("auto", PLAIN_KV, *TORCH_PACKED_KV)
NIXL = "nixl"
GPU_TRANSPORTS, CPU_TRANSPORTS = ("cuda_ipc",), ("shm",)
KV_TRANSPORTS = ("auto", *CPU_TRANSPORTS, "tcp", NIXL, *GPU_TRANSPORTS)


@dataclass(frozen=True)
class EngineOptions:
    """Options of `hexgen2 launch`.

    Attributes
    ----------
    dtype : type of computations and KV cache on all workers, and of weights, but those that are stored in 16
        bits stay so on CPUs; "auto": float32 as soon as one of them is a CPU, else that of the checkpoint
    kv_cache_dtype : how the torch engine stores KV caches; "plain": in `dtype`; "auto": in fp8 or int8 where
        the placement plans that, else plain
    block_tokens : tokens per block of the KV cache
    chunk_tokens : most prompt tokens in a step that also decodes; None: the placement's
    reuse_prefixes : let prompts share the KV cache of a common prefix
    kv_transport : how workers send KV caches to each other; "auto": the fastest that both support
    emulate_links : move KV caches no faster than the placement's links would
    kv_scale : the emulated engine moves one byte of KV cache in kv_scale
    cuda_devices : serve on the first so many CUDA devices of this machine, several GPUs of the placement on
        each if it has more; None: each GPU is a device
    measure_heads : dispatch KV heads to attention workers by measured times, instead of the cost model's
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_tokens: int = BLOCK_TOKENS
    chunk_tokens: int | None = None
    reuse_prefixes: bool = True
    kv_transport: str = "auto"
    emulate_links: bool = False
    kv_scale: float = KV_SCALE
    measure_heads: bool = False
    cuda_devices: int | None = None


@dataclass(frozen=True)
class FrontOptions:
    """Options of `hexgen2 launch` for the front end.

    Attributes
    ----------
    queue_limit, client_queue_limit : requests that may wait for room, and those of one client (None: the
        same as queue_limit)
    queue_timeout_s : how long a request may wait before it starts
    kv_high_water : share of a replica's KV cache up to which requests are let in, counting what they are
        expected to grow by; None: all of it, or HIGH_WATER (runtime/routing/paths/path_router.py) where
        requests take paths through ranges of layers
    shift_load : whether shares of routes move when requests wait and are longer or shorter than planned
    scheduler : how the route of a request is chosen (routing/schedulers.py), or its path through ranges of
        layers (routing/paths/next_hop.py)
    output_lengths : what predicts the output of requests, for schedulers that ask (routing/output_lengths.py)
    api_keys : keys by the name of the client; a client must send one of them. Empty: no key is needed
    operator_key : key that an operator must send to see metrics, requests and the placement, and to change
        it; "": with api_keys, only this machine may see them
    allowed_hosts : Host names that the server answers to; None: any
    cors_origin : sites whose pages may call the API
    max_body_bytes, max_total_body_bytes : of one request, and of all in-flight requests
    max_choices, max_prompt_tokens : prompts times n of a request, and the tokens of all their prompts
    max_messages : of a chat, and also of the parts of all its messages
    max_stop_strings, max_stop_length, max_stop_token_ids, max_logit_bias : strings, characters in one, tokens
    max_connections, max_address_connections : open at a time, and from one address (None: nine in ten)
    read_timeout_s : how long the headers of a request may take, and then its body
    write_timeout_s : how long a client may read nothing while an answer is sent to it
    otlp_endpoint : URL of an OpenTelemetry collector; "": no traces
    """

    queue_limit: int = QUEUE_LIMIT
    client_queue_limit: int | None = None
    queue_timeout_s: float = QUEUE_TIMEOUT_S
    kv_high_water: float | None = None
    shift_load: bool = True
    scheduler: str = FLOW
    output_lengths: str = BUCKETS
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    operator_key: str = field(default="", repr=False)
    allowed_hosts: tuple[str, ...] | None = None
    cors_origin: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_total_body_bytes: int = 256 * 1024 * 1024
    max_choices: int = 128
    max_prompt_tokens: int = 1024 * 1024
    max_messages: int = 2048
    max_stop_strings: int = 4
    max_stop_length: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_connections: int = 1000
    max_address_connections: int | None = None
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    otlp_endpoint: str = ""


DEFAULTS = EngineOptions()
FRONT_DEFAULTS = FrontOptions()

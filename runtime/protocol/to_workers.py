"""Messages to a worker: from its launcher at the start, then from the front end."""

from __future__ import annotations

import msgspec

from runtime.protocol.message import Message, Sampling, StageShape


class KvLink(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An emulated link for KV caches from one worker to another: no faster, and each message so late."""

    source: str
    destination: str
    bandwidth_bytes_s: float
    latency_s: float = 0.0


class Emulation(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the emulated engine goes by: the placement (JSON), whose cost model says how long a step takes. Of
    KV caches one byte in kv_scale is moved."""

    placement: bytes
    kv_scale: float


class Configure(Message, frozen=True):
    """First message to a new worker: who it is and what it holds. Workers are named by GPU id.

    The KV cache has room for kv_budget_tokens, in whole blocks of block_tokens. A step runs at most
    max_prefill_tokens tokens, and at most max_mixed_tokens while requests decode along. threads and cores (of
    the CPU; none: any) are for the worker's own computation. kv_transport names the way of KV caches that
    leave here, "auto" is the best that both sides have; kv_links are links of this worker to emulate. engine
    is what computes; emulation is for the emulated one. Blocks are kept for a KV cache that does not come for
    kv_lease_s.
    """

    protocol: int
    worker: str
    replica: str
    role: str
    stages: tuple[StageShape, ...]
    checkpoint: str
    device: str
    dtype: str
    kv_budget_tokens: int
    block_tokens: int
    max_batch: int
    max_prefill_tokens: int
    max_mixed_tokens: int
    reuse_prefixes: bool
    host: str
    secret: str
    threads: int
    cores: tuple[int, ...] = ()
    kv_transport: str = "auto"
    kv_links: tuple[KvLink, ...] = ()
    engine: str = "torch"
    emulation: Emulation | None = None
    kv_lease_s: float = 300.0


class Connect(Message, frozen=True):
    """Where every worker listens (host, port), and every replica's stages: enough for any route.

    Sent again to workers that are ready, it tells them of replicas that have come, gone or moved.
    store_port is the port of this replica's rendezvous store on its driver.
    """

    peers: dict[str, tuple[str, int]]
    replicas: dict[str, tuple[StageShape, ...]]
    store_port: int


class Shutdown(Message, frozen=True):
    """Finish nothing, free everything, exit 0."""


# to the driver of a replica


class ReserveKv(Message, frozen=True):
    """Take blocks for a prompt whose KV cache will arrive; answered by Reserved.

    capacity_tokens is prompt + output at most: what must fit if nothing else is here. The client knows the
    request as client_request_id; logs say so.
    """

    request_id: str
    prompt: tuple[int, ...]
    capacity_tokens: int
    client_request_id: str = ""


class Prefill(Message, frozen=True):
    """Run the prompt and produce token `index`. target is the replica that decodes; "" is this one.

    index is 0 for a new request; one resumed after a failure sends its tokens so far with the prompt. The
    target has the KV cache of the first target_tokens tokens already.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    target: str
    target_tokens: int = 0
    index: int = 0
    client_request_id: str = ""


class Decode(Message, frozen=True):
    """Continue a request whose KV cache arrives here: run last_token after the prompt (of ReserveKv) and
    produce output `index`, one more than last_token's."""

    request_id: str
    last_token: int
    index: int
    sampling: Sampling


class Cancel(Message, frozen=True):
    """Forget the request and free its KV cache; unknown ids are ignored. Answered by Released."""

    request_id: str


# to any worker, at any time


class Ping(Message, frozen=True):
    """Are you there? To any worker, at any time; answered by Pong, whatever the worker computes."""


ToWorker = Configure | Connect | Shutdown | ReserveKv | Prefill | Decode | Cancel | Ping

"""Messages to a worker: from its launcher at the start, then from the front end."""

from __future__ import annotations

import msgspec

from runtime.protocol.message import Message, Sampling, StageShape


class KvLink(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An emulated link for KV caches between two workers: bandwidth, and delay of each message."""

    source: str
    destination: str
    bandwidth_bytes_s: float
    latency_s: float = 0.0


class Emulation(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the emulated engine needs: the placement (JSON), whose cost model times the steps, and which share
    of the KV caches' bytes really moves: one in kv_scale."""

    placement: bytes
    kv_scale: float


class HeadDevice(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What may hold KV heads of a lane: blocks of one head each, and the five numbers of its profile
    (hexgen2/headwise/profile.py)."""

    worker: str
    blocks: int
    profile: tuple[float, float, float, float, float]


class HeadLane(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The KV heads of one worker of a stage, in a replica with attention workers.

    devices may hold them: the worker itself first, then attention workers. Each of the `heads` serves
    query_heads. head_bytes are those of a token of one head in one layer, by the cost model of the profiles.
    """

    worker: str
    layers: int
    heads: int
    query_heads: int
    head_bytes: float
    devices: tuple[HeadDevice, ...]


class WindowedLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The layers of a model that attend to the last `window` tokens alone. Their KV cache holds
    kv_budget_tokens of its own, since each request keeps its last tokens there only."""

    layers: tuple[int, ...]
    window: int
    kv_budget_tokens: int


class Configure(Message, frozen=True):
    """First message to a new worker: who it is and what it holds. Workers are named by GPU id.

    Sent again to all workers of a ready replica that holds no requests, it gives the replica another id, role
    and engine settings, with the same stages and weights; each answers Ready again.

    The KV cache holds kv_budget_tokens, in whole blocks of block_tokens; that of windowed layers is apart, if
    there are any (None: all layers keep all tokens). A step runs at most
    max_prefill_tokens prompt tokens, or max_mixed_tokens while requests decode, and up to steps_in_flight
    steps are under way in the replica's pipeline at the same time. The worker computes with this
    many threads, on these CPU cores (none: any). kv_format is how the torch engine stores KV caches
    (`kv_cache/formats.py`). kv_transport names how KV caches leave here ("auto": the
    best that both sides have); kv_links are the links of this worker to emulate. emulation is for the
    emulated engine only. Blocks reserved for a KV cache that never arrives are freed after kv_lease_s.

    A replica with attention workers has lanes, in the order of its ranks, and dispatches heads anew if
    attention takes more than 1 + theta times the ideal; with measure_heads, by profiles that it measures. Its
    attention workers get a Configure with the role "attention", the replica's stages and its lanes; they load
    nothing.

    The model has so many layers (0: as many as the stages). With `ranges`, the replica's only stage holds
    some of them, and requests pass it on paths of their own (JoinPath).
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
    steps_in_flight: int
    reuse_prefixes: bool
    host: str
    secret: str
    threads: int
    cores: tuple[int, ...] = ()
    kv_format: str = "plain"
    kv_transport: str = "auto"
    kv_links: tuple[KvLink, ...] = ()
    engine: str = "torch"
    emulation: Emulation | None = None
    kv_lease_s: float = 300.0
    lanes: tuple[HeadLane, ...] = ()
    theta: float = 0.5
    measure_heads: bool = False
    layers: int = 0
    ranges: bool = False
    windowed: WindowedLayers | None = None

    @property
    def tokens_running(self) -> int:
        """Tokens of prompts that may be in steps under way."""
        return self.steps_in_flight * max(self.max_prefill_tokens, self.max_mixed_tokens)

    def turned(self, role: Configure) -> Configure:
        """This worker in another role: what does not depend on the role, such as devices and addresses, stays
        as it is."""
        return msgspec.structs.replace(
            self,
            replica=role.replica,
            role=role.role,
            kv_budget_tokens=role.kv_budget_tokens,
            max_batch=role.max_batch,
            max_prefill_tokens=role.max_prefill_tokens,
            max_mixed_tokens=role.max_mixed_tokens,
            steps_in_flight=role.steps_in_flight,
            kv_links=role.kv_links,
            windowed=role.windowed,
            emulation=role.emulation,
        )


class Connect(Message, frozen=True):
    """Where every worker listens (host, port), and every replica's stages: enough for any route.

    Sent again to workers that are ready when replicas have come, gone or moved. store_port is the port of the
    replica's rendezvous store, on its driver.
    """

    peers: dict[str, tuple[str, int]]
    replicas: dict[str, tuple[StageShape, ...]]
    store_port: int


class Shutdown(Message, frozen=True):
    """Drop all requests, free everything and exit with 0."""


# to the driver of a replica


class ReserveKv(Message, frozen=True):
    """Reserve blocks for a prompt whose KV cache will arrive; answered by Reserved.

    capacity_tokens is the longest that prompt and output can get: it must fit when nothing else is here. Logs
    name the request by client_request_id, the id that its client knows.
    """

    request_id: str
    prompt: tuple[int, ...]
    capacity_tokens: int
    client_request_id: str = ""


class Prefill(Message, frozen=True):
    """Run the prompt and produce output token `index`. target is the replica that decodes ("": this one).

    index is 0 for a new request; a request that is resumed after a failure has its tokens so far in the
    prompt. The target already holds the KV cache of the first target_tokens tokens.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    target: str
    target_tokens: int = 0
    index: int = 0
    client_request_id: str = ""


class Decode(Message, frozen=True):
    """Continue a request whose KV cache arrives here: run last_token after the prompt of ReserveKv, and
    produce output token `index`, the one after last_token."""

    request_id: str
    last_token: int
    index: int
    sampling: Sampling


class JoinPath(Message, frozen=True):
    """Compute a hop of a request's path (ranges of layers): the replica's layers from first_layer on, of what
    the hop before sends, or of `tokens` at the first hop. The result goes to next_worker; the last hop, where
    that is "", samples.

    tokens are the prompt and the output so far, with `index` output tokens; only the first hop gets them, and
    the last one if the sampling needs a history. The paths of a front end are numbered in the order in which
    they begin, so that a worker tells activations of a path that it has yet to join from late ones. timed:
    the last hop reports HopTimes.
    """

    request_id: str
    number: int
    first_layer: int
    hops: int
    next_worker: str
    sampling: Sampling
    index: int
    tokens: tuple[int, ...] = ()
    timed: bool = False
    client_request_id: str = ""


class NextToken(Message, frozen=True):
    """To the first hop of a path: run this token, at that position of the request, and have output token
    `index` sampled after it."""

    request_id: str
    token: int
    position: int
    index: int


class Cancel(Message, frozen=True):
    """Forget the request and free its KV cache; unknown ids are ignored. Answered by Released."""

    request_id: str


# to any worker, at any time


class Ping(Message, frozen=True):
    """Asks whether the worker is alive; answered by Pong, whatever the worker is computing."""


ToWorker = (
    Configure | Connect | Shutdown | ReserveKv | Prefill | Decode | JoinPath | NextToken | Cancel | Ping
)

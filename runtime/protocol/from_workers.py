"""Messages from a worker: at its start to its launcher, then to the front end."""

from __future__ import annotations

import msgspec

from runtime.protocol.message import Message, TokenLogprobs


class Listening(Message, frozen=True):
    """The worker's own port for other workers; store_port is 0 unless it drives a replica of several."""

    worker: str
    port: int
    store_port: int


class Ready(Message, frozen=True):
    """Weights are loaded and the replica's communication groups stand."""

    worker: str
    load_s: float
    weight_bytes: int


class Failed(Message, frozen=True):
    """The worker can't go on. kind "input" is the user's (a bad checkpoint), "fault" is ours."""

    worker: str
    kind: str
    text: str


class Pong(Message, frozen=True):
    """Answer to Ping."""

    worker: str


# from the driver of a replica


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One token of one request. index counts the request's output tokens from 0.

    finish_reason is "" while the request goes on, else "stop" or "length". With the first token:
    cached_tokens of the prompt were computed before, by another request.
    """

    request_id: str
    index: int
    token: int
    finish_reason: str = ""
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class Reserved(Message, frozen=True):
    """Answer to ReserveKv: ok, or no room. Then nothing is held, and no Released comes, even after a Cancel
    that crossed this answer. The KV cache of the first cached_tokens tokens is here: it need not be sent."""

    request_id: str
    ok: bool
    cached_tokens: int = 0


class StepOutput(Message, frozen=True):
    """All tokens of one engine step, in one frame."""

    replica: str
    outputs: tuple[TokenOutput, ...]


class KvMoved(Message, frozen=True):
    """The KV cache of a request is complete on the decode side: bytes received by all its workers,
    seconds from the first byte to the last."""

    request_id: str
    bytes_received: int
    seconds: float


class RequestFailed(Message, frozen=True):
    """The replica can't go on with this one request; Released follows. Other requests go on. An executor
    tells its driver, the driver the front end. After a fault (its KV transfer broke, say) another attempt may
    succeed; otherwise it is the request itself that can't be run (it never fits, or what it asks for fails).
    """

    request_id: str
    replica: str
    text: str
    fault: bool


class Released(Message, frozen=True):
    """The request holds no memory on this replica any more (after its end or a Cancel).

    free_blocks are those that no request holds now; preemptions counts since the start.
    """

    request_id: str
    replica: str
    free_blocks: int = 0
    preemptions: int = 0


class Load(Message, frozen=True):
    """The load of an engine that schedules for itself: in-flight requests, those that wait inside it, the
    share of its KV cache in use, blocks that nobody holds, and preemptions since its start."""

    running: int
    waiting: int
    kv_use: float
    free_blocks: int
    preemptions: int


FromWorker = (
    Listening | Ready | Failed | Pong | Reserved | StepOutput | KvMoved | RequestFailed | Released | Load
)

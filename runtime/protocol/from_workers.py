"""Messages from a worker: at its start to its launcher, then to the front end."""

from __future__ import annotations

import msgspec

from runtime.protocol.message import Message, TokenLogprobs


class Listening(Message, frozen=True):
    """The port on which the worker listens; store_port is 0 unless it drives a replica of several workers."""

    worker: str
    port: int
    store_port: int


class Ready(Message, frozen=True):
    """The weights are loaded and the replica's communication groups are set up, or a replica that had both
    has taken another role; load_s is 0 then."""

    worker: str
    load_s: float
    weight_bytes: int


class Failed(Message, frozen=True):
    """The worker cannot go on: kind "input" is the user's mistake (a bad checkpoint), "fault" any other."""

    worker: str
    kind: str
    text: str


class Pong(Message, frozen=True):
    """Answer to Ping."""

    worker: str


# from the driver of a replica


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One token of one request. index counts the request's output tokens from 0.

    finish_reason is "" while the request goes on, then "stop" or "length". cached_tokens comes with the first
    token: how many tokens of the prompt an earlier request had computed.
    """

    request_id: str
    index: int
    token: int
    finish_reason: str = ""
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0


class Reserved(Message, frozen=True):
    """Answer to ReserveKv. Not ok means that there is no room: nothing is held, and no Released follows, even
    after a Cancel that crossed this answer. The KV cache of the first cached_tokens is here already."""

    request_id: str
    ok: bool
    cached_tokens: int = 0


class StepOutput(Message, frozen=True):
    """All tokens of one engine step, in one frame."""

    replica: str
    outputs: tuple[TokenOutput, ...]


class KvMoved(Message, frozen=True):
    """The KV cache of a request has arrived: the bytes received by all workers of the decode replica, and the
    seconds from the first byte to the last."""

    request_id: str
    bytes_received: int
    seconds: float


class RequestFailed(Message, frozen=True):
    """The replica cannot go on with this one request; Released follows, and other requests go on.

    An executor tells its driver, the driver the front end. After a fault (a broken KV transfer, say) another
    attempt may succeed; without one, the request itself cannot run: it never fits, or its sampling fails.
    """

    request_id: str
    replica: str
    text: str
    fault: bool


class Released(Message, frozen=True):
    """The request holds no memory on this replica any more, after its end or a Cancel.

    free_blocks are the blocks that no request holds now; preemptions are counted since the start.
    """

    request_id: str
    replica: str
    free_blocks: int = 0
    preemptions: int = 0


class HopTimes(Message, frozen=True):
    """Last hop of a path to the front end, if JoinPath asked for it: the seconds that the latest token of a
    request took at each hop, from its arrival there until it had been computed."""

    request_id: str
    seconds: tuple[float, ...]


class Load(Message, frozen=True):
    """The load of an engine that schedules for itself: in-flight requests, those that wait inside it, the
    share of its KV cache in use, blocks that nobody holds, and preemptions since its start."""

    running: int
    waiting: int
    kv_use: float
    free_blocks: int
    preemptions: int


class HeadCounts(Message, frozen=True):
    """What a driver has done with the KV heads of its requests.

    heads and free_blocks are those on each attention worker now. All else is counted since the driver's
    start: heads dispatched to each attention worker, requests dispatched anew, bytes of KV cache moved for
    these, and requests prefilled again because an attention worker was lost. away are the attention workers
    that are lost and not back.
    """

    heads: dict[str, int]
    free_blocks: dict[str, int]
    dispatched: dict[str, int]
    redispatches: int
    hauled_bytes: int
    recomputed: int
    away: tuple[str, ...] = ()


FromWorker = (
    Listening
    | Ready
    | Failed
    | Pong
    | Reserved
    | StepOutput
    | KvMoved
    | RequestFailed
    | Released
    | HopTimes
    | Load
    | HeadCounts
)

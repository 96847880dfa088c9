"""Everything that crosses a process: one small set of typed messages, versioned, in msgpack.

Grouped by direction. On a byte stream each message is one frame: 4 bytes little-endian length, then
the msgpack of the tagged struct. `KvSlice` alone may be followed by raw bytes, if the pair agreed on that.
The transport (a socket pair here, a network stream elsewhere) knows frames, never their content.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL_VERSION = 7
HEAD_BYTES = 4
MAX_FRAME_BYTES = 64 * 1024 * 1024
NONCE_BYTES = 32


class BadFrame(ConnectionError):
    """The peer sent what is not one of our frames; the stream is of no more use."""


class Message(msgspec.Struct, tag=True, frozen=True, array_like=True, kw_only=True):
    """Base: the struct's name is its tag on the wire."""


# ---------------------------------------------------------------------------------------------
# parts


class Sampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose tokens, and when to end; temperature 0 is greedy.

    Off are top_k 0, top_p 1, min_p 0, presence and frequency penalty 0, repetition penalty 1 and
    logprobs -1. logit_bias has pairs of a token id and what is added to its logit. Tokens of stop_token_ids
    end the output, but for ignore_eos, and are ruled out for its first min_tokens.

    A token depends on (logits, seed, its position) alone, and with penalties on the tokens before it, so that
    the same request gives the same tokens on any replica, whatever its shape and whatever else is in the
    batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the output."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def needs_history(self) -> bool:
        """Whether a token depends on those before it (penalties)."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


class StageShape(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Workers of one pipeline stage in tensor-parallel order, and its layers [first, end)."""

    workers: tuple[str, ...]
    first_layer: int
    end_layer: int


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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log probability of the chosen token and of the most likely ones (id, logprob), best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


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


# ---------------------------------------------------------------------------------------------
# supervisor -> worker


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
    store_port is the port of this replica's rendezvous store on its lead.
    """

    peers: dict[str, tuple[str, int]]
    replicas: dict[str, tuple[StageShape, ...]]
    store_port: int


class Shutdown(Message, frozen=True):
    """Finish nothing, free everything, exit 0."""


# front end -> lead worker of a replica


class ReserveKv(Message, frozen=True):
    """Take blocks for a prompt whose KV cache will arrive; answered by Reserved.

    capacity_tokens is prompt + output at most: what must fit if nothing else is here. The client knows the
    request as known_as; logs say so.
    """

    request_id: str
    prompt: tuple[int, ...]
    capacity_tokens: int
    known_as: str = ""


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
    known_as: str = ""


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


class Ping(Message, frozen=True):
    """Are you there? To any worker, at any time; answered by Pong, whatever the worker computes."""


# ---------------------------------------------------------------------------------------------
# worker -> supervisor


class Listening(Message, frozen=True):
    """The worker's own port for other workers; store_port is 0 unless it leads a replica of several."""

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


# lead worker -> front end


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
    """The replica can't go on with this one request; Released follows. Other requests go on. A follower
    tells its lead, the lead the front end. After a fault (its KV transfer broke, say) another attempt may
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
    """What an engine that schedules for itself says of its work: requests in work and those that wait inside
    it, the share of its KV cache in use, blocks that nobody holds, and preemptions since its start."""

    running: int
    waiting: int
    kv_use: float
    free_blocks: int
    preemptions: int


# ---------------------------------------------------------------------------------------------
# worker -> worker


Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Hmac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(Message, frozen=True):
    """First frame on a connection between workers, from the one that connects; see handshake.py.

    purpose is "control" (follower to lead), "kv" (prefill worker to decode worker), or "stage" (emulated
    engine: one pipeline stage to the next).
    """

    protocol: int
    worker: str
    purpose: str
    nonce: Nonce


class Challenge(Message, frozen=True):
    """Answer to a Hello: a nonce to be signed, too, and the proof that the listener knows the secret."""

    nonce: Nonce
    proof: Hmac


class Proof(Message, frozen=True):
    """Answer to a Challenge: the proof that who connects knows the secret. Whatever the connection is for
    follows; without it, or with a wrong one, the listener closes the connection."""

    proof: Hmac


class SequenceStart(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a replica's workers learn of a request once, with its first step (or again after a preemption).

    With a target, the KV cache of tokens [target_tokens, end_token) is sent there. history has the tokens
    known so far, the client's prompt_tokens first, if the sampling asks for it.
    """

    request_id: str
    sampling: Sampling
    history: tuple[int, ...] = ()
    prompt_tokens: int = 0
    target: str = ""
    target_tokens: int = 0
    end_token: int = 0


class SequenceStep(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One request in a step: the tokens to run, from which position on, and the blocks that are new in its
    table. If `samples`, output `index` is chosen after the last of them."""

    request_id: str
    tokens: tuple[int, ...]
    position: int
    index: int
    samples: bool
    blocks: tuple[int, ...] = ()


class Step(Message, frozen=True):
    """Lead to its replica: forget those that were preempted, learn of others, then run these sequences."""

    step: int
    starts: tuple[SequenceStart, ...]
    sequences: tuple[SequenceStep, ...]
    drops: tuple[str, ...] = ()


class ExpectKv(Message, frozen=True):
    """Lead to its replica: the KV cache of tokens [first, end) of a request will arrive, for the blocks of
    its table. Answered by ExpectingKv."""

    request_id: str
    table: tuple[int, ...]
    first_token: int
    end_token: int


class ExpectingKv(Message, frozen=True):
    """A follower to its lead: ready for what an ExpectKv announced."""

    request_id: str


class Release(Message, frozen=True):
    """Lead to its replica, in order with the steps: forget these requests; their blocks go to others."""

    request_ids: tuple[str, ...]


class StepResult(Message, frozen=True):
    """Last stage to the lead: the sampled tokens of a step, for the sequences that sample, in their order.

    Of those in `broken` there is no token: pairs of a request that failed by itself, and why.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()


class Passed(Message, frozen=True):
    """One emulated pipeline stage to the next: this step's activations have left."""

    step: int


class KvLanded(Message, frozen=True):
    """A decode worker to its lead: all of this request's KV that the worker holds has arrived."""

    request_id: str
    worker: str
    bytes_received: int
    seconds: float


class KvSent(Message, frozen=True):
    """A prefill worker to its lead: it holds nothing of this request any more (sent, or given up)."""

    request_id: str
    worker: str


class KvOffer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A transport that a sender has, and what a receiver must know to use it (a name of memory, say)."""

    transport: str
    handle: str


class KvOpen(Message, frozen=True):
    """First frame of a KV connection after its introduction: the sender's pool, and its transports, best
    first.

    The pool holds layers [first, end) x global KV heads [first, end) of `slots` tokens. host is equal for
    processes that can share memory. Answered by KvOpened.
    """

    host: str
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    slots: int
    head_dim: int
    dtype: str
    offers: tuple[KvOffer, ...]


class KvOpened(Message, frozen=True):
    """The transport that the receiver takes; "" for none, and why."""

    transport: str
    problem: str = ""


class KvSlice(Message, frozen=True):
    """Header of a part of a request's KV cache: layers [first, end) x global KV heads [first, end) x tokens
    [first, end), of `payload_bytes`. The tokens of a (layer, head) cell come in order. Answered by KvTaken.

    If the receiver pulls, `runs` are the slots [first, end) of these tokens in the sender's pool, pairs of
    int64, little-endian; they stay as they are until the answer. Otherwise the payload follows.
    """

    request_id: str
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    first_token: int
    end_token: int
    payload_bytes: int
    runs: bytes = b""


class KvTaken(Message, frozen=True):
    """The receiver has, or has no use for, so many further slices, in the order they were sent."""

    slices: int


SupervisorToWorker = Configure | Connect | Shutdown | ReserveKv | Prefill | Decode | Cancel | Ping
WorkerToSupervisor = (
    Listening | Ready | Failed | Pong | Reserved | StepOutput | KvMoved | RequestFailed | Released | Load
)
KvConnection = KvOpen | KvOpened | KvSlice | KvTaken
WorkerToWorker = (
    Hello
    | Challenge
    | Proof
    | Step
    | ExpectKv
    | ExpectingKv
    | Release
    | StepResult
    | Passed
    | KvLanded
    | KvSent
    | KvConnection
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SupervisorToWorker | WorkerToSupervisor | WorkerToWorker)


def encode(message: Message) -> bytes:
    """The frame of a message, length included."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def body_length(head: bytes | bytearray, limit_bytes: int = MAX_FRAME_BYTES) -> int:
    """The length of a frame's body from its first HEAD_BYTES.

    Raises
    ------
    BadFrame : over the limit
    """
    length = int.from_bytes(head, "little")
    if length > limit_bytes:
        raise BadFrame(f"a frame of {length} bytes is over the limit of {limit_bytes}")
    return length


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message of a frame's body.

    Raises
    ------
    BadFrame : not one of ours
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message: {error}") from error

"""Messages between workers: their handshake, the steps of a replica, and KV caches on their way."""

from __future__ import annotations

from typing import Annotated

import msgspec

from runtime.protocol.message import Message, Sampling, TokenLogprobs

NONCE_BYTES = 32
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Hmac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


# the handshake


class Hello(Message, frozen=True):
    """First frame on a connection, from the side that connects (see handshake.py).

    purpose is "control" (executor to driver), "kv" (prefill worker to decode worker), "kv-windowed" (the
    same, for layers with a window), "heads" (worker of a stage to attention worker), "activations" (one hop
    of paths through ranges of layers to the next), "stage" (emulated engine: one pipeline stage to the next)
    or "worker" (a worker to its head, with Ray).
    """

    protocol: int
    worker: str
    purpose: str
    nonce: Nonce


class Challenge(Message, frozen=True):
    """Answer to a Hello: another nonce to sign, and the proof that the listener knows the secret."""

    nonce: Nonce
    proof: Hmac


class Proof(Message, frozen=True):
    """Answer to a Challenge: the proof that the connecting side knows the secret. Without a right one the
    listener closes the connection; after it comes what the connection is for."""

    proof: Hmac


# within a replica


class SequenceStart(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What workers learn of a request with its first step, and again after a preemption.

    With a target, the KV cache of tokens [target_tokens, end_token) is sent there. If the sampling needs it,
    history has the tokens so far, of which the first prompt_tokens are the client's.
    """

    request_id: str
    sampling: Sampling
    history: tuple[int, ...] = ()
    prompt_tokens: int = 0
    target: str = ""
    target_tokens: int = 0
    end_token: int = 0


class SequenceStep(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One request in a step: the tokens to run, the position of the first, and the new blocks of its tables,
    of which layers with a window have one of their own (WindowedLayers). If `samples`, output token `index`
    is chosen after the last. Of a range of layers, those from first_layer on run."""

    request_id: str
    tokens: tuple[int, ...]
    position: int
    index: int
    samples: bool
    blocks: tuple[int, ...] = ()
    first_layer: int = 0
    windowed_blocks: tuple[int, ...] = ()


class HeadGrant(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Further blocks for one KV head of a request, on the device of its lane that holds it. Lanes, heads of a
    lane and its devices are numbered from 0."""

    request_id: str
    lane: int
    head: int
    device: int
    blocks: tuple[int, ...]


class HeadHaul(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Copy tokens [first, end) of one KV head of a request from one device of its lane to another, which gets
    these further blocks for it; if `switches`, that device holds the head from now on."""

    request_id: str
    lane: int
    head: int
    source: int
    target: int
    first_token: int
    end_token: int
    blocks: tuple[int, ...]
    switches: bool = False


class Step(Message, frozen=True):
    """Driver to executors: forget the preempted requests, learn of new ones, then run these sequences.

    In a replica with attention workers, KV heads first get blocks (grants) and move (hauls)."""

    step: int
    starts: tuple[SequenceStart, ...]
    sequences: tuple[SequenceStep, ...]
    preempted: tuple[str, ...] = ()
    grants: tuple[HeadGrant, ...] = ()
    hauls: tuple[HeadHaul, ...] = ()


class ExpectKv(Message, frozen=True):
    """Driver to executors: the KV cache of a request's tokens [first, end) will arrive; the tables name its
    blocks, windowed_table those of layers with a window, to which only the last tokens come. Answered by
    ExpectingKv."""

    request_id: str
    table: tuple[int, ...]
    first_token: int
    end_token: int
    windowed_table: tuple[int, ...] = ()


class ExpectingKv(Message, frozen=True):
    """Executor to driver: ready for what an ExpectKv announced."""

    request_id: str


class Release(Message, frozen=True):
    """Driver to its replica, in order with the steps: forget these requests; others get their blocks."""

    request_ids: tuple[str, ...]


class NewRole(Message, frozen=True):
    """Driver to executors, after all steps and releases: take the role of the Configure that the front end
    has sent to every worker of the replica."""


class StepResult(Message, frozen=True):
    """Last stage to the driver: the tokens of a step, in the order of its sequences that sample.

    broken has pairs of a request that failed by itself and why; lost has requests whose KV heads were on an
    attention worker that is lost. Neither have tokens.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()
    lost: tuple[str, ...] = ()


class HeadsLost(Message, frozen=True):
    """Executor to driver: the connection of `worker`, the executor, to an attention worker is gone, and with
    it the heads that were there."""

    worker: str
    attention_worker: str


class HeadsReady(Message, frozen=True):
    """Executor to driver: `worker`, the executor, is connected again to an attention worker, which holds none
    of its heads."""

    worker: str
    attention_worker: str


class HeadsProfiled(Message, frozen=True):
    """Executor to driver: the profiles of its lane's devices (HeadDevice.profile), measured."""

    worker: str
    profiles: tuple[tuple[float, float, float, float, float], ...]


class Passed(Message, frozen=True):
    """Emulated pipeline stage to the next one: the activations of this step have left, so many seconds later
    than the stage's time says."""

    step: int
    late_s: float = 0.0


class KvLanded(Message, frozen=True):
    """Decode executor to driver: its whole share of this request's KV cache has arrived."""

    request_id: str
    worker: str
    bytes_received: int
    seconds: float


class KvSent(Message, frozen=True):
    """Prefill executor to driver: it holds nothing of this request any more (sent, or given up)."""

    request_id: str
    worker: str


# on a KV connection: prefill worker to decode worker


class KvOffer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A transport that the sender offers, and what the receiver needs to use it (a name of memory, say)."""

    transport: str
    handle: str


class KvOpen(Message, frozen=True):
    """First frame of a KV connection after the handshake: the sender's pool and its transports.

    The pool holds layers [first, end) x global KV heads [first, end) of `slots` tokens, each with `sides`
    vectors of head_dim values: key and value, or one that is both. host is equal for
    processes that can share memory. The offers are best first. Answered by KvOpened.
    """

    host: str
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    slots: int
    sides: int
    head_dim: int
    dtype: str
    offers: tuple[KvOffer, ...]


class KvOpened(Message, frozen=True):
    """The transport that the receiver chooses; "" for none, with the reason."""

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
    """The receiver has taken, or dropped, this many more slices, in the order in which they were sent."""

    slices: int


# on a connection for activations: one hop of paths to the next


class ActivationPart(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Some tokens of a request on their way along its path: the number of the path (see JoinPath), the
    position of the first token, and whether output token `index` is to be sampled after the last. hops_s are
    the seconds that they took at each hop so far (see HopTimes)."""

    request_id: str
    number: int
    tokens: tuple[int, ...]
    position: int
    index: int
    samples: bool
    hops_s: tuple[float, ...] = ()


class Activations(Message, frozen=True):
    """What a step has for one next hop. The payload of so many bytes follows: [tokens of all parts, hidden]
    in the type of the launch, part after part. Answered by ActivationsTaken."""

    parts: tuple[ActivationPart, ...]
    payload_bytes: int


class ActivationsTaken(Message, frozen=True):
    """The next hop has taken this many more Activations, in the order in which they were sent."""

    count: int


BetweenWorkers = (
    Hello
    | Challenge
    | Proof
    | Step
    | ExpectKv
    | ExpectingKv
    | Release
    | NewRole
    | StepResult
    | HeadsLost
    | HeadsReady
    | HeadsProfiled
    | Passed
    | KvLanded
    | KvSent
    | KvOpen
    | KvOpened
    | KvSlice
    | KvTaken
    | Activations
    | ActivationsTaken
)

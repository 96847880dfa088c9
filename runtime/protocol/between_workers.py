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
    """First frame on a connection between workers, from the one that connects; see handshake.py.

    purpose is "control" (executor to driver), "kv" (prefill worker to decode worker), or "stage" (emulated
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


# within a replica


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
    """Driver to executors: forget the preempted requests, learn of new ones, then run these sequences."""

    step: int
    starts: tuple[SequenceStart, ...]
    sequences: tuple[SequenceStep, ...]
    preempted: tuple[str, ...] = ()


class ExpectKv(Message, frozen=True):
    """Driver to executors: the KV cache of tokens [first, end) of a request will arrive, for the blocks of
    its table. Answered by ExpectingKv."""

    request_id: str
    table: tuple[int, ...]
    first_token: int
    end_token: int


class ExpectingKv(Message, frozen=True):
    """An executor to its driver: ready for what an ExpectKv announced."""

    request_id: str


class Release(Message, frozen=True):
    """Driver to executors, in order with the steps: forget these requests; their blocks go to others."""

    request_ids: tuple[str, ...]


class StepResult(Message, frozen=True):
    """Last stage to the driver: the sampled tokens of a step, for the sequences that sample, in their order.

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
    """A decode worker to its driver: all of this request's KV that the worker holds has arrived."""

    request_id: str
    worker: str
    bytes_received: int
    seconds: float


class KvSent(Message, frozen=True):
    """A prefill worker to its driver: it holds nothing of this request any more (sent, or given up)."""

    request_id: str
    worker: str


# on a KV connection: prefill worker to decode worker


class KvOffer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A transport that a sender has, and what a receiver must know to use it (a name of memory, say)."""

    transport: str
    handle: str


class KvOpen(Message, frozen=True):
    """First frame of a KV connection after the handshake: the sender's pool, and its transports, best
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


BetweenWorkers = (
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
    | KvOpen
    | KvOpened
    | KvSlice
    | KvTaken
)

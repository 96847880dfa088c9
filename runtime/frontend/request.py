"""A request of the front end: its stream of tokens, its state and its record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from cost_model.errors import HexGen2Error
from runtime.frontend.replica import Replica
from runtime.frontend.request_state import TRANSITIONS, RequestEvent, RequestState
from runtime.protocol.from_workers import TokenOutput
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Decode, JoinPath, NextToken, Prefill, ReserveKv
from runtime.routing.paths.range_graph import RangePath
from runtime.routing.router import Route

Outcome = Literal["", "stop", "length", "cancelled", "timeout", "failed"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from: whose it is, the id that its client knows, the seconds that the client
    gives it from now on, if it says so, and the client's own span (W3C Trace Context)."""

    client: str = ""
    request_id: str = ""
    timeout_s: float | None = None
    traceparent: str = ""


UNKNOWN = Origin()


@dataclass(slots=True)
class RequestRecord:
    """What happened to a request. Times are seconds on the monotonic clock; 0 means "not yet".

    Once kv_arrived, the decode replica has all of the KV cache and needs the prefill replica no more. The
    prefill replica had the first cached_tokens of the prompt from other requests. Each of the resumes went on
    from the tokens so far, with the replicas and the request_id of the last one; client_request_id is the one
    that the client knows. traceparent is the span (W3C Trace Context) that the request is part of. path has
    the replicas, where the request takes one through ranges of layers; the first and the last of them stand
    for those that prefill and decode.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    prefill_replica: str = ""
    decode_replica: str = ""
    routed_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    output_tokens: int = 0
    kv_bytes: int = 0
    kv_s: float = 0.0
    kv_arrived: bool = False
    kv_arrived_s: float = 0.0
    cached_tokens: int = 0
    resumes: int = 0
    outcome: Outcome = ""
    client: str = ""
    client_request_id: str = ""
    traceparent: str = ""
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a replica with a request on board; number is its place among all. The replica had made no
    token for the request, or had (made_tokens)."""

    number: int
    replica_id: str
    made_tokens: bool


class Observer(Protocol):
    """Notified of every token and of the end of every request; the metrics are one."""

    def token_gap(self, seconds: float) -> None:
        """The time between two tokens of a request (ITL)."""

    def ended(self, record: RequestRecord) -> None:
        """A request that was accepted has its final outcome."""


class Request:
    """A request, and an async iterator of its tokens, in order and each once.

    Iteration raises Unavailable, or Broken, if the request cannot be finished. `holders` are the replicas
    that KV cache is accounted to; `tokens` are the prompt and the output so far, `begun_tokens` of which were
    there when it began on its route; `deaths` are of replicas that it may have killed; `boarded` has how much
    had been heard of each replica by then (Replica.heard).
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        record: RequestRecord,
        origin: Origin = UNKNOWN,
        usual_output_tokens: int = 0,
    ):
        self.prompt, self.sampling, self.record = prompt, sampling, record
        self.origin, self._usual_output_tokens = origin, usual_output_tokens
        self.tokens = list(prompt)
        self.route: Route | None = None
        self.state = RequestState.WAITING
        self.holders: dict[str, Replica] = {}
        self.deaths: list[Death] = []
        self.boarded: dict[str, int] = {}
        self.begun_tokens = 0
        self.deadlines: list[asyncio.TimerHandle] = []
        self._events: asyncio.Queue[TokenOutput | HexGen2Error | None] = asyncio.Queue()

    def on(self, event: RequestEvent) -> None:
        """Change the state by an event."""
        self.state = TRANSITIONS.next(self.state, event, self.request_id)

    @property
    def has_ended(self) -> bool:
        return self.state is RequestState.ENDED

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def client(self) -> str:
        return self.origin.client

    @property
    def client_request_id(self) -> str:
        """The id that the client knows, or else our own."""
        return self.origin.request_id or self.request_id

    @property
    def cost_tokens(self) -> int:
        """Tokens that the request is expected to take: an answer is often shorter than it may be."""
        return len(self.prompt) + min(self.sampling.max_tokens, self._usual_output_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens to prefill: if it is resumed, the output so far as well."""
        return len(self.tokens)

    @property
    def capacity_tokens(self) -> int:
        """KV tokens at most: the prompt and the output."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def output_limit(self) -> int:
        """Output tokens that it may still have."""
        return self.capacity_tokens - len(self.tokens)

    @property
    def one_token(self) -> bool:
        """Whether one token is missing."""
        return self.output_limit == 1

    def __aiter__(self) -> Request:
        return self

    async def __anext__(self) -> TokenOutput:
        event = await self._events.get()
        if isinstance(event, TokenOutput):
            return event
        self._events.put_nowait(event)
        if event is None:
            raise StopAsyncIteration
        raise event

    def put(self, event: TokenOutput | HexGen2Error | None) -> None:
        """A token, or the end: None if it ended well."""
        if isinstance(event, TokenOutput):
            self.tokens.append(event.token)
        self._events.put_nowait(event)

    # KV cache

    def hold(self, replica: Replica, tokens: int, target: str = "") -> None:
        """Account for KV cache on a replica, from which it is sent on to `target`."""
        replica.hold(self.request_id, tokens, target)
        self.boarded[replica.replica_id] = replica.heard
        self.holders[replica.replica_id] = replica

    def made_tokens(self, replica_id: str) -> bool:
        """Whether a replica of the request's route has made tokens for it: the first one comes from where it
        was prefilled, or from all replicas of its path."""
        made = len(self.tokens) - self.begun_tokens
        elsewhere = not self.record.path and replica_id != self.record.prefill_replica
        return made > elsewhere

    def release(self, replica_id: str) -> None:
        """Free what is accounted to a replica; nothing if that was done before."""
        if replica := self.holders.pop(replica_id, None):
            replica.release(self.request_id)

    # messages to the replicas

    def reserve_kv(self) -> ReserveKv:
        """The first message to the decode replica."""
        return ReserveKv(
            request_id=self.request_id,
            prompt=tuple(self.tokens),
            capacity_tokens=self.capacity_tokens,
            client_request_id=self.origin.request_id,
        )

    def prefill(self, target: str, target_tokens: int = 0) -> Prefill:
        """To the prefill replica; target is the replica that decodes, "" for the same one. The target has the
        KV cache of the first target_tokens tokens."""
        return Prefill(
            request_id=self.request_id,
            prompt=tuple(self.tokens),
            sampling=self.sampling,
            target=target,
            target_tokens=target_tokens,
            index=self.record.output_tokens,
            client_request_id=self.origin.request_id,
        )

    def decode(self, first: TokenOutput) -> Decode:
        """To the decode replica, once the prefill replica has produced the first token."""
        return Decode(
            request_id=self.request_id,
            last_token=first.token,
            index=first.index + 1,
            sampling=self.sampling,
        )

    def join_path(self, place: int, path: RangePath, next_worker: str, number: int, timed: bool) -> JoinPath:
        """To the replica at a place of the request's path; next_worker drives the one after it, number is the
        path's."""
        has_prompt = place == 0 or (not next_worker and self.sampling.needs_history)
        return JoinPath(
            request_id=self.request_id,
            number=number,
            first_layer=path[place].first,
            hops=len(path),
            next_worker=next_worker,
            sampling=self.sampling,
            index=self.record.output_tokens,
            tokens=tuple(self.tokens) if has_prompt else (),
            timed=timed,
            client_request_id=self.origin.request_id,
        )

    def next_token(self) -> NextToken:
        """To the first replica of the request's path: its latest token."""
        return NextToken(
            request_id=self.request_id,
            token=self.tokens[-1],
            position=len(self.tokens) - 1,
            index=self.record.output_tokens,
        )

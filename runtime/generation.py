"""One request in work: its stream of tokens, its state, and the record that stays of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from cost_model.errors import HexGen2Error
from runtime.messages import Decode, Expect, Prefill, Sampling, TokenOutput
from runtime.replica import Replica
from runtime.router import Route

Phase = Literal["waiting", "reserving", "prefilling", "decoding", "ended"]
Outcome = Literal["", "stop", "length", "cancelled", "failed"]


@dataclass(slots=True)
class RequestRecord:
    """What happened to a request. Times are seconds on the monotonic clock; 0 means "not yet".

    Once kv_arrived, the decode replica has all of the KV cache and needs the prefill replica no more. The
    prefill replica had the first cached_tokens of the prompt from other requests.
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
    cached_tokens: int = 0
    outcome: Outcome = ""


class Observer(Protocol):
    """Told of every token and of every request's end; the metrics are one."""

    def token_gap(self, seconds: float) -> None:
        """The time between two tokens of a request (ITL)."""

    def ended(self, record: RequestRecord) -> None:
        """A request that was accepted has its final outcome."""


class Generation:
    """One request in work: an async iterator of its tokens, in order and each once.

    Iteration raises Unavailable if the request cannot be finished. `holders` are the replicas that KV
    cache is accounted to.
    """

    def __init__(
        self, prompt: tuple[int, ...], sampling: Sampling, pinned: Route | None, record: RequestRecord
    ):
        self.prompt, self.sampling, self.pinned, self.record = prompt, sampling, pinned, record
        self.route: Route | None = None
        self.phase: Phase = "waiting"
        self.holders: dict[str, Replica] = {}
        self._events: asyncio.Queue[TokenOutput | HexGen2Error | None] = asyncio.Queue()

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def capacity_tokens(self) -> int:
        """KV tokens at most: the prompt and the output."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def one_token(self) -> bool:
        return self.sampling.max_tokens == 1

    def __aiter__(self) -> Generation:
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
        self._events.put_nowait(event)

    # KV cache

    def hold(self, replica: Replica, tokens: int) -> None:
        """Account for KV cache on a replica."""
        replica.hold(self.request_id, tokens)
        self.holders[replica.replica_id] = replica

    def release(self, replica_id: str) -> None:
        """Free what is accounted to a replica; nothing if that was done before."""
        if replica := self.holders.pop(replica_id, None):
            replica.release(self.request_id)

    # what the replicas are told

    def expect(self) -> Expect:
        """To the decode replica, first."""
        return Expect(request_id=self.request_id, prompt=self.prompt, capacity_tokens=self.capacity_tokens)

    def prefill(self, target: str, target_tokens: int = 0) -> Prefill:
        """To the prefill replica; target is the replica that decodes, "" for the same one. The target has the
        KV cache of the first target_tokens tokens."""
        return Prefill(
            request_id=self.request_id,
            prompt=self.prompt,
            sampling=self.sampling,
            target=target,
            target_tokens=target_tokens,
        )

    def decode(self, first: TokenOutput) -> Decode:
        """To the decode replica, once the prefill replica has produced the first token."""
        return Decode(
            request_id=self.request_id,
            last_token=first.token,
            index=first.index + 1,
            sampling=self.sampling,
        )

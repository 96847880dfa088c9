"""Which requests run in a replica's next step: decodes and chunks of prompts together, in a pipeline.

Every request is a list of tokens. The first `computed` of them have their keys and values in its blocks, or
will have once the steps in flight are done. A step runs some of the rest; the step that runs the last token
samples the next one. So a decode is a request with one token to run, a prompt is one with many, and a request
that was preempted (it gave its blocks up and is recomputed) is a prompt again.

This is bookkeeping only. The driver's main thread owns it; other threads share only the block pool.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from runtime.engine.faults import describe
from runtime.kv_cache.blocks import BlockPool
from runtime.logs import about
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step
from runtime.protocol.from_workers import TokenOutput
from runtime.protocol.message import TokenLogprobs
from runtime.protocol.to_workers import Decode, Prefill
from runtime.worker.scheduled_request import Reservation, ScheduledRequest, State

log = logging.getLogger(__name__)

MAX_HISTORY_TOKENS = 4_000_000
"""About how many tokens of history requests with penalties may add to one step, which bounds its frame."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The outcome of a step: tokens for the front end, and requests that are to be freed everywhere."""

    outputs: tuple[TokenOutput, ...]
    released: tuple[str, ...]


class Scheduler:
    """Makes the steps of one replica from its requests.

    Parameters
    ----------
    max_batch : requests that decode together, over all steps in flight
    max_prefill_tokens : prompt tokens in one step
    max_mixed_tokens : prompt tokens in one step while requests decode, which these delay
    in_flight : most steps under way at the same time, one per pipeline stage or more. A request decodes in
        one of them; chunks of a prompt follow each other
    pool : blocks of the KV cache; expected requests hold theirs already

    Notes
    -----
    First come, first served: a prompt that finds no blocks holds back those behind it. Only prompts for other
    replicas pass those of this one that find no room: they decode elsewhere, so that they need no place in
    the batch, and memory is reserved for them there already. When a decode finds no block, the request that
    came last of those that decode here gives up its own and goes to the head of the queue.

    Attributes
    ----------
    growing : requests that will need more blocks, as many of which should stay free; any thread may read it
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_prefill_tokens: int,
        max_mixed_tokens: int,
        in_flight: int,
        pool: BlockPool,
    ) -> None:
        self._max_batch = max_batch
        self._max_prefill_tokens, self._max_mixed_tokens = max_prefill_tokens, max_mixed_tokens
        self._most_in_flight, self._pool = in_flight, pool
        self._requests: dict[str, ScheduledRequest] = {}
        self._waiting: deque[ScheduledRequest] = deque()
        self._outgoing: deque[ScheduledRequest] = deque()
        self._joining: deque[ScheduledRequest] = deque()
        self._running: dict[str, ScheduledRequest] = {}
        self._in_flight: dict[int, list[tuple[ScheduledRequest, int, bool]]] = {}
        self._preempted: list[str] = []
        self._faults = dict[str, str]()
        self._next_step = self._arrivals = 0
        self.preemptions = self.growing = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_expected(self, request_id: str) -> bool:
        """Whether a request still waits for its KV cache or its Decode."""
        request = self._requests.get(request_id)
        return request is not None and request.state is State.EXPECTED

    def is_over(self, request_id: str) -> bool:
        """Whether a request is cancelled or unknown."""
        request = self._requests.get(request_id)
        return request is None or request.cancelled

    # -- arrivals

    def expect(self, reservation: Reservation) -> None:
        """Add a request whose blocks are taken and whose KV cache will arrive."""
        request = self._add(reservation.request_id, State.EXPECTED, reservation.prompt)
        request.computed = len(reservation.prompt)
        request.cached_tokens = reservation.cached_tokens
        request.blocks, request.digests = reservation.blocks, reservation.digests
        request.published = reservation.cached_tokens // self._pool.block_tokens

    def prefill(self, message: Prefill) -> None:
        """Add a prompt to run. If it ends with its first token, nothing is sent to the target."""
        request = self._add(message.request_id, State.WAITING, message.prompt)
        request.prompt_tokens -= message.index
        request.index, request.sampling = message.index, message.sampling
        if message.index + 1 < message.sampling.max_tokens:
            request.target, request.target_tokens = message.target, message.target_tokens
        self._queue_of(request).append(request)

    def decode(self, message: Decode) -> str:
        """Start to decode an expected request once its KV cache is here; returns why it can't run, or ""."""
        request = self._requests.get(message.request_id)
        if request is None or request.state is not State.EXPECTED or request.to_run:
            return "no room was reserved for its KV cache"
        request.tokens.append(message.last_token)
        request.prompt_tokens -= message.index - 1
        request.index, request.sampling = message.index, message.sampling
        self._join_if_complete(request)
        return ""

    def landed(self, request_id: str) -> None:
        """Note that all of an expected request's KV cache has arrived."""
        request = self._requests.get(request_id)
        if request is not None and request.state is State.EXPECTED:
            request.landed = True
            request.publish(self._pool, request.computed)
            self._join_if_complete(request)

    def sent(self, request_id: str) -> bool:
        """Note that all of a prefill's KV cache was sent; True if the request can be freed now."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.sent = True
        over = request.state is State.SENDING or request.cancelled
        return over and not request.steps and self._forget(request)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; True if it can be freed now, False while a step or a transfer still uses it."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.cancelled = True
        sending = request.state is State.SENDING or (request.target and request.introduced)
        if request.steps or (sending and not request.sent):
            return False
        return self._forget(request)

    def spoil(self, request_id: str) -> bool:
        """Compute a request again from its tokens so far: part of its KV cache is lost. Tokens of steps in
        flight are dropped, since they may be wrong. False if it is not running, or spoiled already."""
        request = self._running.get(request_id)
        if request is None or request.spoiled:
            return False
        request.spoiled = True
        if not (request.steps or request.cancelled):
            self._preempt(request)
        return True

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """All tokens of a request so far."""
        return self._requests[request_id].tokens

    # -- steps

    def next_step(self) -> Step | None:
        """The next step to run; None while the pipeline is full or no request is ready."""
        if len(self._in_flight) >= self._most_in_flight:
            return None
        self._admit_landed()
        batch = [(request, 1) for request in self._decodes()]
        decoding = any(request.decodes for request in self._running.values())
        batch += self._chunks(self._max_mixed_tokens if decoding else self._max_prefill_tokens)
        return self._issue(batch) if batch else None

    def take_faults(self) -> dict[str, str]:
        """Requests that could not be put into a step since the last call, and why. The caller must fail them
        and cancel them here."""
        faults, self._faults = self._faults, {}
        return faults

    def complete(
        self,
        step: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] = (),
        broken: Collection[str] = (),
        lost: Collection[str] = (),
    ) -> Completed:
        """Take the tokens of a step, one per request that sampled, in its order. Broken requests have none
        and stay until they are cancelled; those whose KV cache was lost have none and are spoiled."""
        outputs: list[TokenOutput] = []
        released: list[str] = []
        drawn = iter(zip(tokens, logprobs or (None,) * len(tokens), strict=True))
        for request, end, samples in self._in_flight.pop(step):
            request.steps -= 1
            self._pool.passed(request.request_id, end, samples)
            reason = ""
            if samples and request.request_id in broken:
                if not request.cancelled:
                    continue
            elif samples and request.request_id not in lost:
                token, detail = next(drawn)
                if not request.spoiled:
                    reason = self._take(request, token, detail, outputs)
            if request.spoiled and not (request.steps or request.cancelled):
                self._preempt(request)
                continue
            if self._is_over(request, samples, reason):
                self._forget(request)
                released.append(request.request_id)
        return Completed(tuple(outputs), tuple(released))

    # -- internals

    def _add(self, request_id: str, state: State, prompt: tuple[int, ...]) -> ScheduledRequest:
        self._arrivals += 1
        request = ScheduledRequest(request_id, state, list(prompt), len(prompt), self._arrivals)
        self._requests[request_id] = request
        return request

    def _take(
        self, request: ScheduledRequest, token: int, detail: TokenLogprobs | None, outputs: list[TokenOutput]
    ) -> str:
        """Add a request's next token; returns why it is the last one, or ""."""
        reason = request.sampling.finish_reason(token, request.index)
        if not request.cancelled:
            first = len(request.tokens) == request.prompt_tokens
            output = TokenOutput(
                request_id=request.request_id,
                index=request.index,
                token=token,
                finish_reason=reason,
                logprobs=detail,
                cached_tokens=request.cached_tokens if first else 0,
            )
            outputs.append(output)
        request.tokens.append(token)
        request.index += 1
        # To the back of the queue, so that all requests progress at the same rate.
        if self._running.pop(request.request_id, None) and not request.target:
            self._running[request.request_id] = request
        return reason

    def _is_over(self, request: ScheduledRequest, samples: bool, reason: str) -> bool:
        if request.target:
            if samples:
                request.state = State.SENDING
            over = samples or request.cancelled
            return over and request.sent and not request.steps
        return bool(reason) or (request.cancelled and not request.steps)

    def _admit_landed(self) -> None:
        while self._joining and self.growing < self._max_batch:
            self._enter(self._joining.popleft())

    def _enter(self, request: ScheduledRequest) -> None:
        """Let a request take part in steps."""
        request.state = State.RUNNING
        self._running[request.request_id] = request
        self.growing += not request.target

    def _leave(self, request: ScheduledRequest) -> None:
        """Take a request out of the steps, if it is in them."""
        if self._running.pop(request.request_id, None):
            self.growing -= not request.target

    def _queue_of(self, request: ScheduledRequest) -> deque[ScheduledRequest]:
        """Where a request waits for blocks."""
        return self._outgoing if request.target else self._waiting

    def _decodes(self) -> list[ScheduledRequest]:
        """The requests that decode in this step, its share of all; each has a slot for its token."""
        ready = [
            r
            for r in self._running.values()
            if r.to_run == 1 and not (r.steps or r.target or r.cancelled or r.spoiled)
        ]
        share = -(-self.growing // self._most_in_flight)
        chosen: list[ScheduledRequest] = []
        for request in ready[:share]:
            end = request.computed + 1  # the last token of a prompt may lack a block
            if (
                request.state is State.RUNNING
                and self._grow(request)
                and self._pool.extend(request.request_id, end) == end
            ):
                chosen.append(request)
        return [request for request in chosen if request.state is State.RUNNING]

    def _grow(self, request: ScheduledRequest) -> bool:
        """Make room for one more token; False if the request itself was preempted."""
        while request.computed >= len(request.blocks) * self._pool.block_tokens:
            if block := self._pool.allocate(1, owner=request.request_id):
                request.blocks += block
                continue
            movable = (
                r
                for r in self._running.values()
                if not (r.steps or r.target) and self._pool.helps(r.request_id, request.request_id)
            )
            youngest = max(movable, key=lambda r: r.arrival)
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: ScheduledRequest) -> None:
        """Take a request's blocks away; it is recomputed when there is room again."""
        self._leave(request)
        request.give_up_blocks(self._pool)
        request.state = State.WAITING
        if request.introduced:
            request.introduced = False
            self._preempted.append(request.request_id)
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _chunks(self, limit: int) -> list[tuple[ScheduledRequest, int]]:
        """Prompts and chunks of prompts for this step, at most `limit` tokens in all."""
        chunks: list[tuple[ScheduledRequest, int]] = []
        for request in self._running.values():
            unfinished = request.to_run > 1 or (request.target and request.to_run)
            if unfinished and limit > 0 and not (request.cancelled or request.spoiled):
                asked = request.computed + min(request.to_run, limit)
                if (count := self._pool.extend(request.request_id, asked) - request.computed) > 0:
                    chunks.append((request, count))
                    limit -= count
        histories = 0
        while limit > 0 and (begun := self._next_prompt()):
            asked = begun.computed + min(begun.to_run, limit)
            count = self._pool.extend(begun.request_id, asked) - begun.computed
            chunks.append((begun, count))
            limit -= count
            # The next one may share these blocks: each layer stores all keys and values before it reads any.
            begun.publish(self._pool, begun.computed + count)
            histories += len(begun.tokens) * begun.sampling.needs_history
            if histories > MAX_HISTORY_TOKENS:
                break
        return chunks

    def _next_prompt(self) -> ScheduledRequest | None:
        """Take the next prompt that begins out of its queue; None if there is no room for one now."""
        own, others = self._waiting, self._outgoing
        # What has no room while a device is lost waits beside the others.
        first = next((each for each in own if self._pool.fits(len(each.tokens))), None)
        own_is_first = first and not (others and others[0].arrival < first.arrival)
        if first is not None and own_is_first and self._begins(first):
            own.remove(first)
            return first
        if others and self._begins(others[0]):
            return others.popleft()
        return None

    def _begins(self, request: ScheduledRequest) -> bool:
        """`_begin`, with an exception noted for `take_faults`."""
        try:
            return self._begin(request)
        except Exception as error:
            log.exception("a request could not begin", extra=about(attempt=request.request_id))
            self._faults[request.request_id] = describe(error)
            return False

    def _begin(self, request: ScheduledRequest) -> bool:
        """Let a request run; False if the batch or the KV cache has no room for it now."""
        if not request.target and self.growing >= self._max_batch:
            return False
        if not request.take_blocks(self._pool, self.growing):
            return False
        self._enter(request)
        return True

    def _issue(self, batch: list[tuple[ScheduledRequest, int]]) -> Step:
        step, self._next_step = self._next_step, self._next_step + 1
        starts: list[SequenceStart] = []
        sequences: list[SequenceStep] = []
        flight: list[tuple[ScheduledRequest, int, bool]] = []
        for request, count in batch:
            if not request.introduced:
                starts.append(request.introduction())
                request.introduced = True
            first, end = request.computed, request.computed + count
            samples = end == len(request.tokens)
            sequences.append(
                SequenceStep(
                    request_id=request.request_id,
                    tokens=tuple(request.tokens[first:end]),
                    position=first,
                    index=request.index,
                    samples=samples,
                    blocks=tuple(request.blocks[request.blocks_sent :]),
                    windowed_blocks=self._pool.unsent(request.request_id),
                )
            )
            flight.append((request, end, samples))
            request.blocks_sent, request.computed = len(request.blocks), end
            request.steps += 1
            request.publish(self._pool, end)
        preempted, self._preempted = tuple(self._preempted), []
        self._in_flight[step] = flight
        return Step(step=step, preempted=preempted, starts=tuple(starts), sequences=tuple(sequences))

    def _join_if_complete(self, request: ScheduledRequest) -> None:
        if request.landed and request.to_run:
            request.state = State.JOINING
            self._joining.append(request)

    def _forget(self, request: ScheduledRequest) -> bool:
        if request.state is State.WAITING:
            self._queue_of(request).remove(request)
        elif request.state is State.JOINING:
            self._joining.remove(request)
        self._leave(request)
        del self._requests[request.request_id]
        self._pool.release(request.blocks, request.request_id)
        return True

"""What a replica runs next: decodes and chunks of prompts together, over a paged KV cache and a pipeline.

Every request is a list of tokens, the first `computed` of which have their keys and values in its blocks, or
will have once the steps in flight are done. A step runs some of the rest; the one that runs the last token
samples the next. So a decode is a request with one token to run, a prompt one with many, and a request that
was preempted (it gave its blocks up, and is recomputed) is a prompt again.

Pure bookkeeping, owned by the lead's main thread; only the block pool is shared with others.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from runtime.kv_cache.blocks import BlockPool, Digest, prefix_digests
from runtime.logs import about
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step
from runtime.protocol.from_workers import TokenOutput
from runtime.protocol.message import Sampling, TokenLogprobs
from runtime.protocol.to_workers import Decode, Prefill
from runtime.worker.faults import describe

log = logging.getLogger(__name__)

MAX_HISTORY_TOKENS = 4_000_000
"""That requests with penalties bring along in one step, about, so that its frame is not too long."""


class _State(enum.Enum):
    EXPECTED = "KV cache or Decode still to come"
    WAITING = "has no blocks yet, or gave them up"
    JOINING = "could decode, waits for room in the batch"
    RUNNING = "is in the steps"
    SENDING = "prompt has run, KV cache is being sent"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks taken for a prompt whose KV cache arrives; that of the first `cached_tokens` is here."""

    request_id: str
    prompt: tuple[int, ...]
    blocks: list[int]
    cached_tokens: int
    digests: list[Digest]


@dataclass(slots=True)
class _Request:
    request_id: str
    state: _State
    tokens: list[int]
    prompt_tokens: int
    arrival: int
    index: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    target: str = ""
    target_tokens: int = 0
    computed: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    published: int = 0
    blocks_sent: int = 0
    introduced: bool = False
    steps: int = 0
    landed: bool = False
    sent: bool = False
    cancelled: bool = False

    @property
    def to_run(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether it has tokens and takes one a step: what a long prompt beside it would slow down."""
        return self.to_run <= 1 and not self.target and len(self.tokens) > self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Completed:
    """What a finished step leads to: tokens for the front end, requests to free everywhere."""

    outputs: tuple[TokenOutput, ...]
    released: tuple[str, ...]


class Scheduler:
    """Requests of one replica, in steps.

    Parameters
    ----------
    max_batch : requests that decode together, over all steps in flight
    max_prefill_tokens : prompt tokens in one step
    max_mixed_tokens : prompt tokens in one step while requests decode, which wait for them
    stages : pipeline depth; as many steps are in flight. A request decodes in one of them; chunks of a prompt
        follow each other
    pool : blocks of the KV cache; expected requests have taken theirs already

    Notes
    -----
    First come, first served: a prompt that finds no blocks holds back those behind it. When a decode finds
    none, the request that came last gives its own up and goes to the head of the queue.
    """

    def __init__(
        self, *, max_batch: int, max_prefill_tokens: int, max_mixed_tokens: int, stages: int, pool: BlockPool
    ) -> None:
        self._max_batch = max_batch
        self._max_prefill_tokens, self._max_mixed_tokens = max_prefill_tokens, max_mixed_tokens
        self._stages, self._pool = stages, pool
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._joining: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._in_flight: dict[int, list[tuple[_Request, bool]]] = {}
        self._preempted: list[str] = []
        self._faults = dict[str, str]()
        self._next_step = self._arrivals = 0
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_expected(self, request_id: str) -> bool:
        """Whether a request's KV cache or Decode is still to come."""
        request = self._requests.get(request_id)
        return request is not None and request.state is _State.EXPECTED

    @property
    def growing(self) -> int:
        """Requests that take more blocks as they go on: so many should stay free. Safe from any thread."""
        return len(self._running)

    # -- arrivals

    def expect(self, reservation: Reservation) -> None:
        """A request whose blocks are taken and whose KV cache will arrive."""
        request = self._add(reservation.request_id, _State.EXPECTED, reservation.prompt)
        request.computed = len(reservation.prompt)
        request.cached_tokens = reservation.cached_tokens
        request.blocks, request.digests = reservation.blocks, reservation.digests
        request.published = reservation.cached_tokens // self._pool.block_tokens

    def prefill(self, message: Prefill) -> None:
        """A prompt to run. Without a second token there is nothing to send to a target."""
        request = self._add(message.request_id, _State.WAITING, message.prompt)
        request.prompt_tokens -= message.index
        request.index, request.sampling = message.index, message.sampling
        if message.index + 1 < message.sampling.max_tokens:
            request.target, request.target_tokens = message.target, message.target_tokens
        self._waiting.append(request)

    def decode(self, message: Decode) -> str:
        """The rest of an expected request; why it can't be run, or ""."""
        request = self._requests.get(message.request_id)
        if request is None or request.state is not _State.EXPECTED or request.to_run:
            return "no room was reserved for its KV cache"
        request.tokens.append(message.last_token)
        request.prompt_tokens -= message.index - 1
        request.index, request.sampling = message.index, message.sampling
        self._join_if_complete(request)
        return ""

    def landed(self, request_id: str) -> None:
        """All of an expected request's KV cache is here."""
        request = self._requests.get(request_id)
        if request is not None and request.state is _State.EXPECTED:
            request.landed = True
            self._publish(request, request.computed)
            self._join_if_complete(request)

    def sent(self, request_id: str) -> bool:
        """All of a prefill's KV cache is out; True if the request can be freed now."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.sent = True
        over = request.state is _State.SENDING or request.cancelled
        return over and not request.steps and self._forget(request)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; True if it can be freed now, else a step or a transfer still uses it."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.cancelled = True
        sending = request.state is _State.SENDING or (request.target and request.introduced)
        if request.steps or (sending and not request.sent):
            return False
        return self._forget(request)

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """All tokens of a request so far."""
        return self._requests[request_id].tokens

    # -- steps

    def next_step(self) -> Step | None:
        """The next step to run, or None while the pipeline is full or nobody is ready."""
        if len(self._in_flight) >= self._stages:
            return None
        self._admit_landed()
        batch = [(request, 1) for request in self._decodes()]
        decoding = any(request.decodes for request in self._running.values())
        batch += self._chunks(self._max_mixed_tokens if decoding else self._max_prefill_tokens)
        return self._issue(batch) if batch else None

    def take_faults(self) -> dict[str, str]:
        """Requests that could not be put into a step since the last call, and why: to be failed, and
        cancelled here."""
        faults, self._faults = self._faults, {}
        return faults

    def complete(
        self,
        step: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] = (),
        broken: Collection[str] = (),
    ) -> Completed:
        """Take in the tokens of a step, one per request that sampled, in its order. The broken ones have
        none; they stay until they are cancelled."""
        outputs: list[TokenOutput] = []
        released: list[str] = []
        drawn = iter(zip(tokens, logprobs or (None,) * len(tokens), strict=True))
        for request, samples in self._in_flight.pop(step):
            request.steps -= 1
            reason = ""
            if samples and request.request_id in broken:
                if not request.cancelled:
                    continue
            elif samples:
                token, detail = next(drawn)
                reason = self._take(request, token, detail, outputs)
            if self._is_over(request, samples, reason):
                self._forget(request)
                released.append(request.request_id)
        return Completed(tuple(outputs), tuple(released))

    # -- internals

    def _add(self, request_id: str, state: _State, prompt: tuple[int, ...]) -> _Request:
        self._arrivals += 1
        request = _Request(request_id, state, list(prompt), len(prompt), self._arrivals)
        self._requests[request_id] = request
        return request

    def _take(
        self, request: _Request, token: int, detail: TokenLogprobs | None, outputs: list[TokenOutput]
    ) -> str:
        """A request's next token, and why it is the last one, or ""."""
        reason = _finish_reason(request, token)
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
        # To the back of the queue, so that all requests go at the same pace.
        if self._running.pop(request.request_id, None) and not request.target:
            self._running[request.request_id] = request
        return reason

    def _is_over(self, request: _Request, samples: bool, reason: str) -> bool:
        if request.target:
            if samples:
                request.state = _State.SENDING
            over = samples or request.cancelled
            return over and request.sent and not request.steps
        return bool(reason) or (request.cancelled and not request.steps)

    def _admit_landed(self) -> None:
        while self._joining and self._occupied() < self._max_batch:
            request = self._joining.popleft()
            request.state = _State.RUNNING
            self._running[request.request_id] = request

    def _occupied(self) -> int:
        """Requests that decode here, or will as soon as their prompt has run."""
        return sum(not request.target for request in self._running.values())

    def _decodes(self) -> list[_Request]:
        """A stage's share of the requests that have one token to run, each with a slot for it."""
        ready = [
            r for r in self._running.values() if r.to_run == 1 and not (r.steps or r.target or r.cancelled)
        ]
        share = -(-self._occupied() // self._stages)
        chosen: list[_Request] = []
        for request in ready[:share]:
            if request.state is _State.RUNNING and self._grow(request):
                chosen.append(request)
        return [request for request in chosen if request.state is _State.RUNNING]

    def _grow(self, request: _Request) -> bool:
        """Make room for one more token; False if the request had to give way itself."""
        while request.computed >= len(request.blocks) * self._pool.block_tokens:
            if block := self._pool.allocate(1):
                request.blocks += block
                continue
            movable = (r for r in self._running.values() if not r.steps and not r.target)
            youngest = max(movable, key=lambda r: r.arrival)
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: _Request) -> None:
        """A request gives its blocks up, to be recomputed when there is room again."""
        del self._running[request.request_id]
        self._pool.release(request.blocks)
        request.state, request.blocks = _State.WAITING, []
        request.computed = request.blocks_sent = request.published = 0
        if request.introduced:
            request.introduced = False
            self._preempted.append(request.request_id)
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _chunks(self, limit: int) -> list[tuple[_Request, int]]:
        """Prompts, or parts of them, of at most `limit` tokens together."""
        chunks: list[tuple[_Request, int]] = []
        for request in self._running.values():
            unfinished = request.to_run > 1 or (request.target and request.to_run)
            if unfinished and limit > 0 and not request.cancelled:
                count = min(request.to_run, limit)
                chunks.append((request, count))
                limit -= count
        histories = 0
        while self._waiting and limit > 0 and self._begins(self._waiting[0]):
            request = self._waiting.popleft()
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
            # The next one may share it: a layer stores all keys and values of a step before it reads any.
            self._publish(request, request.computed + count)
            histories += len(request.tokens) * request.sampling.needs_history
            if histories > MAX_HISTORY_TOKENS:
                break
        return chunks

    def _begins(self, request: _Request) -> bool:
        """Begin with a request; one that fails at that is left for `take_faults`."""
        try:
            return self._begin(request)
        except Exception as error:
            log.exception("a request could not begin", extra=about(attempt=request.request_id))
            self._faults[request.request_id] = describe(error)
            return False

    def _begin(self, request: _Request) -> bool:
        """Take blocks for all of a request's tokens, sharing those that are computed already; False if there
        is no room for it now."""
        if not request.target and self._occupied() >= self._max_batch:
            return False
        size = self._pool.block_tokens
        if self._pool.reuse:
            request.digests = prefix_digests(request.tokens, size, request.digests)
        shared = request.digests[: (len(request.tokens) - 1) // size]
        begun = self._pool.begin(len(request.tokens), shared, self._occupied())
        if begun is None:
            return False
        request.blocks, request.computed = begun
        request.published = request.computed // size
        if not request.index:
            request.cached_tokens = request.computed
        request.state = _State.RUNNING
        self._running[request.request_id] = request
        return True

    def _issue(self, batch: list[tuple[_Request, int]]) -> Step:
        step, self._next_step = self._next_step, self._next_step + 1
        starts: list[SequenceStart] = []
        sequences: list[SequenceStep] = []
        flight: list[tuple[_Request, bool]] = []
        for request, count in batch:
            if not request.introduced:
                starts.append(_introduction(request))
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
                )
            )
            flight.append((request, samples))
            request.blocks_sent, request.computed = len(request.blocks), end
            request.steps += 1
            self._publish(request, end)
        preempted, self._preempted = tuple(self._preempted), []
        self._in_flight[step] = flight
        return Step(step=step, preempted=preempted, starts=tuple(starts), sequences=tuple(sequences))

    def _publish(self, request: _Request, computed: int) -> None:
        """Let others share the blocks that are full now: steps run in the order they are made."""
        full = computed // self._pool.block_tokens
        if not self._pool.reuse or full == request.published:
            return
        request.digests = prefix_digests(request.tokens, self._pool.block_tokens, request.digests)
        for number in range(request.published, full):
            self._pool.publish(request.blocks[number], request.digests[number])
        request.published = full

    def _join_if_complete(self, request: _Request) -> None:
        if request.landed and request.to_run:
            request.state = _State.JOINING
            self._joining.append(request)

    def _forget(self, request: _Request) -> bool:
        if request.state is _State.WAITING:
            self._waiting.remove(request)
        elif request.state is _State.JOINING:
            self._joining.remove(request)
        self._running.pop(request.request_id, None)
        del self._requests[request.request_id]
        self._pool.release(request.blocks)
        return True


def _introduction(request: _Request) -> SequenceStart:
    return SequenceStart(
        request_id=request.request_id,
        sampling=request.sampling,
        history=tuple(request.tokens) if request.sampling.needs_history else (),
        prompt_tokens=request.prompt_tokens,
        target=request.target,
        target_tokens=request.target_tokens,
        end_token=len(request.tokens),
    )


def _finish_reason(request: _Request, token: int) -> str:
    sampling = request.sampling
    if token in sampling.end_token_ids:
        return "stop"
    return "length" if request.index + 1 >= sampling.max_tokens else ""

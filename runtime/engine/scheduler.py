"""What a replica runs next: continuous batching of prefills and decodes over a pipeline.

Pure bookkeeping, owned by the lead's main thread; only the token budget is shared with others.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from runtime.engine.budget import TokenBudget
from runtime.messages import Decode, Expect, Prefill, Sampling, SequenceStep, Step, TokenLogprobs, TokenOutput


class _State(enum.Enum):
    EXPECTED = "KV cache or Decode still to come"
    WAITING = "prompt waits to be run"
    JOINING = "could decode, waits for room in the batch"
    RUNNING = "decodes"
    PREFILLING = "prompt is in a step"
    SENDING = "prompt has run, KV cache is being sent"


@dataclass(slots=True)
class _Request:
    request_id: str
    state: _State
    capacity_tokens: int
    position: int = 0
    tokens: tuple[int, ...] = ()
    index: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    target: str = ""
    step: int | None = None
    landed: bool = False
    sent: bool = False
    cancelled: bool = False

    def as_sequence(self) -> SequenceStep:
        return SequenceStep(
            request_id=self.request_id,
            tokens=self.tokens,
            position=self.position,
            index=self.index,
            capacity_tokens=self.capacity_tokens,
            sampling=self.sampling,
            target=self.target,
        )


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
    max_prefill_tokens : prompt tokens in one step (a longer prompt runs alone), of however many prompts
    stages : pipeline depth; as many steps are in flight, over disjoint requests
    budget : KV cache room; prefills take theirs here, expected requests have taken it already

    Notes
    -----
    A waiting prefill goes before decodes, but never twice in a row while some could decode: neither
    phase starves the other. Prefills keep their order: one that finds no room holds back the rest.
    """

    def __init__(self, *, max_batch: int, max_prefill_tokens: int, stages: int, budget: TokenBudget) -> None:
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._stages = stages
        self._budget = budget
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[str] = deque()
        self._joining: deque[str] = deque()
        self._running: dict[str, _Request] = {}
        self._in_flight: dict[int, list[_Request]] = {}
        self._next_step = 0
        self._last_was_prefill = False

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    # -- arrivals

    def expect(self, message: Expect) -> None:
        """A request whose room is taken and whose KV cache will arrive."""
        self._requests[message.request_id] = _Request(
            message.request_id, _State.EXPECTED, message.capacity_tokens, message.prompt_tokens
        )

    def prefill(self, message: Prefill) -> None:
        """A prompt to run. Without a second token there is nothing to send to a target."""
        last = message.index + 1 >= message.sampling.max_tokens
        target = "" if last else message.target
        more = 0 if target or last else message.sampling.max_tokens - message.index
        self._requests[message.request_id] = _Request(
            message.request_id,
            _State.WAITING,
            len(message.prompt) + more,
            tokens=message.prompt,
            index=message.index,
            sampling=message.sampling,
            target=target,
        )
        self._waiting.append(message.request_id)

    def decode(self, message: Decode) -> str:
        """The rest of an expected request; why it can't be run, or ""."""
        request = self._requests.get(message.request_id)
        if request is None or request.state is not _State.EXPECTED:
            return "no room was reserved for its KV cache"
        needed = request.position + message.sampling.max_tokens - message.index
        if needed > request.capacity_tokens:
            return f"it may grow to {needed} tokens, room for {request.capacity_tokens} was reserved"
        request.tokens, request.index = (message.last_token,), message.index
        request.sampling = message.sampling
        self._join_if_complete(request)
        return ""

    def landed(self, request_id: str) -> None:
        """All of an expected request's KV cache is here."""
        request = self._requests.get(request_id)
        if request is not None and request.state is _State.EXPECTED:
            request.landed = True
            self._join_if_complete(request)

    def sent(self, request_id: str) -> bool:
        """All of a prefill's KV cache is out; True if the request can be freed now."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.sent = True
        return request.state is _State.SENDING and self._forget(request)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; True if it can be freed now, else a step or a transfer still uses it."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        request.cancelled = True
        if request.step is not None or request.state is _State.SENDING:
            return False
        return self._forget(request)

    # -- steps

    def next_step(self) -> Step | None:
        """The next step to run, or None while the pipeline is full or nobody is ready."""
        if len(self._in_flight) >= self._stages:
            return None
        self._admit()
        idle = [request for request in self._running.values() if request.step is None]
        batch = [] if idle and self._last_was_prefill else self._prefill_batch()
        self._last_was_prefill = bool(batch)
        if batch:
            return self._issue("prefill", batch)
        if idle:
            share = -(-len(self._running) // self._stages)
            return self._issue("decode", idle[:share])
        return None

    def complete(
        self, step: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs | None, ...] = ()
    ) -> Completed:
        """Take in the tokens of a step, one per request in its order."""
        outputs: list[TokenOutput] = []
        released: list[str] = []
        batch = self._in_flight.pop(step)
        for request, token, detail in zip(batch, tokens, logprobs or (None,) * len(tokens), strict=True):
            request.step = None
            reason = _finish_reason(request, token)
            if not request.cancelled:
                outputs.append(
                    TokenOutput(
                        request_id=request.request_id,
                        index=request.index,
                        token=token,
                        finish_reason=reason,
                        logprobs=detail,
                    )
                )
            if request.target:
                request.state = _State.SENDING
                done = request.sent
            else:
                done = bool(reason) or request.cancelled
            if done:
                self._forget(request)
                released.append(request.request_id)
            elif not request.target:
                self._advance(request, token)
        return Completed(tuple(outputs), tuple(released))

    def _issue(self, phase: str, batch: list[_Request]) -> Step:
        step, self._next_step = self._next_step, self._next_step + 1
        self._in_flight[step] = batch
        for request in batch:
            request.step = step
        return Step(step=step, phase=phase, sequences=tuple(request.as_sequence() for request in batch))

    def _admit(self) -> None:
        while self._joining and self._occupied() < self._max_batch:
            request = self._requests[self._joining.popleft()]
            request.state = _State.RUNNING
            self._running[request.request_id] = request

    def _occupied(self) -> int:
        """Requests that decode here, or will as soon as their prompt has run."""
        prefilling = sum(
            request.state is _State.PREFILLING and not request.target
            for batch in self._in_flight.values()
            for request in batch
        )
        return len(self._running) + prefilling

    def _prefill_batch(self) -> list[_Request]:
        batch: list[_Request] = []
        prompt_tokens, room = 0, self._max_batch - self._occupied()
        while self._waiting:
            request = self._requests[self._waiting[0]]
            prompt_tokens += len(request.tokens)
            if batch and prompt_tokens > self._max_prefill_tokens:
                break
            if not request.target and room <= 0:
                break
            if not self._budget.take(request.request_id, request.capacity_tokens):
                break
            room -= not request.target
            self._waiting.popleft()
            request.state = _State.PREFILLING
            batch.append(request)
        return batch

    def _advance(self, request: _Request, token: int) -> None:
        """To the next token; to the back of the queue, so that all requests go at the same pace."""
        request.position += len(request.tokens)
        request.tokens = (token,)
        request.index += 1
        request.state = _State.RUNNING
        self._running.pop(request.request_id, None)
        self._running[request.request_id] = request

    def _join_if_complete(self, request: _Request) -> None:
        if request.landed and request.tokens:
            request.state = _State.JOINING
            self._joining.append(request.request_id)

    def _forget(self, request: _Request) -> bool:
        if request.state is _State.WAITING:
            self._waiting.remove(request.request_id)
        elif request.state is _State.JOINING:
            self._joining.remove(request.request_id)
        self._running.pop(request.request_id, None)
        del self._requests[request.request_id]
        self._budget.give_back(request.request_id)
        return True


def _finish_reason(request: _Request, token: int) -> str:
    sampling = request.sampling
    if not sampling.ignore_eos and token in sampling.stop_token_ids:
        return "stop"
    return "length" if request.index + 1 >= sampling.max_tokens else ""

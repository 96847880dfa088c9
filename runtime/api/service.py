"""What the API's endpoints share: the placement being served and the access to its coordinator."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hexgen2.placement import Placement
from runtime.api.answer import SEED_MASK, Answer, TextRules
from runtime.api.bodies import Bodies
from runtime.api.errors import ApiError, bad_request, shown
from runtime.api.metrics import Metrics
from runtime.api.schemas import GenerateRequest
from runtime.api.tokenizer import Tokenizer
from runtime.api.workroom import Workroom
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.request import UNKNOWN, Origin
from runtime.options import FRONT_DEFAULTS, FrontOptions
from runtime.protocol.message import Sampling
from runtime.routing.refusals import Overloaded, TooLong, Unavailable
from runtime.routing.replica_state import ReplicaState

TEXT_AT_ONCE, MESSAGE_COST = 2000, 50
"""Texts of up to so many characters are tokenised on the event loop; a chat message costs this many extra."""


@dataclass(frozen=True)
class Service:
    """A placement whose workers are running."""

    placement: Placement
    coordinator: Coordinator
    tokenizer: Tokenizer
    metrics: Metrics
    options: FrontOptions = FRONT_DEFAULTS
    created: int = field(default_factory=lambda: int(time.time()))
    texts: Workroom = field(default_factory=lambda: Workroom("texts", TEXT_AT_ONCE))
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bodies", Bodies(self.options, lambda: self.context_tokens))

    @property
    def model(self) -> str:
        """The name that clients ask for."""
        return self.placement.model.name

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens of the longest request that can be served now."""
        return min(self.placement.model.max_position, self.coordinator.context_tokens)

    async def encode(self, text: str, param: str) -> list[int]:
        """Token ids of a text. Raises ApiError at once for a text too long to fit however it is tokenised."""
        self._check_bytes(len(text.encode()), param)
        return await self.texts.do(len(text), lambda: self.tokenizer.encode(text))

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat, with the same check.

        Raises
        ------
        ApiError, NoChatTemplate, BadChat
        """
        texts = [text for each in messages for text in each.values()]
        self._check_bytes(sum(len(text.encode()) for text in texts), "messages")
        size = sum(MESSAGE_COST + len(text) for text in texts)
        return await self.texts.do(size, lambda: self.tokenizer.encode_chat(messages))

    def _check_bytes(self, count: int, param: str) -> None:
        longest, context = self.tokenizer.token_bytes, self.context_tokens
        if count > context * longest:
            message = (
                f"{param}: the longest context is {context} tokens of at most {longest} bytes each, "
                f"but the text has {count} bytes"
            )
            raise bad_request(message, param, "context_length_exceeded")

    def check_choices(self, prompts: int, n: int | None) -> None:
        """Raise ApiError for too many prompts times n."""
        most = self.options.max_choices
        if prompts * (n or 1) > most:
            param = "n" if prompts == 1 else "prompt"
            message = f"{param}: the request asks for {prompts * (n or 1)} answers (prompts times n)"
            raise bad_request(f"{message}, but this server accepts at most {most} (--max-choices)", param)

    def check_model(self, name: str) -> None:
        if name != self.model:
            message = f"the model `{shown(name)}` does not exist; this server has `{self.model}`"
            raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")

    def answer(
        self,
        body: GenerateRequest,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        logprobs: int,
        origin: Origin = UNKNOWN,
    ) -> Answer:
        """Start answering. max_tokens None: as many as the context allows; logprobs -1: none.

        Raises
        ------
        ApiError : a prompt is empty, too long, or has tokens outside the vocabulary
        HexGen2Error : the coordinator refuses the request
        """
        with self._counting_refusals():
            self.coordinator.check_serving()
            return self._answer(body, prompts, max_tokens, logprobs, origin)

    def check_place(self, client: str) -> None:
        """Raise HexGen2Error if no request of a client can be accepted now, before its body is read."""
        with self._counting_refusals():
            self.coordinator.check_place(client)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (Overloaded, Unavailable, TooLong) as error:
            self.metrics.refused(type(error).__name__.lower())
            raise

    def _answer(
        self,
        body: GenerateRequest,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        logprobs: int,
        origin: Origin,
    ) -> Answer:
        longest = max(len(prompt) for prompt in prompts)
        self._check_prompts(prompts, longest, max_tokens)
        total, most = sum(map(len, prompts)) * (body.n or 1), self.options.max_prompt_tokens
        if total > most:
            message = (
                f"the prompts of all answers have {total} tokens, but this server accepts at most {most}"
            )
            raise bad_request(f"{message} (--max-prompt-tokens)", "prompt")
        sampling = Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=body.biases,
            seed=secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK,
            min_tokens=body.min_tokens or 0,
            max_tokens=max_tokens or self.context_tokens - longest,
            stop_token_ids=self._end_tokens(body),
            logprobs=logprobs,
        )
        if sampling.min_tokens > sampling.max_tokens:
            message = f"min_tokens is {sampling.min_tokens}, but max_tokens is {sampling.max_tokens}"
            raise bad_request(message, "min_tokens")
        self._check_tokens([token for token, _ in sampling.logit_bias], "logit_bias")
        self._check_tokens(body.stop_token_ids or (), "stop_token_ids")
        rules = TextRules(tuple(body.stop_strings), body.include_stop_str_in_output, body.skip_special_tokens)
        return Answer(self.coordinator, self.tokenizer, prompts, sampling, body.n or 1, rules, origin)

    def _end_tokens(self, body: GenerateRequest) -> tuple[int, ...]:
        own = () if body.ignore_eos else self.tokenizer.stop_token_ids
        return tuple(sorted({*own, *(body.stop_token_ids or ())}))

    def _check_prompts(self, prompts: Sequence[list[int]], longest: int, max_tokens: int | None) -> None:
        if not all(prompts):
            raise bad_request("a prompt is empty", "prompt")
        context = self.context_tokens
        if longest + (max_tokens or 1) > context:
            message = (
                f"the longest context is {context} tokens, but the request asks for "
                f"{longest + (max_tokens or 1)} ({longest} in the prompt, {max_tokens or 1} in the answer)"
            )
            raise bad_request(message, "prompt", "context_length_exceeded")
        for prompt in prompts:
            self._check_tokens(prompt, "prompt")

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        vocabulary = self.placement.model.vocab
        if max(tokens, default=0) >= vocabulary:
            outside = f"{param}: a token id is outside the vocabulary (0 to {vocabulary - 1})"
            raise bad_request(outside, param)

    def health(self) -> dict[str, Any]:
        """The body of /health: "ok", or "degraded" with the reason, and the state of each replica."""
        states = self.coordinator.states
        lost, starting = states.lost, states.which_are(ReplicaState.STARTING)
        state: dict[str, Any] = {"status": "degraded" if lost else "ok"}
        if lost:
            state["reason"] = "; ".join(lost.values())
        state["replicas"] = {
            name: "lost" if name in lost else "starting" if name in starting else "up"
            for name in self.coordinator.replicas
        }
        return state

    def live_placement(self) -> Placement:
        """The placement as it serves now: without replicas that are lost or starting, with the flow of the
        others."""
        plan = self.coordinator.plan
        return plan.placement(self.coordinator.states.absent) if plan else self.placement

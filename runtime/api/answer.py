"""The answer to one HTTP request: its choices, each an in-flight request whose tokens become text."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cost_model.errors import HexGen2Error
from runtime.api.text import Detokenizer, StopStrings
from runtime.api.tokenizer import Tokenizer
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.request import UNKNOWN, Origin, Request
from runtime.protocol.from_workers import TokenOutput
from runtime.protocol.message import Sampling
from runtime.routing.refusals import Broken, Unavailable

log = logging.getLogger(__name__)

SEED_MASK = 2**63 - 1
SEED_STRIDE = 0x9E3779B97F4A7C15
MAX_UNREAD = 8192
"""Pieces of an answer that may wait for the client to read them; if more wait, the answer is aborted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to a choice. finish_reason is "" while the choice goes on."""

    choice: int
    text: str
    output: TokenOutput
    finish_reason: str


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become the text of an answer: stop strings end it; they, and the text of end tokens, are
    part of it only if `show_stop`."""

    stops: tuple[str, ...] = ()
    show_stop: bool = False
    skip_special_tokens: bool = True


class Answer:
    """All choices of a request: n per prompt, prompt by prompt.

    Parameters
    ----------
    prompts : token ids of each prompt
    sampling : for the first choice; a prompt's other choices differ in their seed
    choices : number per prompt
    text_rules : for every choice
    origin : the client

    Raises
    ------
    Overloaded, Unavailable, TooLong, Broken : no request was started
    """

    def __init__(
        self,
        coordinator: Coordinator,
        tokenizer: Tokenizer,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        choices: int,
        text_rules: TextRules,
        origin: Origin = UNKNOWN,
    ) -> None:
        self._coordinator, self._tokenizer, self._text_rules = coordinator, tokenizer, text_rules
        self.request_id = origin.request_id or uuid.uuid4().hex
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.requests: list[Request] = []
        self._choices = choices
        self._pieces: asyncio.Queue[Piece | HexGen2Error] = asyncio.Queue()
        self._unfinished = len(prompts) * choices
        self._tasks: list[asyncio.Task[None]] = []
        try:
            for prompt in prompts:
                for number in range(choices):
                    own = _reseeded(sampling, number)
                    self.requests.append(coordinator.submit(prompt, own, origin=origin))
        except HexGen2Error:
            self.close()
            raise
        for index, request in enumerate(self.requests):
            self._tasks.append(asyncio.create_task(self._follow(index, request)))

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all choices as they come; ends when every choice has finished.

        Raises
        ------
        Unavailable : a choice cannot be completed
        """
        while self._unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, HexGen2Error):
                raise piece
            self._unfinished -= piece.finish_reason != ""
            yield piece

    @property
    def must_wait(self) -> bool:
        """Whether another piece is expected but not there yet."""
        return self._unfinished > 0 and self._pieces.empty()

    def close(self) -> None:
        """Stop whatever is still in flight and free its KV cache. May be called twice."""
        for task in self._tasks:
            task.cancel()
        for request in self.requests:
            self._coordinator.cancel(request)

    def opening(self, prefix: str, kind: str, model: str) -> dict[str, Any]:
        """The fields at the start of each JSON object of the answer.

        Parameters
        ----------
        prefix, kind : OpenAI's id prefix and object type
        """
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def closing(self) -> dict[str, Any]:
        """The fields at the end of the answer: OpenAI's usage, and where the request ran."""
        return {"usage": self.usage(), "hexgen2": self._trace()}

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object so far. Cached tokens count only each prompt's first choice."""
        output = sum(request.record.output_tokens for request in self.requests)
        first_choices = self.requests[:: self._choices]
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {
                "cached_tokens": sum(request.record.cached_tokens for request in first_choices)
            },
        }

    def _trace(self) -> dict[str, Any]:
        """Where the request ran: the first choice's route, all KV bytes, and each choice's own."""
        choices = [
            {
                "prefill_replica": request.record.prefill_replica,
                "decode_replica": request.record.decode_replica,
                "kv_bytes": request.record.kv_bytes,
                **({"path": request.record.path} if request.record.path else {}),
            }
            for request in self.requests
        ]
        summary = {
            **choices[0],
            "kv_bytes": sum(request.record.kv_bytes for request in self.requests),
        }
        return summary if len(choices) == 1 else {**summary, "choices": choices}

    def headers(self) -> dict[str, str]:
        """The first choice's route as response headers; complete once it has a token."""
        record = self.requests[0].record
        return {
            "x-hexgen2-prefill-replica": record.prefill_replica,
            "x-hexgen2-decode-replica": record.decode_replica,
            **({"x-hexgen2-path": ">".join(record.path)} if record.path else {}),
        }

    async def _follow(self, index: int, request: Request) -> None:
        rules, min_tokens = self._text_rules, request.sampling.min_tokens
        decode = partial(self._tokenizer.decode, skip_special_tokens=rules.skip_special_tokens)
        detokenizer = Detokenizer(decode, request.prompt)
        stop = StopStrings(rules.stops, rules.show_stop)
        try:
            async for output in request:
                reason = output.finish_reason
                hidden = reason == "stop" and not rules.show_stop
                text = stop.push("" if hidden else detokenizer.push(output.token), output.index >= min_tokens)
                if reason and not stop.met:
                    text += stop.push(detokenizer.finish())
                if self._pieces.qsize() >= MAX_UNREAD:
                    raise Unavailable(f"the client is {MAX_UNREAD} tokens behind")
                if stop.met:
                    self._coordinator.cancel(request, "stop")
                    self._pieces.put_nowait(Piece(index, text, output, "stop"))
                    return
                if reason:
                    text += stop.finish()
                self._pieces.put_nowait(Piece(index, text, output, reason))
        except HexGen2Error as error:
            self._give_up(request, error)
        except Exception as error:
            log.error("converting request %s to text failed", self.request_id, exc_info=error)
            self._give_up(request, Broken(self.request_id))

    def _give_up(self, request: Request, error: HexGen2Error) -> None:
        self._coordinator.cancel(request)
        self._pieces.put_nowait(error)


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number * SEED_STRIDE) & SEED_MASK)

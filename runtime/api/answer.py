"""One HTTP request's answer in work: its choices, each a generation turned into pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cost_model.errors import HexGen2Error
from runtime.api.text import Detokenizer, StopStrings
from runtime.api.tokenizer import ModelTokenizer
from runtime.coordinator import Coordinator
from runtime.generation import Generation
from runtime.messages import Sampling, TokenOutput

SEED_MASK = 2**63 - 1
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to a choice. finish_reason is "" while the choice goes on."""

    choice: int
    text: str
    output: TokenOutput
    finish_reason: str


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become the text of an answer: stop strings end it, and are shown only if `show_stop` (as are
    the texts of end tokens)."""

    stops: tuple[str, ...] = ()
    show_stop: bool = False
    skip_special_tokens: bool = True


class Answer:
    """All choices of a request: n per prompt, prompt by prompt.

    Parameters
    ----------
    prompts : token ids of each prompt
    sampling : of the first choice; the others of a prompt differ in their seed
    choices : per prompt
    text_rules : of every choice

    Raises
    ------
    Overloaded, Unavailable, TooLong : nothing is left behind
    """

    def __init__(
        self,
        coordinator: Coordinator,
        tokenizer: ModelTokenizer,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        choices: int,
        text_rules: TextRules,
    ) -> None:
        self._coordinator, self._tokenizer, self._text_rules = coordinator, tokenizer, text_rules
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.generations: list[Generation] = []
        self._pieces: asyncio.Queue[Piece | HexGen2Error] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        try:
            for prompt in prompts:
                for number in range(choices):
                    self.generations.append(coordinator.submit(prompt, _reseeded(sampling, number)))
        except HexGen2Error:
            self.close()
            raise
        for index, generation in enumerate(self.generations):
            self._tasks.append(asyncio.create_task(self._follow(index, generation)))

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all choices as they come; ends when every choice has finished.

        Raises
        ------
        Unavailable : a choice cannot be finished
        """
        unfinished = len(self.generations)
        while unfinished:
            piece = await self._pieces.get()
            if isinstance(piece, HexGen2Error):
                raise piece
            unfinished -= piece.finish_reason != ""
            yield piece

    def close(self) -> None:
        """Stop whatever is still in work and free its KV cache. May be called twice."""
        for task in self._tasks:
            task.cancel()
        for generation in self.generations:
            self._coordinator.cancel(generation)

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object, up to now."""
        output = sum(generation.record.output_tokens for generation in self.generations)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }

    def trace(self) -> dict[str, Any]:
        """Where the request ran: the first choice's route, all KV bytes, and each choice's own."""
        choices = [
            {
                "prefill_replica": generation.record.prefill_replica,
                "decode_replica": generation.record.decode_replica,
                "kv_bytes": generation.record.kv_bytes,
            }
            for generation in self.generations
        ]
        summary = {
            **choices[0],
            "kv_bytes": sum(generation.record.kv_bytes for generation in self.generations),
        }
        return summary if len(choices) == 1 else {**summary, "choices": choices}

    def headers(self) -> dict[str, str]:
        """The first choice's route as response headers; complete once it has a token."""
        record = self.generations[0].record
        return {
            "x-hexgen2-prefill-replica": record.prefill_replica,
            "x-hexgen2-decode-replica": record.decode_replica,
        }

    async def _follow(self, index: int, generation: Generation) -> None:
        rules, min_tokens = self._text_rules, generation.sampling.min_tokens
        decode = partial(self._tokenizer.decode, skip_special_tokens=rules.skip_special_tokens)
        detokenizer = Detokenizer(decode, generation.prompt)
        stop = StopStrings(rules.stops, rules.show_stop)
        try:
            async for output in generation:
                reason = output.finish_reason
                hidden = reason == "stop" and not rules.show_stop
                text = stop.push("" if hidden else detokenizer.push(output.token), output.index >= min_tokens)
                if reason and not stop.met:
                    text += stop.push(detokenizer.finish())
                if stop.met:
                    self._coordinator.cancel(generation, "stop")
                    self._pieces.put_nowait(Piece(index, text, output, "stop"))
                    return
                if reason:
                    text += stop.finish()
                self._pieces.put_nowait(Piece(index, text, output, reason))
        except HexGen2Error as error:
            self._pieces.put_nowait(error)


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number * SEED_STRIDE) & SEED_MASK)

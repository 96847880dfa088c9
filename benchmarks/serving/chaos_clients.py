"""Clients of a fleet under faults: each one knows its answer in advance and checks every token on arrival."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hexgen2.bench.http import HttpError, Server

SILENCE_S = 60.0
"""A stream that is silent for this long counts as hung."""
ATTEMPTS_S = 600.0
QUARANTINED = "two replicas died with it"
RETRY_S, LONGEST_RETRY_S = 0.5, 8.0


@dataclass(frozen=True)
class Question:
    """A prompt, how many tokens to ask for, and the text that they must be."""

    prompt: tuple[int, ...]
    tokens: int
    text: str


@dataclass
class Clients:
    """Sends questions and records what clients see.

    Attributes
    ----------
    turns : deaths and restarts of the front end so far
    ended : how requests ended, with counts; "whole" is the right way
    retried : why requests were asked again, with counts
    parted : answers whose tokens are others than expected, if any may be; None: each is wrong
    wrong : everything that must never happen, but did
    gaps_s : for each whole answer, the longest time between two pieces of it
    """

    server: Server
    model: str
    turns: Callable[[], int]
    parted: list[tuple[Question, str]] | None = None
    ended: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)

    async def ask(self, question: Question) -> None:
        """Ask until the answer is whole or wrong, or time runs out."""
        try:
            async with asyncio.timeout(ATTEMPTS_S):
                wait_s = RETRY_S
                while why := await self._attempt(question):
                    self.retried[why] += 1
                    await asyncio.sleep(wait_s * (0.5 + random.random()))
                    wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        except TimeoutError:
            self.wrong[f"no whole answer within {ATTEMPTS_S:g} s"] += 1
        except _Wrong as error:
            self.wrong[str(error)] += 1
        else:
            self.ended["whole"] += 1

    async def _attempt(self, question: Question) -> str:
        """Send one request; return why to ask again, or "". Only the front end's death may break a
        connection."""
        turns = self.turns()
        try:
            return await self._stream(question)
        except HttpError as error:
            await asyncio.sleep(0.2)  # gives the restart time to be counted
            if self.turns() == turns and turns % 2 == 0:
                if str(error).startswith(
                    "no answer within"
                ):  # no connection was made: the server is very busy
                    return "no connection"
                raise _Wrong(f"a connection broke by itself: {error}") from error
            return "front end restarted"

    async def _stream(self, question: Question) -> str:
        body = {
            "model": self.model,
            "prompt": question.prompt,
            "max_tokens": question.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = await self.server.post("/v1/completions", json.dumps(body).encode())
        if response.status in (429, 503):
            await response.read()
            return f"refused with {response.status}"
        if response.status != 200:
            said = (await response.read()).decode()
            if response.status == 500 and '"request_failed"' in said:
                return QUARANTINED
            raise _Wrong(f"status {response.status}: {said[:200]}")
        text, reason, usage, longest_s, last_s = "", "", 0, 0.0, time.monotonic()
        lines = aiter(response.lines())
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    line = await anext(lines, None)
            except TimeoutError:
                response.close()
                raise _Wrong(f"a stream hung for {SILENCE_S:g} s") from None
            if line is None:
                break
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                await _drain(lines)
                if event["error"]["code"] == "request_failed":
                    return QUARANTINED
                return f"an error: {event['error']['message'][:80]}"
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
            for choice in event["choices"]:
                now = time.monotonic()
                longest_s, last_s = max(longest_s, now - last_s if text else 0.0), now
                at, text = len(text), text + choice["text"]
                reason = choice["finish_reason"] or reason
                if self.parted is None and not question.text.startswith(choice["text"], at):
                    response.close()
                    raise _Wrong(difference(question.text, text))
        if usage != question.tokens or reason != "length":
            raise _Wrong(f"an answer of {usage} tokens ({reason!r}), not {question.tokens}")
        if text != question.text:
            if self.parted is None:
                raise _Wrong(difference(question.text, text))
            self.parted.append((question, text))
        self.gaps_s.append(longest_s)
        return ""


class _Wrong(Exception):
    """Something that must never happen."""


async def _drain(lines) -> None:
    async for _ in lines:
        pass


def difference(expected: str, found: str) -> str:
    """Where two texts differ."""
    same = next((k for k, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(expected))
    around = slice(max(same - 20, 0), same + 20)
    return f"a wrong token at character {same}: {found[around]!r}, not {expected[around]!r}"

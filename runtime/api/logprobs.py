"""Log probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from runtime.protocol.from_workers import TokenOutput

_json = msgspec.json.Encoder()
LOWEST = -9999.0
TokenText = Callable[[int], str]


class CompletionLogprobs:
    """The parallel lists of /v1/completions, collected over tokens; offsets count characters."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text, self._offset = token_text, 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._chosen: list[float] = []
        self._top: list[dict[str, float]] = []
        self._offsets: list[int] = []

    def add(self, output: TokenOutput) -> None:
        """Append a token; nothing if it came without log probabilities."""
        if output.logprobs is None:
            return
        text = self._token_text(output.token)
        self._tokens.append(text)
        self._chosen.append(_finite(output.logprobs.chosen))
        top = {self._token_text(token): _finite(logprob) for token, logprob in reversed(output.logprobs.top)}
        self._top.append(dict(reversed(top.items())))
        self._offsets.append(self._offset)
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._chosen,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken


class Joined:
    """A JSON object of lists that grow, kept as JSON: an answer may have millions of entries, and to write
    them all at its end would hold up every stream."""

    def __init__(self) -> None:
        self._lists: dict[str, bytearray] = {}

    def extend(self, lists: Mapping[str, list[Any]]) -> None:
        """Append to each list."""
        for name, entries in lists.items():
            joined = self._lists.setdefault(name, bytearray())
            if entries:
                joined += b"," * bool(joined) + _json.encode(entries)[1:-1]

    def json(self) -> msgspec.Raw:
        """The object, for an encoder of msgspec."""
        members = (b"".join((_json.encode(name), b":[", own, b"]")) for name, own in self._lists.items())
        return msgspec.Raw(b"{" + b",".join(members) + b"}")


def chat_logprobs(token_text: TokenText, output: TokenOutput) -> list[dict[str, Any]]:
    """The entry of one token for /v1/chat/completions; empty if it came without log probabilities."""
    if output.logprobs is None:
        return []
    top = [_entry(token_text(token), logprob) for token, logprob in output.logprobs.top]
    return [{**_entry(token_text(output.token), output.logprobs.chosen), "top_logprobs": top}]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in text
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def _finite(logprob: float) -> float:
    """JSON has neither infinity nor NaN."""
    return max(LOWEST, logprob)

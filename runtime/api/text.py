"""Turns tokens into text as they arrive: whole characters only, and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 6
UNFINISHED = "\ufffd"


class Detokenizer:
    """Decodes a growing token sequence piece by piece; the pieces add up to the text of the whole.

    A piece ends before a character whose bytes have not all arrived. The last tokens of the prompt are
    decoded as context, because many tokenizers decode a token differently at the start of a text.

    Parameters
    ----------
    decode : token ids to text, without special tokens
    prompt : the token ids before the first one pushed
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._shown = len(_complete(decode(self._window))) if self._window else 0
        self._fresh = len(self._window)

    def push(self, token: int) -> str:
        """The text that this token completes; "" if it ends inside a character."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = _complete(text)
        piece = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text and piece:
            self._slide()
        elif complete == text and len(text) == self._shown:
            self._window.pop()
        return piece

    def finish(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD."""
        return self._decode(self._window)[self._shown :]

    def _slide(self) -> None:
        """Keep only the tokens of this piece as context for the next one."""
        del self._window[: self._fresh]
        self._fresh = len(self._window)
        self._shown = len(self._decode(self._window))


def _complete(text: str) -> str:
    return text.rstrip(UNFINISHED)


class StopStrings:
    """Passes text on up to a stop string, and holds back text that may be the start of one.

    If there are several, the one that ends first counts. It is part of the text only if `show`.
    """

    def __init__(self, stops: Sequence[str], show: bool = False) -> None:
        self._stops, self._show = tuple(stops), show
        self._held = ""
        self.met = False

    def push(self, text: str, may_end: bool = True) -> str:
        """The text that is safe to show; none after a stop string (`met`). While `may_end` is false, stop
        strings are ordinary text."""
        if self.met:
            return ""
        if not self._stops:
            return text
        before, self._held = len(self._held), self._held + text
        if may_end and (found := self._first_end(before)):
            end, start = found
            self.met = True
            shown, self._held = self._held[: end if self._show else start], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _first_end(self, before: int) -> tuple[int, int] | None:
        """End and start of the stop string that ends first, after the first `before` characters held."""
        found = []
        for stop in self._stops:
            start = self._held.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found, default=None)

    def finish(self) -> str:
        """The text that was held back and did not become a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

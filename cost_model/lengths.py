"""How long requests are: a mixture of classes, and the means over it that costs depend on.

Lengths differ between classes, so a mean depends on what is drawn: a request, a token of a prompt, or a
request that is under way at some moment, which is the more often a long one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

Length = Callable[[float, float], float]
"""Of a class: a figure that follows from its prompt and output tokens."""


BLOCK_TOKENS = 16
"""Tokens of a block of KV cache, unless `hexgen2 launch` is told otherwise."""


class Window(NamedTuple):
    """Sliding-window attention: a token attends to at most the last `tokens` in the share `share` of the
    layers, and to all in the others."""

    tokens: float
    share: float = 1.0

    def mean(self, limited: float, unlimited: float) -> float:
        """The mean over the layers of a figure of those with the window and of those without."""
        return self.share * limited + (1 - self.share) * unlimited

    def widened(self, tokens: float) -> Window:
        """The window, and so many tokens more."""
        return Window(self.tokens + tokens, self.share)


@dataclass(frozen=True)
class RequestLengths:
    """Classes of requests, each (prompt tokens, output tokens, weight); weights need no common sum.

    Where there is one class, every mean is that class's own figure, to the last bit. Figures under a window
    are means over the model's layers, too.
    """

    classes: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, classes: Iterable[tuple[float, float, float]]) -> RequestLengths:
        """The mixture of these classes, at least one."""
        return cls(tuple(classes))

    @classmethod
    def fixed(cls, isl: float, osl: float) -> RequestLengths:
        """All requests alike."""
        return cls(((isl, osl, 1.0),))

    def mean(self, value: Length, by: Length = lambda isl, osl: 1.0) -> float:
        """E[value * by] / E[by] over requests: the mean value, where a request counts `by` times."""
        if len(self.classes) == 1:
            isl, osl, _ = self.classes[0]
            return value(isl, osl)
        total = math.fsum(weight * by(isl, osl) for isl, osl, weight in self.classes)
        return math.fsum(weight * by(isl, osl) * value(isl, osl) for isl, osl, weight in self.classes) / total

    @property
    def isl(self) -> float:
        """Mean prompt tokens of a request."""
        return self.mean(_isl)

    @property
    def osl(self) -> float:
        """Mean output tokens of a request."""
        return self.mean(_osl)

    def prompt_attended(self, window: Window | None = None) -> float:
        """Tokens that a prompt's token attends to, on average over all prompts' tokens.

        Of one prompt it is the mean of min(i, window) for i up to isl, half the prompt where no window cuts
        it short (attention is causal); so without a window E[isl^2] / (2 E[isl]).
        """

        def attended(isl: float, osl: float) -> float:
            return attended_tokens(isl, window) / isl

        return self.mean(attended, by=_isl)

    def decode_context(self, window: Window | None = None) -> float:
        """Tokens that an output token attends to, on average over all output tokens: those of one request
        isl + osl / 2, so without a window E[osl (isl + osl / 2)] / E[osl]."""
        return self.mean(lambda isl, osl: context_tokens(isl + osl / 2, window), by=_osl)

    def kv_tokens_prefill(self, window: Window | None = None, step_tokens: float = 0.0) -> float:
        """KV tokens that a request under way in prefill holds: it is under way in proportion to its prompt,
        so E[isl^2] / E[isl]. Layers with a window keep that and the tokens of a step."""
        kept = window and window.widened(step_tokens)
        return self.mean(lambda isl, osl: context_tokens(isl, kept), by=_isl)

    def kv_tokens_decode(self, window: Window | None = None) -> float:
        """KV tokens set aside for a request under way in decode: it is under way in proportion to its
        outputs, so E[osl (isl + osl)] / E[osl]. Layers with a window keep the blocks that it lies in."""
        kept = window and window.widened(BLOCK_TOKENS)
        return self.mean(lambda isl, osl: context_tokens(isl + osl, kept), by=_osl)

    def kv_tokens_moved(self, window: Window | None = None) -> float:
        """KV tokens of a prompt that move to where it is decoded, on average: in layers with a window, those
        of the blocks that it ends in (see `moved_tokens`)."""
        before = (BLOCK_TOKENS - 1) / 2  # of a block, on average, those before the first one that is read
        kept = window and window.widened(before - 1)
        return self.mean(lambda isl, osl: context_tokens(isl, kept))


def context_tokens(tokens: float, window: Window | None) -> float:
    """Of so many tokens, those that attention reaches back to, as a mean over the layers."""
    return window.mean(min(tokens, window.tokens), tokens) if window else tokens


def first_read(token: int, window: int) -> int:
    """The first token that one at this position, or any after it, attends to, in a layer with a window, which
    includes the token itself."""
    return max(0, token - window + 1)


def first_kept(token: int, window: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """The first token of the first block that a token at this position, or any after it, reads there."""
    return first_read(token, window) // block_tokens * block_tokens


def most_blocks(window: int, block_tokens: int, running: int = 1) -> int:
    """Blocks of such layers that a request needs at most, while so many of its tokens are in steps under
    way: those that window - 1 + running tokens in a row can lie in."""
    return (window + running - 3) // block_tokens + 2


def moved_tokens(first: int, end: int, prompt: int, window: Window | None) -> float:
    """Of tokens [first, end) of a prompt, those whose KV cache moves to where it is decoded, as a mean over
    the layers: in layers with a window, those of the blocks that later tokens attend to."""
    if window is None:
        return end - first
    kept_from = first_kept(prompt, int(window.tokens))
    return window.mean(max(0, end - max(first, kept_from)), end - first)


def attended_tokens(tokens: float, window: Window | None = None, past: float = 0.0) -> float:
    """Sum over the next `tokens` tokens of a prompt, `past` of which came before, of the tokens that each
    attends to: the integral of min(x, window) from past to past + tokens, as a mean over the layers."""
    end = past + tokens
    unlimited = end * end / 2 - past * past / 2
    if window is None:
        return unlimited
    return window.mean(_area(end, window.tokens) - _area(past, window.tokens), unlimited)


def _area(end: float, reach: float) -> float:
    """The integral of min(x, reach) from 0 to end."""
    inside = min(end, reach)
    return inside * inside / 2 + (end - inside) * reach


def _isl(isl: float, osl: float) -> float:
    return isl


def _osl(isl: float, osl: float) -> float:
    return osl

"""The base of all messages, the protocol's version, and parts that messages of several directions share.

The messages themselves are in `to_workers`, `from_workers` and `between_workers`; nothing else crosses a
process. `codec` turns them into frames.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 15
ATTENTION = "attention"
"""The role of attention workers in their Configure."""


class Message(msgspec.Struct, tag=True, frozen=True, array_like=True, kw_only=True):
    """Base of all messages. A struct's name is its tag on the wire: renaming one changes the protocol."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to choose tokens, and when to end; temperature 0 is greedy.

    Values that switch a rule off: top_k 0, top_p 1, min_p 0, presence and frequency penalty 0, repetition
    penalty 1, logprobs -1. logit_bias has pairs of a token id and what is added to its logit. A token of
    stop_token_ids ends the output unless ignore_eos is set, and cannot be chosen for the first min_tokens.

    A token depends only on (logits, seed, its position) and, with penalties, on the tokens before it, so the
    same request gives the same tokens on any replica, whatever its shape and whatever else is in the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the output."""
        return () if self.ignore_eos else self.stop_token_ids

    def finish_reason(self, token: int, index: int) -> str:
        """Why output token `index` is the last one: "stop", "length", or "" if it is not."""
        if token in self.end_token_ids:
            return "stop"
        return "length" if index + 1 >= self.max_tokens else ""

    @property
    def needs_history(self) -> bool:
        """Whether a token depends on the tokens before it, because of penalties."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Log probabilities of the chosen token and of the most likely ones, (id, logprob), best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class StageShape(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One pipeline stage: its workers in tensor-parallel order, and its layers [first_layer, end_layer)."""

    workers: tuple[str, ...]
    first_layer: int
    end_layer: int

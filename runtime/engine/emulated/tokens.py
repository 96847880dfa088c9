"""Tokens that depend on all tokens before them: a lost, repeated or wrong one changes all that follow.

The state after tokens t_0 .. t_n is s_n = (s_{n-1} FACTOR + t_n + 1) mod PRIME, with s_{-1} = 0. The next
token is BLAKE2b (8 bytes) of s_n, keyed with the seed, mod vocabulary; numbers are 8 bytes, little-endian.
The seed is the request's, or 0 at temperature 0. So tests can compute what an answer must be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate

from runtime.protocol.message import Sampling

PRIME = 2**61 - 1
FACTOR = 0x1D3F2A6C9B5E4781
_MASK = 2**64 - 1


def states(before: int, tokens: Iterable[int]) -> list[int]:
    """The state after each of some tokens, from the state before them."""
    after = accumulate(tokens, lambda state, token: (state * FACTOR + token + 1) % PRIME, initial=before)
    return list(after)[1:]


def choose(state: int, seed: int, vocabulary: int) -> int:
    """The token that follows a state."""
    key = (seed & _MASK).to_bytes(8, "little")
    digest = hashlib.blake2b(state.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocabulary


def seed_of(sampling: Sampling) -> int:
    """What a request's tokens depend on besides the tokens before them."""
    return sampling.seed if sampling.temperature else 0


def answer(prompt: Sequence[int], count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """The `count` tokens that follow a prompt."""
    state, tokens = states(0, prompt)[-1], list[int]()
    for _ in range(count):
        tokens.append(choose(state, seed, vocabulary))
        (state,) = states(state, tokens[-1:])
    return tokens

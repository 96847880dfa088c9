"""Gumbel noise as a pure function of (seed, output index, token id): no state, the same everywhere.

A counter-based generator: the token ids of a vocabulary are scattered over 32 bits once, a draw's key (64
bits of a hash of seed and index) enters twice, and multiplications and xor-shifts of 32-bit integers mix the
two, as in the finaliser of MurmurHash3. Integers wrap alike on every device, so the uniform numbers are
exactly the same everywhere; their logarithms may differ in the last digit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

_SCATTER = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_FIRST, _SECOND = 0x7FEB352D, 0x2C1B3C6D
_BITS = 31
_BELOW_ONE = 1 - 2**-24


@lru_cache(maxsize=8)
def token_hashes(vocab: int, device: torch.device) -> torch.Tensor:
    """Distinct, well scattered 32-bit numbers for the token ids: [vocab] int32."""
    golden, first, second = (np.uint32(constant) for constant in _SCATTER)
    bits = (np.arange(vocab, dtype=np.uint32) + np.uint32(1)) * golden
    bits = (bits ^ (bits >> np.uint32(16))) * first
    bits = (bits ^ (bits >> np.uint32(13))) * second
    bits ^= bits >> np.uint32(16)
    return torch.from_numpy(bits.view(np.int32)).to(device)


def draw_keys(draws: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """A key for each (seed, output index): [draws, 2] int32."""
    digests = b"".join(
        hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest() for seed, index in draws
    )
    return torch.from_numpy(np.frombuffer(digests, np.int32).reshape(-1, 2).copy()).to(device)


def gumbel(hashes: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [draws, tokens].

    Parameters
    ----------
    hashes : of the tokens, [tokens] or [draws, tokens]
    keys : [draws, 2]

    Notes
    -----
    -log(-log(1 - v)) with v uniform: float32 is most precise near v = 0, where the noise is large, and large
    noise decides a draw. It ranges from -2.8 to 22.2, in steps too fine to matter.
    """
    bits = hashes ^ keys[:, :1]
    bits *= _FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits += keys[:, 1:]
    bits *= _SECOND
    bits ^= bits >> 16  # of signed numbers, so this clears the sign, too
    minus_v = bits.float().add_(0.5).mul_(-(2.0**-_BITS)).clamp_(min=-_BELOW_ONE)
    return minus_v.log1p_().neg_().log_().neg_()

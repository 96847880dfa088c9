"""Weights that are integers, for products with activations that are rounded to integers of 16 bits
(rounded.cpp)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.native.products import pack

_IN_WORD = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""By bits of a code: which input of a word each of its codes is, from the lowest bits on. So two neighbours
come apart as integers of 16 bits."""


def inputs_of_word(bits: int) -> int:
    """Inputs whose codes of so many bits are a word; runs of inputs begin and end with words."""
    return len(_IN_WORD[bits])


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [out, in] uint8 -> panels [out / width, words, width, 4] uint8, padded with zeros."""
    order = _IN_WORD[bits]
    words = F.pad(codes, (0, -codes.shape[1] % len(order))).unflatten(1, (-1, len(order)))
    words = words[..., list(order)]
    if bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    return pack(words.contiguous().flatten(1).view(torch.float32)).view(torch.uint8).unflatten(-1, (-1, 4))

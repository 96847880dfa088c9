"""Products of activations, rounded to integers of 16 bits, with weights that are integers (rounded.cpp)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.native.products import pack
from runtime.native.quantised import Quantised, multiplied_by

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


def linear_rounded(x: torch.Tensor, weight: Quantised, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] float32, contiguous, times a matrix of integers, plus packed bias -> [n, out].

    Each run of inputs of a row is rounded to multiples of 1/32767 of its largest value. Products are summed
    exactly in each run. A row's result does not depend on the others.
    """
    return multiplied_by("multiply_rounded", x, weight, bias)

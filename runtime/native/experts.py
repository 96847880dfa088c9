"""Mixtures of experts beside their products (experts.cpp)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from runtime.native import library


class ExpertRows(NamedTuple):
    """The rows that experts compute.

    rows : [tokens x chosen, width], sorted by expert; there may be more than experts have
    counts : of each expert's rows, [held]
    places : where each token's rows are, [tokens, chosen]; -1 for those of other experts
    """

    rows: torch.Tensor
    counts: np.ndarray
    places: torch.Tensor


def choose_experts(
    logits: torch.Tensor,
    chosen: int,
    is_sigmoid: bool,
    renormalises: bool,
    factor: float,
    groups: tuple[int, int, int],
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of each token's experts, [tokens, chosen] float32, and their numbers, int64.

    Parameters
    ----------
    logits : [tokens, experts], contiguous
    is_sigmoid, renormalises, factor, bias : as in `Routing` (runtime/engine/torch/experts.py)
    groups : how many there are, how many are kept, and how many experts of a group count for it
    """
    tokens, experts = logits.shape
    weights = library.empty((tokens, chosen), torch.float32)
    numbers = library.empty((tokens, chosen), torch.int64)
    library.call(
        "choose_experts",
        logits.data_ptr(),
        library.FLOATS[logits.dtype],
        tokens,
        experts,
        chosen,
        int(is_sigmoid),
        int(renormalises),
        factor,
        *groups,
        None if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        numbers.data_ptr(),
    )
    return weights, numbers


def gather_experts(x: torch.Tensor, numbers: torch.Tensor, first: int, held: int) -> ExpertRows:
    """The rows of x [tokens, width], contiguous, that experts [first, first + held) compute.

    Parameters
    ----------
    numbers : of the experts that each token uses, [tokens, chosen] int64, contiguous
    """
    pairs, width = numbers.numel(), x.shape[1]
    rows = library.empty((pairs, width), x.dtype)
    counts = library.kept(np.zeros(held, dtype=np.int64))
    places = library.empty(numbers.shape, torch.int64)
    library.call(
        "gather_experts",
        numbers.data_ptr(),
        pairs,
        numbers.shape[1],
        first,
        held,
        x.data_ptr(),
        width * x.itemsize,
        counts.ctypes.data,
        places.data_ptr(),
        rows.data_ptr(),
    )
    return ExpertRows(rows, counts, places)


def add_experts(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sums of each token's rows, [tokens, width], added in float32 and rounded once."""
    tokens, chosen = places.shape
    output = library.empty((tokens, rows.shape[1]), rows.dtype)
    library.call(
        "add_experts",
        rows.data_ptr(),
        library.FLOATS[rows.dtype],
        places.data_ptr(),
        weights.data_ptr(),
        tokens,
        chosen,
        rows.shape[1],
        output.data_ptr(),
    )
    return output

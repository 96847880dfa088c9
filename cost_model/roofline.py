"""The time of a step, from its work at data-sheet peaks and from coefficients.

A roofline (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009), but softened: a kernel that
computes and reads for about as long seldom hides all of one behind the other.

Amounts are numbers, or arrays with one element per measured step: coefficients are fitted with the same
formulas that predict."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cost_model.coefficients import Coefficients
from cost_model.portable import power, powers

Amount = Any
"""A float, or a numpy array of them."""


class LayerWork(NamedTuple):
    """One layer's work on one device, in seconds at its peaks.

    dense : products with weights; prompts : attention over prompts; decodes : attention over KV caches
    nvlink_s, other_s : all-reduces by the table of collectives; all_reduces : how many
    """

    dense_compute_s: Amount
    dense_read_s: Amount
    prompts_compute_s: Amount
    decodes_compute_s: Amount
    decodes_read_s: Amount
    nvlink_s: Amount
    other_s: Amount
    all_reduces: Amount


class EdgeWork(NamedTuple):
    """A stage's work outside its layers: the LM head in seconds at the peaks, and the requests sampled."""

    head_compute_s: Amount
    head_read_s: Amount
    sampled: Amount


def layer_s(work: LayerWork, k: Coefficients) -> Amount:
    """Seconds of one layer: matrix products and attention run one after the other, so they add up."""
    prompts = work.prompts_compute_s / (k.compute_efficiency * k.attention_efficiency)
    exchange = work.nvlink_s / k.nvlink_share + work.other_s + work.all_reduces * k.all_reduce_overhead_s
    return (
        kernel_s(work.dense_compute_s, work.dense_read_s, k)
        + prompts
        + kernel_s(work.decodes_compute_s, work.decodes_read_s, k)
        + k.layer_overhead_s
        + exchange
    )


def edge_s(work: EdgeWork, k: Coefficients) -> Amount:
    """Seconds of a stage outside its layers."""
    head = kernel_s(work.head_compute_s, work.head_read_s, k)
    return head + k.step_overhead_s + k.request_overhead_s * work.sampled


def kernel_s(compute_s: Amount, read_s: Amount, k: Coefficients) -> Amount:
    """Seconds of a kernel that computes and reads for this long at the peaks: with infinite overlap the
    longer of the two, with less overlap more."""
    compute, read = compute_s / k.compute_efficiency, read_s / k.memory_efficiency
    if isinstance(compute, float) and isinstance(read, float):
        longer, shorter = max(compute, read), min(compute, read)
        if shorter <= 0 or k.overlap == math.inf:
            return longer
        return longer * power(1 + power(shorter / longer, k.overlap), 1 / k.overlap)
    longer, shorter = np.maximum(compute, read), np.minimum(compute, read)
    if k.overlap == math.inf:
        return longer
    ratio = shorter / np.where(longer > 0, longer, 1.0)
    return longer * powers(1 + powers(ratio, k.overlap), 1 / k.overlap)

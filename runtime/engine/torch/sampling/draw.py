"""Draws from logits by the Gumbel-max trick: the largest of logit plus temperature times noise is a draw.

The noise belongs to the token id (`noise.py`), so that last-digit differences of the logits, for example
between replica shapes, hardly ever change the draw. float32 is enough: the noise is precise where it matters,
and the sums for top_p are off by about 1e-6, no more than the logits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime.engine.torch.sampling.noise import gumbel

UNSETTLED = -1
_CACHE_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be drawn in each row, all [rows, 1]: float32 temperature above 0, int64 top_k (0: off),
    float32 top_p (infinite: off) and min_p (0: off). `nucleus_only`: no row has top_k or min_p."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    nucleus_only: bool


def largest(scores: torch.Tensor) -> torch.Tensor:
    """argmax over the last dimension, NaN above all; numpy's is vectorised on CPU, torch's is not."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def unsettle(tokens: torch.Tensor, scores: torch.Tensor) -> None:
    """Mark the tokens [rows] whose scores [rows, vocab] are no finite numbers, in place."""
    if scores.device.type == "cpu":
        chosen = tokens.numpy()
        chosen[~np.isfinite(scores.numpy()[np.arange(len(chosen)), chosen])] = UNSETTLED
        return
    finite = scores.gather(1, tokens.clamp(min=0)[:, None])[:, 0].isfinite()
    tokens.masked_fill_(~finite, UNSETTLED)


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, hashes: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Draw a token for each row from the softmax of logits / temperature.

    Parameters
    ----------
    logits : [rows, vocab], float32
    temperature : [rows, 1], above 0
    hashes : of the vocabulary, [vocab]
    keys : of the draws, [rows, 2]
    """
    rows, vocab = logits.shape
    at_once = max(1, _CACHE_ELEMENTS // vocab) if logits.device.type == "cpu" else rows
    parts = [
        largest(torch.addcmul(part, heat, gumbel(hashes, key)))
        for part, heat, key in zip(
            logits.split(at_once), temperature.split(at_once), keys.split(at_once), strict=True
        )
    ]
    return torch.cat(parts)


def draw_limited(
    logits: torch.Tensor, limits: Limits, hashes: torch.Tensor, keys: torch.Tensor, candidates: int
) -> torch.Tensor:
    """Draw a token for each row from those that the limits keep; UNSETTLED if the likeliest `candidates`
    (fewer than the vocabulary) don't show which those are. See `draw` for the rest."""
    values, ids = logits.topk(candidates)
    if limits.nucleus_only:
        total = _weights(logits, values[:, :1], limits).sum(-1, keepdim=True)
        floor, _ = _floor(values, limits, total)
        unsettled = values[:, -1:] >= floor
    else:
        floor, unsettled = _floor(values, limits)
    scores = torch.addcmul(values, limits.temperature, gumbel(hashes[ids], keys))
    best = largest(scores.masked_fill_(values < floor, -torch.inf))
    return ids.gather(1, best[:, None]).masked_fill_(unsettled, UNSETTLED)[:, 0]


def draw_limited_exactly(
    logits: torch.Tensor, limits: Limits, hashes: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """The same for any limits, but slower, because it sorts the vocabulary."""
    floor, _ = _floor(_descending(logits), limits)
    return draw(logits.masked_fill(logits < floor, -torch.inf), limits.temperature, hashes, keys)


def _floor(
    values: torch.Tensor, limits: Limits, total: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least logit that may be drawn: min_p first, then top_k, then top_p of what is left (vLLM's order).

    Tokens that tie with it may be drawn, too, so that the arbitrary order of ties does not matter.

    Parameters
    ----------
    values : the largest logits in descending order [rows, candidates]
    total : the weight of all that min_p and top_k keep, [rows, 1]; None: they keep nothing beyond `values`

    Returns
    -------
    the floor, and whether min_p and top_k keep all of `values` and perhaps more, both [rows, 1]
    """
    weights = _weights(values, values[:, :1], limits)
    last = (limits.top_k - 1).clamp(0, values.shape[-1] - 1)
    kept = (weights >= limits.min_p) & ((limits.top_k == 0) | (values >= values.gather(1, last)))
    weights *= kept
    if total is None:
        total = weights.sum(-1, keepdim=True)
    nucleus = kept & (weights.cumsum(-1) - weights < limits.top_p * total)
    nucleus[:, 0] = True
    return values.gather(1, nucleus.sum(-1, keepdim=True) - 1), kept[:, -1:]


def _weights(values: torch.Tensor, peak: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Likelihoods relative to the most likely token's, whose logit is `peak`."""
    smallest = torch.finfo(torch.float32).tiny
    return values.sub(peak).div_(limits.temperature.clamp(min=smallest)).exp_()


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Sorted rows; numpy sorts floats ten times faster than torch on CPU."""
    if values.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values.numpy(), axis=-1))
    return values.sort(descending=True).values

"""Values weighted by scores, by torch's operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.engine.torch.attention.base import Scoring

_SCORES = 1 << 24  # that are in memory at once, where torch's own operator does not serve


def weighted(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    sinks_shape: tuple[int, ...],
    is_causal: bool = False,
) -> torch.Tensor:
    """query [..., n, head_dim], keys and values [..., context, head_dim] -> [..., n, head_dim].

    Torch's operator knows neither caps nor sinks; with these, scores are computed in float32 here, for some
    rows of n at a time.

    Parameters
    ----------
    mask : added to the scores; None: nothing is
    sinks_shape : of the sinks beside the scores [..., n, context]
    is_causal : each token of n attends to those before it, with mask None
    """
    scale, rows = scoring.scale, query.shape[-2]
    if scoring.cap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    if is_causal:
        mask = torch.full((rows, rows), -torch.inf, device=query.device).triu_(1)
    sinks = None if scoring.sinks is None else scoring.sinks.view(sinks_shape)
    step = max(1, _SCORES * rows // (query.numel() // query.shape[-1] * keys.shape[-2]))
    parts = []
    for first in range(0, rows, step):
        some = slice(first, first + step)
        own = mask[some] if mask is not None and mask.shape[-2] > 1 else mask
        beside = sinks[..., some, :] if sinks is not None and sinks.shape[-2] > 1 else sinks
        parts.append(_scored(query[..., some, :], keys, values, own, scoring, beside))
    return torch.cat(parts, dim=-2)


def _scored(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with all scores at once; sinks have their shape."""
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = (query @ keys.transpose(-1, -2)).float().mul_(scale)
    if scoring.cap is not None:
        scores.div_(scoring.cap).tanh_().mul_(scoring.cap)
    if mask is not None:
        scores += mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values

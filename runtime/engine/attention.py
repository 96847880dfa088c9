"""Attention of a ragged batch against each request's own KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.engine.cache import SequenceCache


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, requests one after the other.

    Attributes
    ----------
    tokens, positions : [total], int64
    lengths : tokens of each request; their sum is total
    offsets : position of each request's first token, so its cache holds that many already
    caches : each request's cache
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    caches: tuple[SequenceCache, ...]

    @property
    def last_rows(self) -> torch.Tensor:
        """Row of each request's last token, [requests]."""
        return torch.tensor(self.lengths, device=self.tokens.device).cumsum(0) - 1


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: Batch,
    window: int | None = None,
) -> torch.Tensor:
    """Store the new keys and values, then attend to everything up to each token, itself included.

    Parameters
    ----------
    query : [total, heads, head_dim]
    key, value : [total, kv_heads, head_dim]; heads is a multiple of kv_heads
    layer : global layer number
    window : tokens that each one attends to at most, the latest ones

    Returns
    -------
    [total, heads x head_dim]
    """
    output = torch.empty_like(query)
    start = 0
    for length, offset, cache in zip(batch.lengths, batch.offsets, batch.caches, strict=True):
        end, context = start + length, offset + length
        stored = cache.layer(layer)
        stored[0, :, offset:context] = key[start:end].transpose(0, 1)
        stored[1, :, offset:context] = value[start:end].transpose(0, 1)
        output[start:end] = _attend_one(query[start:end], stored[:, :, :context], offset, window)
        start = end
    return output.flatten(1)


def _attend_one(query: torch.Tensor, stored: torch.Tensor, offset: int, window: int | None) -> torch.Tensor:
    """query [n, heads, head_dim], stored [2, kv_heads, offset + n, head_dim] -> [n, heads, head_dim]."""
    if window is not None and (unseen := offset + 1 - window) > 0:
        stored, offset = stored[:, :, unseen:], offset - unseen
    length, heads, head_dim = query.shape
    kv_heads, context = stored.shape[1:3]
    group = heads // kv_heads
    if length == 1:
        # A query head group attends to the same keys: make it the query's length.
        grouped = query.view(1, kv_heads, group, head_dim)
        return F.scaled_dot_product_attention(grouped, stored[:1], stored[1:]).view(1, heads, head_dim)
    keys, values = stored.unsqueeze(2).expand(2, kv_heads, group, context, head_dim)
    grouped = query.view(length, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    mask = None
    if offset or (window is not None and window < context):
        rows = torch.arange(offset, context, device=query.device)[:, None]
        columns = torch.arange(context, device=query.device)
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
    answer = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    return answer.permute(2, 0, 1, 3).reshape(length, heads, head_dim)

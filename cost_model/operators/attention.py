"""Attention on one GPU: over prompts, and of decodes over their KV caches.

Times are affine in the number of query-key pairs (prompts) and of cached tokens (decodes) while all else is
fixed, so that steps can be summed up over requests before they are timed.
"""

from __future__ import annotations

from cost_model.operators.arithmetic import US, Amount, overlapped_s, rounded_up, waves
from cost_model.operators.cards import Card
from cost_model.operators.numbers import DecodeNumbers, PrefillNumbers

_QUERY_BYTES = 2.0
_TILE = 128.0
"""Queries of a tile: FlashAttention's usual block."""


def prefill_attention_s(
    numbers: PrefillNumbers,
    card: Card,
    kv_bytes: float,
    batch: Amount,
    tokens: Amount,
    attended: Amount,
    heads: Amount,
    kv_heads: Amount,
    head_dim: Amount,
) -> Amount:
    """Seconds of causal attention over `batch` prompts (or chunks of them) of together `tokens` tokens.

        launch + waves(tiles) * (tile + 4 * 128 * (head_dim + narrow) * (keys + diagonal) / speed) + io

    Tiles are 128 queries of one head (Dao, "FlashAttention-2", 2023, section 3.2), and each sees
    keys = attended / tokens on average. io reads queries and writes results, and moves
    keys and values `stored` times as slowly.

    Parameters
    ----------
    card : the GPU in 16 bits
    attended : sum over all tokens of how many keys each sees; n (n + 1) / 2 for a whole prompt of n tokens,
        less under a sliding window, more for a later chunk of a prompt
    heads, kv_heads : on this GPU
    """
    tiles = heads * batch * rounded_up(tokens / batch / _TILE)
    speed = card.flops_s * numbers.compute / card.units
    operations = 4.0 * _TILE * (head_dim + numbers.narrow) * (attended / tokens + numbers.diagonal)
    moved = tokens * head_dim * (2.0 * _QUERY_BYTES * heads + numbers.stored * 2.0 * kv_bytes * kv_heads)
    return (
        numbers.launch_us * US
        + waves(tiles, card.units, numbers.stepped) * (numbers.tile_us * US + operations / speed)
        + moved / (card.bandwidth_bytes_s * numbers.memory)
    )


def decode_attention_s(
    numbers: DecodeNumbers,
    card: Card,
    kv_bytes: float,
    batch: Amount,
    context: Amount,
    heads: Amount,
    kv_heads: Amount,
    head_dim: Amount,
) -> Amount:
    """Seconds of attention of `batch` decodes, one query each, over together `context` cached tokens.

        launch + waves * tile + overlapped(compute, read * (1 + few / wave)) + io

    A wave is as many requests and KV heads as the GPU has units; with few of them, splitting the context
    over units (Flash-Decoding) reads somewhat slower.

    Parameters
    ----------
    card : the GPU in 16 bits
    context : sum over the requests of the tokens each sees, at most the window
    heads, kv_heads : on this GPU
    """
    share = batch * kv_heads / card.units
    bandwidth = card.bandwidth_bytes_s * numbers.memory
    read = 2.0 * kv_bytes * context * kv_heads * head_dim / bandwidth * (1.0 + numbers.few / share)
    compute = 4.0 * context * heads * head_dim / (card.flops_s * numbers.compute)
    return (
        numbers.launch_us * US
        + numbers.tile_us * US * waves(batch * kv_heads, card.units, numbers.stepped)
        + overlapped_s(compute, read, numbers.overlap)
        + 2.0 * _QUERY_BYTES * batch * heads * head_dim / bandwidth
    )

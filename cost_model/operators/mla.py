"""Multi-head latent attention with its projections (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from typing import NamedTuple

from cost_model.operators.arithmetic import US, Amount, overlapped_s
from cost_model.operators.cards import Card
from cost_model.operators.numbers import MlaNumbers


class MlaShape(NamedTuple):
    """Sizes of one MLA module: `q_rank` and `kv_rank` are those of the compressed queries and of the cache;
    a head has `nope` elements without and `rope` with positions, and values of `value` elements."""

    hidden: float = 7168.0
    q_rank: float = 1536.0
    kv_rank: float = 512.0
    nope: float = 128.0
    rope: float = 64.0
    value: float = 128.0


DEEPSEEK_V3 = MlaShape()


def _weights(shape: MlaShape, heads: Amount) -> Amount:
    """Weights of the module's projections, of which those of the heads are divided among GPUs."""
    shared = shape.hidden * (shape.q_rank + shape.kv_rank + shape.rope)
    queries = shape.q_rank * (shape.nope + shape.rope)
    return shared + heads * (
        queries + shape.kv_rank * (shape.nope + shape.value) + shape.value * shape.hidden
    )


def mla_prefill_s(
    numbers: MlaNumbers,
    projected: Card,
    card: Card,
    shape: MlaShape,
    tokens: Amount,
    attended: Amount,
    batch: Amount,
    heads: Amount,
) -> Amount:
    """Seconds of one module for `batch` prompts of together `tokens` tokens.

    Keys and values are unpacked from the compressed cache, then attention is that of plain heads.

    Parameters
    ----------
    projected, card : the GPU in the format of the projections, and in 16 bits
    attended : sum over all tokens of how many keys each sees
    heads : on this GPU
    """
    weights = _weights(shape, heads)
    wide = shape.nope + shape.rope + shape.value
    products = 2.0 * (tokens + numbers.tile) * weights / (projected.flops_s * numbers.projections)
    read = projected.weight_bytes * weights + 2.0 * tokens * (2.0 * shape.hidden + 2.0 * heads * wide)
    pairs = attended + numbers.tile * tokens
    return (
        numbers.launch_us * US
        + batch * heads * numbers.request_us * (US / 128)
        + overlapped_s(products, read / (card.bandwidth_bytes_s * numbers.memory), numbers.overlap)
        + 2.0 * pairs * heads * wide / (card.flops_s * numbers.attention)
    )


def mla_decode_s(
    numbers: MlaNumbers,
    projected: Card,
    card: Card,
    kv_bytes: float,
    shape: MlaShape,
    batch: Amount,
    context: Amount,
    heads: Amount,
) -> Amount:
    """Seconds of one module for `batch` decodes over together `context` cached tokens.

    Queries are multiplied into the space of the cache, so that all heads share one key of kv_rank + rope
    elements (section 2.1.2 there).

    Parameters
    ----------
    projected, card : the GPU in the format of the projections, and in 16 bits
    heads : on this GPU
    """
    weights = _weights(shape, heads)
    cached = shape.kv_rank + shape.rope
    bandwidth = card.bandwidth_bytes_s * numbers.memory
    products = 2.0 * (batch + numbers.tile) * weights / (projected.flops_s * numbers.projections)
    moved = projected.weight_bytes * weights + 2.0 * batch * (2.0 * shape.hidden + 4.0 * heads * cached)
    few = 1.0 + numbers.few * card.units / (batch * heads)
    compute = 2.0 * context * heads * (shape.kv_rank + cached) / (card.flops_s * numbers.attention)
    return (
        numbers.launch_us * US
        + batch * numbers.request_us * US
        + overlapped_s(products, moved / bandwidth, numbers.overlap)
        + overlapped_s(compute, kv_bytes * context * cached / bandwidth * few, numbers.overlap)
    )

"""The experts of a mixture-of-experts layer on one GPU: routed products, without the router itself."""

from __future__ import annotations

from typing import Literal

from cost_model.operators.arithmetic import US, Amount, overlapped_s, root, smaller
from cost_model.operators.cards import Card
from cost_model.operators.numbers import ExpertNumbers

Distribution = Literal["balanced", "power_law"]


def reached(numbers: ExpertNumbers, experts: Amount, rows: Amount, balanced: Amount) -> Amount:
    """How many of `experts` get at least one of `rows` (token and expert pairs).

    Balanced routing reaches min(experts, rows). Random routing reaches a share 1 - exp(-z) of them,
    z = rows / experts, which lies between z / (1 + z) and z / sqrt(1 + z^2); skewed routing reaches fewer.
    """
    z = rows / experts
    uneven = z * (numbers.spread / root(1.0 + z * z) + (1.0 - numbers.spread) / (1.0 + z))
    return experts * (balanced * smaller(z, 1.0) + (1.0 - balanced) * uneven)


def experts_s(
    numbers: ExpertNumbers,
    card: Card,
    tokens: Amount,
    hidden: Amount,
    inter: Amount,
    topk: Amount,
    experts: Amount,
    tp: Amount,
    ep: Amount,
    balanced: Amount,
    matrices: Amount,
    skew: float | None = None,
) -> Amount:
    """Seconds of the busiest GPU of one layer's experts.

        launch + overlapped(compute, read) + tokens * topk * row
        compute = 2 * matrices * (rows + pad * reached) * hidden * (inter / tp + narrow) / (peak * share)
        read = (reached experts' weights + activations) / (bandwidth * share)

    Rows are the busiest GPU's pairs of a token and an expert. All GPUs sort the pairs of all tokens.

    Parameters
    ----------
    tokens : that all GPUs of the layer route together
    hidden, inter : sizes of the model and of one expert; topk of `experts` compute each token
    tp, ep : each expert is divided among tp GPUs, the experts among ep
    balanced : 1 where all experts get equally many tokens, 0 under skewed routing
    matrices : 3 for gated experts, 2 for plain ones
    skew : instead of the numbers' own
    """
    here, wide = experts / ep, inter / tp
    elsewhere = 1.0 - 1.0 / ep
    uneven = (1.0 - balanced) * (numbers.skew if skew is None else skew)
    rows = tokens * topk / ep * (1.0 + uneven * elsewhere * elsewhere)
    active = reached(numbers, here, rows, balanced)
    bandwidth = card.bandwidth_bytes_s * numbers.memory
    operations = 2.0 * matrices * hidden * (rows + numbers.pad * active) * (wide + numbers.narrow)
    weights = card.weight_bytes * matrices * active * hidden * wide
    moved = 2.0 * rows * (3.0 * hidden + matrices * wide)
    compute = operations / (card.flops_s * numbers.compute)
    read = (weights + moved) / bandwidth
    return (
        numbers.launch_us * US
        + overlapped_s(compute, read, numbers.overlap)
        + tokens * topk * numbers.row_ns * 1e-9
    )

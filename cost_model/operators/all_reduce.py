"""The all-reduce of one message among the GPUs of a node."""

from __future__ import annotations

from cost_model.operators.arithmetic import US, Amount, smaller
from cost_model.operators.numbers import AllReduceNumbers


def all_reduce_s(
    numbers: AllReduceNumbers, bandwidth_bytes_s: float, gpus: Amount, message_bytes: Amount
) -> Amount:
    """Seconds for `gpus` (at least 2) to add up `message_bytes` that each of them holds.

    The faster of two ways, as engines choose by size: each GPU reads everything from all others ("one-shot"),
    or each adds up a part, and the parts are passed on (a ring, or "two-shot"), 2 (n - 1) / n of the message.

    Parameters
    ----------
    bandwidth_bytes_s : of the link between two of them
    """
    others = gpus - 1.0
    bandwidth = bandwidth_bytes_s / (1.0 + numbers.crowded * (gpus - 2.0))
    direct = message_bytes * others / (bandwidth * numbers.direct)
    ring = 2.0 * others / gpus * message_bytes / (bandwidth * numbers.ring)
    start = numbers.launch_us + numbers.each_us * (gpus - 2.0)
    return start * US + smaller(direct, ring + numbers.ring_us * US)

"""A matrix product on one GPU: m x k activations times k x n weights."""

from __future__ import annotations

from cost_model.operators.arithmetic import US, Amount, overlapped_s, rounded_up, smaller, waves
from cost_model.operators.cards import Card
from cost_model.operators.numbers import GemmNumbers

_RESULT_BYTES = 2.0


def gemm_s(numbers: GemmNumbers, card: Card, m: Amount, n: Amount, k: Amount) -> Amount:
    """Seconds that the GPU takes for one product, as in a CUDA graph: without the host's time to start it.

    A roofline (Williams, Waterman and Patterson, CACM 52(4), 2009) over the fastest of three tile sizes:

        launch + overlapped(compute, read) + quantise
        compute = waves(tiles) * 2 * rows * columns * (k + fill) / (speed of one unit)
        read = bytes of weights, activations and results / (bandwidth * share)

    Small tiles fill the units sooner, but reuse less of what they read: each halving of a tile leaves
    `small_tile` of the speed. Activations that are quantised first are read once more, and each row of them
    costs `row_ns`.
    """
    bandwidth = card.bandwidth_bytes_s * numbers.memory
    whole_tile_s = 2.0 * 128 * 256 * (k + numbers.fill) * card.units / (card.flops_s * numbers.compute)
    half = 0.5 / numbers.small_tile
    tall, wide = rounded_up(m / 128), rounded_up(n / 128)
    stepped, count = numbers.stepped, card.units
    compute = whole_tile_s * smaller(
        waves(tall * rounded_up(n / 256), count, stepped),
        smaller(
            waves(tall * wide, count, stepped) * half,
            waves(rounded_up(m / 64) * rounded_up(n / 64), count, stepped) * (half * half * half),
        ),
    )
    read = (card.weight_bytes * n * k + card.input_bytes * m * k + _RESULT_BYTES * m * n) / bandwidth
    taken = numbers.launch_us * US + overlapped_s(compute, read, numbers.overlap)
    if numbers.row_ns:
        taken = taken + m * (numbers.row_ns * 1e-9 + _RESULT_BYTES * k / bandwidth)
    return taken

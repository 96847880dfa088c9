"""A matrix product on one GPU: m x k activations times k x n weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cost_model.operators.arithmetic import US, Amount, rounded_up
from cost_model.operators.cards import Card
from cost_model.operators.numbers import GemmNumbers

_RESULT_BYTES = 2.0
_OF_FLOATS, _OF_ARRAYS = (math.ceil, min, math.sqrt), (np.ceil, np.minimum, np.sqrt)


def gemm_s(numbers: GemmNumbers, card: Card, m: Amount, n: Amount, k: Amount) -> Amount:
    """Seconds that the GPU takes for one product, as in a CUDA graph: without the host's time to start it.

    A roofline (Williams, Waterman and Patterson, CACM 52(4), 2009) over the fastest of three tile sizes:

        launch + overlapped(compute, read) + quantise
        compute = waves(tiles) * 2 * rows * columns * (k + fill) / (speed of one unit)
        read = bytes of weights, activations and results / (bandwidth * share)

    Small tiles fill the units sooner, but reuse less of what they read: each halving of a tile leaves
    `small_tile` of the speed. Activations that are quantised first are read once more, and each row of them
    costs `row_ns`. `waves` and `overlapped` are those of cost_model/operators/arithmetic.py, written out
    below, since products took up to a tenth of a search's first seconds.
    """
    return Weights.of(numbers, card, n, k).gemm_s(m)


class Weights(NamedTuple):
    """k x n weights on a card: all that the seconds of their products depend on, but for m.

    large_s : seconds of a wave of tiles of 128 x 256; half : times that, one of tiles half as large
    wide, middle, narrow : tiles of 256, 128 and 64 columns
    weight_bytes, input_bytes : of all weights, and of one activation
    launch_s, row_s : seconds of every product, and of each row that is quantised, if rows are
    """

    stepped: float
    overlap: float
    bandwidth: float
    units: float
    large_s: Amount
    half: float
    wide: Amount
    middle: Amount
    narrow: Amount
    weight_bytes: Amount
    input_bytes: float
    n: Amount
    k: Amount
    launch_s: float
    row_s: Amount | None

    @classmethod
    def of(cls, numbers: GemmNumbers, card: Card, n: Amount, k: Amount) -> Weights:
        """Those of a card with such numbers."""
        bandwidth = card.bandwidth_bytes_s * numbers.memory
        return cls(
            stepped=numbers.stepped,
            overlap=numbers.overlap,
            bandwidth=bandwidth,
            units=card.units,
            large_s=2.0 * 128 * 256 * (k + numbers.fill) * card.units / (card.flops_s * numbers.compute),
            half=0.5 / numbers.small_tile,
            wide=rounded_up(n / 256),
            middle=rounded_up(n / 128),
            narrow=rounded_up(n / 64),
            weight_bytes=card.weight_bytes * n * k,
            input_bytes=card.input_bytes,
            n=n,
            k=k,
            launch_s=numbers.launch_us * US,
            row_s=numbers.row_ns * 1e-9 + _RESULT_BYTES * k / bandwidth if numbers.row_ns else None,
        )

    def gemm_s(self, m: Amount) -> Amount:
        """Seconds of a product with m rows."""
        stepped, overlap, bandwidth, units, large_s, half, wide, middle, narrow, *rest = self
        weight_bytes, input_bytes, n, k, launch_s, row_s = rest
        arrays = isinstance(m, np.ndarray) or isinstance(weight_bytes, np.ndarray)
        up, least, root = _OF_ARRAYS if arrays else _OF_FLOATS
        tall = up(m / 128)
        large, medium, small = tall * wide / units, tall * middle / units, up(m / 64) * narrow / units
        waves = least(
            large + stepped * (up(large) - large),
            least(
                (medium + stepped * (up(medium) - medium)) * half,
                (small + stepped * (up(small) - small)) * (half * half * half),
            ),
        )
        compute = large_s * waves
        read = (weight_bytes + input_bytes * m * k + _RESULT_BYTES * m * n) / bandwidth
        c2, r2 = compute * compute, read * read
        both = overlap * root(root(c2 * c2 + r2 * r2)) + (1.0 - overlap) * (compute + read)
        return launch_s + both if row_s is None else launch_s + both + m * row_s

"""The time of an all-reduce, from tables by fabric, number of devices and message size.

The bandwidth of a link alone does not tell: over PCIe the devices of a node share bridges and host memory, so
that each gets less the more take part; over NVLink small messages do not fill the links.

    seconds = latency(fabric, n) + 2 (n - 1) / n * bytes / (link bandwidth * share(fabric, n, bytes))

The second term is the inverse of nccl-tests' bus bandwidth (PERFORMANCE.md of nccl-tests). Shares are
relative to the bandwidth of the link, so that they also apply to slower and to measured links."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from cost_model.hardware import Link
from cost_model.portable import log, logs, power, powers
from cost_model.roofline import Amount

MIB = 1024**2
Table = tuple[tuple[float, float], ...]

# Devices, and the share of a pair's bandwidth that each keeps: L40S over PCIe 4.0, bus bandwidth 20, 5.2 and
# 1.4 GB/s with 2, 4 and 8 cards (NCCL times in AIConfigurator's L40S database). That is a host without
# peer-to-peer copies; behind PCIe switches with them little is lost (4 RTX 4090: 25.9 GB/s,
# tinygrad/open-gpu-kernel-modules issue 36; 8 cards on PCIe 5.0: 28 GB/s against 35 with 4, NVIDIA/nccl
# issue 1639): for such a host give the interconnect by its figures, which are then taken as they are.
_PCIE_SHARE: Table = ((2, 1.0), (4, 0.26), (8, 0.07))

# Message bytes, and the share of the bandwidth at large messages: from an NCCL sweep on 8 H20, whose NVLink
# is that of H100 (27.8 us at 1 MiB, 53 us at 4, 121 us at 16, 195 us at 32, 358 GB/s at 1 GiB, less the 18.7
# us of a small message; kvcache-ai/Mooncake pull request 3484).
_NVLINK_SHARE: Table = ((1 * MIB, 0.56), (4 * MIB, 0.6), (16 * MIB, 0.8), (32 * MIB, 0.93), (256 * MIB, 1.0))

_NVLINK_MESSAGE_S = 3.1e-6
"""Seconds for each of the 2 ceil(log2 n) messages over NVLink: 18.7 us with 8 devices (the same sweep), 6
with 2, where published times of small all-reduces go from 6 to 23 us."""


def all_reduce_s(link: Link, degree: int, message_bytes: Amount) -> Amount:
    """Seconds for `degree` devices, joined by `link`, to add up `message_bytes` that each of them holds.

    The latency is that of a reduce-scatter and an all-gather by halving and doubling: 2 ceil(log2 n) messages
    one after the other, which carry 2 (n - 1) / n of the data (Thakur, Rabenseifner and Gropp, "Optimization
    of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, section 4.5). A ring, as in Table 1
    of HexGen-2, carries as much in 2 (n - 1) messages.
    """
    if degree == 1:
        return 0.0
    per_message = _NVLINK_MESSAGE_S if link.fabric == "nvlink" else link.latency_s
    moved = 2 * (degree - 1) / degree * message_bytes
    share = bandwidth_share(link, degree, message_bytes)
    return 2 * (degree - 1).bit_length() * per_message + moved / (link.bandwidth_bytes_s * share)


def bandwidth_share(link: Link, degree: int, message_bytes: Amount) -> Amount:
    """The share of the link's bandwidth that an all-reduce gets; 1 if nothing is known about the fabric."""
    if link.fabric == "pcie":
        return _interpolated(_PCIE_SHARE, degree)
    if link.fabric == "nvlink":
        return _interpolated(_NVLINK_SHARE, message_bytes)
    return 1.0


def _interpolated(table: Sequence[tuple[float, float]], at: Amount) -> Amount:
    """The table's value at a point: linear in logarithms between two entries, so that times rise with the
    size if they do from entry to entry; constant beyond the ends."""
    if isinstance(at, np.ndarray):
        return _interpolated_at(table, at)
    if at <= table[0][0]:
        return table[0][1]
    if at >= table[-1][0]:
        return table[-1][1]
    k = bisect_left(table, (at, 0.0))
    (low, a), (high, b) = table[k - 1], table[k]
    return a * power(b / a, log(at / low) / log(high / low))


def _interpolated_at(table: Sequence[tuple[float, float]], at: np.ndarray) -> np.ndarray:
    """`_interpolated` at [n] points, to the last bit."""
    sizes, values = np.array(table).T
    inside = np.clip(at, sizes[0], sizes[-1])
    k = np.maximum(1, np.searchsorted(sizes, inside))
    low, high, a, b = sizes[k - 1], sizes[k], values[k - 1], values[k]
    found = a * powers(b / a, logs(inside / low) / logs(high / low))
    return np.where(at <= sizes[0], values[0], np.where(at >= sizes[-1], values[-1], found))

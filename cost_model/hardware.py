"""Accelerators and links as the cost models see them: data-sheet figures, in SI units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1024**3
DeviceKind = Literal["gpu", "cpu"]


@dataclass(frozen=True)
class Accelerator:
    """One device type.

    memory_bytes is the whole device memory, flops_s the dense bf16 (or best 16-bit) peak without
    sparsity, memory_bandwidth_bytes_s the peak of the memory bus.
    """

    name: str
    memory_bytes: float
    flops_s: float
    memory_bandwidth_bytes_s: float
    kind: DeviceKind = "gpu"


@dataclass(frozen=True)
class Link:
    """A directed connection between two devices."""

    bandwidth_bytes_s: float
    latency_s: float

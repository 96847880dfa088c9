"""The figures that a probe measures, as plain values that processes can exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFigures:
    """One device, measured while all others are busy too.

    Attributes
    ----------
    flops_s : of a large matrix product in `dtype`
    read_bytes_s : memory read by a sum over a large array
    """

    name: str
    memory_bytes: float
    flops_s: float
    read_bytes_s: float
    dtype: str


@dataclass(frozen=True)
class LinkFigures:
    """The link between two devices while the others are idle: bandwidth of large messages in one direction,
    latency of small ones."""

    first: int
    second: int
    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class AllReduceFigures:
    """Seconds of an all-reduce of message_bytes over a number of devices."""

    devices: int
    message_bytes: int
    seconds: float

    @property
    def bus_bytes_s(self) -> float:
        """Bus bandwidth as defined by nccl-tests."""
        return 2 * (self.devices - 1) / self.devices * self.message_bytes / self.seconds


@dataclass(frozen=True)
class Findings:
    """All figures of one machine; topology holds the link classes of `nvidia-smi topo -m`, if any."""

    kind: str
    devices: tuple[DeviceFigures, ...]
    links: tuple[LinkFigures, ...]
    all_reduces: tuple[AllReduceFigures, ...]
    topology: tuple[str, ...] = ()

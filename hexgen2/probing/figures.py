"""What a probe finds: plain figures, that processes hand to one another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFigures:
    """One device while all others work, too.

    flops_s : of a large matrix product, in `dtype`; read_bytes_s : of a sum over a large array
    """

    name: str
    memory_bytes: float
    flops_s: float
    read_bytes_s: float
    dtype: str


@dataclass(frozen=True)
class LinkFigures:
    """Two devices alone: bytes/s of large messages in one direction, seconds of a small one."""

    first: int
    second: int
    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class AllReduceFigures:
    """Seconds for so many devices to add up so many bytes."""

    devices: int
    message_bytes: int
    seconds: float

    @property
    def bus_bytes_s(self) -> float:
        """Bus bandwidth as nccl-tests count it."""
        return 2 * (self.devices - 1) / self.devices * self.message_bytes / self.seconds


@dataclass(frozen=True)
class Findings:
    """All of one machine. topology: the link classes of `nvidia-smi topo -m`, where there are any."""

    kind: str
    devices: tuple[DeviceFigures, ...]
    links: tuple[LinkFigures, ...]
    all_reduces: tuple[AllReduceFigures, ...]
    topology: tuple[str, ...] = ()

"""What a node has to compute with, for others to see: asked of the driver, with nothing loaded for it."""

from __future__ import annotations

import os
import subprocess

from runtime.p2p.record import Accelerator

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
TIMEOUT_S = 10.0
MEBIBYTE = 2**20


def accelerators() -> tuple[Accelerator, ...]:
    """The GPUs of this machine with their memory, or else its CPU with all of the machine's."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        found = gpus_in(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        found = ()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found or (Accelerator("CPU", memory_bytes),)


def gpus_in(report: str) -> tuple[Accelerator, ...]:
    """Of lines such as "NVIDIA H100 80GB HBM3, 81559", in MiB.

    Raises
    ------
    ValueError : it is something else
    """
    rows = [line.rpartition(",") for line in report.splitlines() if line.strip()]
    return tuple(Accelerator(name.strip(), int(mebibytes) * MEBIBYTE) for name, _, mebibytes in rows)

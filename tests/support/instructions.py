"""Which instructions this processor has, and which of our compiled kernels a process has loaded."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

BUILDS = {"AVX512": ["AVX512", "AVX2"], "AVX2": ["AVX2"]}.get(
    torch.backends.cpu.get_cpu_capability(), ["DEFAULT"]
)
"""The builds of our compiled kernels that this processor runs, by torch's names of CPU capabilities."""
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
needs_avx512 = pytest.mark.skipif(not AVX512, reason="these processes compute with AVX2 anyway")


def kernels(process: psutil.Process) -> set[str]:
    """The builds of our kernels that a process has loaded."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {name for name in ("avx512", "avx2", "default") if f"/native/_{name}." in maps}

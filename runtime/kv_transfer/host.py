"""Which processes can share memory."""

from __future__ import annotations

import os
from pathlib import Path


def host_identity() -> str:
    """Equal for processes that can open each other's memory: the same boot, process namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.geteuid()}"

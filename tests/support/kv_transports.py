"""The transports for KV caches that can run on this machine."""

from __future__ import annotations

import importlib.util

import pytest

HAS_NIXL = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="the package nixl is missing")
WITH_NIXL = pytest.param("nixl", marks=needs_nixl)
RUNNABLE = ["shm", "tcp", WITH_NIXL]

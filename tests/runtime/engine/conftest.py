from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from instructions import BUILDS

from runtime import native


@pytest.fixture(params=BUILDS)
def each_build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every build of the compiled kernels that this processor runs."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    native.library.loaded.cache_clear()
    if not native.serves(torch.float32, torch.device("cpu")):
        assert shutil.which("g++") is None, "installed without compiled kernels, which g++ can build"
        pytest.skip("neither compiled kernels nor a compiler")
    yield
    native.library.loaded.cache_clear()

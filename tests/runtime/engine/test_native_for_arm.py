"""The compiled kernels are right for ARM, too, as the compiler sees it; `make test-arm` runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[3] / "runtime" / "native").glob("*.cpp"))
COMPILER = "aarch64-linux-gnu-g++"
FLAGS = ["-std=c++17", "-fopenmp", "-Wno-psabi", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_have_no_warnings_for_arm(source: Path) -> None:
    found = subprocess.run([COMPILER, *FLAGS, str(source)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr

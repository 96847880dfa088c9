"""Imitate other kinds of machines on this one, by environment variables that libraries read at load time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy._core import _multiarray_umath as multiarray  # type: ignore[attr-defined]

ANSWERS = Path(__file__).with_name("answers.py")
ROOT = Path(__file__).resolve().parents[2]

NEEDS = {"SkylakeX": "AVX512F", "Haswell": "AVX2", "Zen": "AVX2", "Prescott": "SSE3"}
"""OpenBLAS kernels, and the processor features that they need."""


def machines() -> dict[str, dict[str, str]]:
    """Environment variables by machine name. They vary OpenBLAS kernels, thread counts and hash seeds; those
    for the oldest processors also switch off numpy's vector instructions and the C library's fused
    multiply-add."""
    has = _cpu_features()
    found = {
        kernels: {
            "OPENBLAS_CORETYPE": kernels,
            "OPENBLAS_NUM_THREADS": str(1 + number % 2),
            "PYTHONHASHSEED": str(number),
        }
        for number, kernels in enumerate(NEEDS)
        if has.get(NEEDS[kernels], False)
    }
    found["Prescott"] |= {
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in _dispatched() if has.get(name, False)),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX2_Usable,-FMA_Usable",
    }
    return found


def answers(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], disturb: int | None = None
) -> list[dict[str, Any]]:
    """The answers of a process in that environment to hexgen2 commands (see answers.py)."""
    options = [] if disturb is None else ["--disturb", str(disturb)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, str(ANSWERS), *options, folder],
            input=json.dumps([list(command) for command in commands]),
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(process.stdout)


def _cpu_features() -> dict[str, bool]:
    return multiarray.__cpu_features__


def _dispatched() -> list[str]:
    return multiarray.__cpu_dispatch__

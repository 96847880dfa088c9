"""Copying the KV caches of tokens (copies.cpp)."""

from __future__ import annotations

import numpy as np

from runtime.native import library


def copy_tokens(
    into: np.ndarray, into_runs: np.ndarray, source: np.ndarray, source_runs: np.ndarray, past_caches: bool
) -> None:
    """Copy tokens from slots of one array to slots of another, run after run, in every plane.

    Parameters
    ----------
    into, source : [planes, slots] items of equal size, one per token; slots need not be adjacent
    into_runs, source_runs : [runs, 2] int64: slots [first, end), the same number in all on both sides
    past_caches : bypass the CPU caches, because the copy is not read soon
    """
    library.call(
        "copy_tokens",
        into.ctypes.data,
        *into.strides,
        source.ctypes.data,
        *source.strides,
        len(into),
        into.itemsize,
        into_runs.ctypes.data,
        len(into_runs),
        source_runs.ctypes.data,
        len(source_runs),
        past_caches,
    )


def count_tokens(runs: np.ndarray, slots: int) -> int:
    """The tokens of runs [runs, 2] int64; -1 if one is empty or not within slots [0, slots)."""
    build = library.loaded()
    assert build is not None
    count: int = build.count_tokens(runs.ctypes.data, len(runs), slots)
    return count

"""Which of published runs engines are fitted to, and which check them."""

from __future__ import annotations

import zlib

from hexgen2.calibration.engines import MeasuredRun

_PARTS = 3


def for_fitting(measured: MeasuredRun) -> bool:
    """Whether engines are fitted to a run: to two thirds of all, drawn by their measured times, so that a run
    which is published twice, under two names of one model, is never on both sides."""
    return part(measured) != 1


def part(measured: MeasuredRun) -> int:
    """Which third of all runs it belongs to."""
    return zlib.crc32(f"{measured.ttft_s:.9g} {measured.tpot_s:.9g}".encode()) % _PARTS

"""Hetis's Profiler: linear models of decode attention and transfers, fitted to runs (SC 2025, section 5.1).

A device attends in a h + b g + c seconds, with h query heads over all requests and g bytes of KV cache that
they read; vectors take gamma d + beta seconds to an attention worker and back, with d = (2 + 2 / r) h head
vectors, r query heads for each KV head. All of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cost_model.architecture import ModelArchitecture
from cost_model.attention import WORKER_LAUNCH_S
from cost_model.portable import twelve_digits
from hexgen2.prediction.headwise_times import Device, HeadwiseTimes

GRID = 8
"""Runs with so many numbers of heads and so many sizes of cache (section 7.4)."""
LONGEST = 4096
"""Tokens of the longest context in a run."""


class AttentionRun(NamedTuple):
    """One run of decode attention: query heads and KV bytes over all requests, and its seconds."""

    heads: float
    kv_bytes: float
    seconds: float


class TransferRun(NamedTuple):
    """One exchange of head vectors, there and back, and its seconds."""

    vectors: float
    seconds: float


@dataclass(frozen=True)
class DeviceProfile:
    """The five numbers of a device (a, b, c, gamma, beta), and how far off they are.

    head_s, kv_byte_s, fixed_s : of attention
    vector_s, exchange_s : of the exchange with the primary workers; 0 on these
    error, exchange_error : mean relative error over the runs of the fit
    """

    head_s: float
    kv_byte_s: float
    fixed_s: float
    vector_s: float = 0.0
    exchange_s: float = 0.0
    error: float = 0.0
    exchange_error: float = 0.0

    def group_s(self, query_heads: int) -> float:
        """Seconds for each KV head of a request beside its cache: its query heads and their vectors."""
        return self.head_s * query_heads + self.vector_s * (2 * query_heads + 2)

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """The five numbers."""
        return self.head_s, self.kv_byte_s, self.fixed_s, self.vector_s, self.exchange_s

    @property
    def start_s(self) -> float:
        """Seconds of a layer that depend on no head."""
        return self.fixed_s + self.exchange_s

    def off_by(self, factors: Sequence[float]) -> DeviceProfile:
        """The profile with its five numbers times these: what if it is wrong?"""
        names = ("head_s", "kv_byte_s", "fixed_s", "vector_s", "exchange_s")
        changed = {name: getattr(self, name) * f for name, f in zip(names, factors, strict=True)}
        return replace(self, **changed)


def fit(attention: Iterable[AttentionRun], transfers: Iterable[TransferRun] = ()) -> DeviceProfile:
    """The profile of least squared relative error over these runs; no number is negative.

    Raises
    ------
    ValueError : there are no runs of attention
    """
    runs, sent = list(attention), list(transfers)
    if not runs:
        raise ValueError("a profile needs runs of attention")
    columns = [[r.heads, r.kv_bytes, 1.0] for r in runs]
    (head_s, byte_s, fixed_s), error = _least_squares(columns, [r.seconds for r in runs])
    vector_s = exchange_s = exchange_error = 0.0
    if sent:
        columns = [[r.vectors, 1.0] for r in sent]
        (vector_s, exchange_s), exchange_error = _least_squares(columns, [r.seconds for r in sent])
    return DeviceProfile(head_s, byte_s, fixed_s, vector_s, exchange_s, error, exchange_error)


def profiled(times: HeadwiseTimes, stage: int) -> list[DeviceProfile]:
    """The profiles of a stage's devices, fitted to runs that take what the cost model says.

    Runs are those of the paper: GRID numbers of heads by GRID sizes of cache, the largest those of a full
    batch with contexts of LONGEST tokens.
    """
    model, most = times.costs.model, times.costs.batch_cap
    found: dict[tuple, DeviceProfile] = {}
    for device in times.devices[stage]:
        key = device.group, device.link
        if key not in found:
            found[key] = fit(_attention_runs(times, device, most), _transfer_runs(times, device, model, most))
    return [found[device.group, device.link] for device in times.devices[stage]]


def kv_head_token_bytes(model: ModelArchitecture) -> float:
    """Bytes of one token of one KV head in one layer."""
    return model.kv_bytes_per_token_layer / model.kv_heads


def _attention_runs(times: HeadwiseTimes, device: Device, most: int) -> Iterable[AttentionRun]:
    model = times.costs.model
    fixed_s = WORKER_LAUNCH_S if device.link is not None else 0.0
    for i in range(1, GRID + 1):
        requests = most * i / GRID
        for j in range(1, GRID + 1):
            tokens = requests * LONGEST * j / GRID
            seconds = fixed_s + tokens * times.token_s(device.group, requests)
            yield AttentionRun(requests * model.heads, tokens * model.kv_bytes_per_token_layer, seconds)


def _transfer_runs(
    times: HeadwiseTimes, device: Device, model: ModelArchitecture, most: int
) -> Iterable[TransferRun]:
    if device.link is None:
        return
    for i in range(1, GRID + 1):
        requests = most * i / GRID
        seconds = 2 * device.link.latency_s + times.transfer_s(device.link, requests)
        yield TransferRun(requests * (2 * model.heads + 2 * model.kv_heads), seconds)


def _least_squares(columns: list[list[float]], seconds: list[float]) -> tuple[list[float], float]:
    """Coefficients >= 0 of least squared relative error, and the mean relative error: columns whose
    coefficient would be negative are left out, the most negative first."""
    wanted = np.asarray(seconds)
    scaled = np.asarray(columns) / wanted[:, None]
    size = np.abs(scaled).max(axis=0)
    scaled = scaled / np.where(size > 0, size, 1.0)
    kept = [j for j in range(scaled.shape[1]) if size[j] > 0]
    found = np.zeros(scaled.shape[1])
    while kept:
        solved = np.linalg.lstsq(scaled[:, kept], np.ones(len(wanted)), rcond=None)[0]
        if solved.min() >= -1e-9:
            found[kept] = np.maximum(solved, 0.0)
            break
        kept.pop(int(solved.argmin()))
    errors = np.abs((scaled * found).sum(axis=1) - 1)
    numbers = [_digits(value / each) if each > 0 else 0.0 for value, each in zip(found, size, strict=True)]
    return numbers, _digits(float(errors.mean()))


def _digits(value: float) -> float:
    """To six digits, so that last bits of the fit decide nothing."""
    return float(f"{twelve_digits(value):.6g}")

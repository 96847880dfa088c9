"""What requests saw, under the names of vLLM's benchmark: the same keys from `simulate` and from `bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PERCENTILES = (90, 99)
Sample = tuple[np.ndarray, np.ndarray]
"""Values in seconds, and how many times each was seen."""


def summarise(
    arrival_s: np.ndarray,
    first_s: np.ndarray,
    end_s: np.ndarray,
    isl: np.ndarray,
    osl: np.ndarray,
    itl: Sample,
    targets_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Throughput and latencies of requests [n], of which those without an end (nan) failed.

    Throughput is over the time from the first arrival to the last end. TPOT is the time from the first token
    to the last over the tokens between; requests of one token have none. With targets (ttft, tpot in ms),
    request_goodput counts the requests that met each of them.
    """
    done = ~np.isnan(end_s)
    arrival, first, end = arrival_s[done], first_s[done], end_s[done]
    prompts, outputs = isl[done], osl[done]
    duration = float(end.max() - arrival_s.min()) if len(end) else 0.0
    ttft, e2el = first - arrival, end - arrival
    several = outputs > 1
    tpot = (end - first)[several] / (outputs[several] - 1)
    per_second = 1 / duration if duration > 0 else 0.0
    found: dict[str, Any] = {
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "duration_s": duration,
        "total_input_tokens": int(prompts.sum()),
        "total_output_tokens": int(outputs.sum()),
        "request_throughput": len(end) * per_second,
        "output_throughput": float(outputs.sum()) * per_second,
        "total_token_throughput": float(prompts.sum() + outputs.sum()) * per_second,
        "steady_request_throughput": steady_rate(end),
    }
    if targets_ms:
        met = np.ones(len(end), dtype=bool)
        if "ttft" in targets_ms:
            met &= ttft * 1e3 <= targets_ms["ttft"]
        if "tpot" in targets_ms:
            met[several] &= tpot * 1e3 <= targets_ms["tpot"]
        found["request_goodput"] = float(met.sum()) * per_second
        found["attainment"] = float(met.sum()) / len(done) if len(done) else 0.0
    once = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    for name, (values, counts) in {
        **{name: (values, np.ones(len(values))) for name, values in once.items()},
        "itl": itl,
    }.items():
        found |= _latencies(name, values, counts)
    return found


def steady_rate(end_s: np.ndarray) -> float:
    """Requests/s between the end of the first tenth of the requests and of the last: without the filling and
    the emptying of the replicas. 0 of fewer than 20."""
    if len(end_s) < 20:
        return 0.0
    ends = np.sort(end_s)
    low, high = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    return float((high - low) / (ends[high] - ends[low])) if ends[high] > ends[low] else 0.0


def _latencies(name: str, seconds: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", *(f"p{p}" for p in PERCENTILES))]
    if not len(seconds):
        return dict.fromkeys(keys, 0.0)
    order = np.argsort(seconds, kind="stable")
    values, seen = seconds[order] * 1e3, np.cumsum(counts[order])
    ranks = [np.searchsorted(seen, seen[-1] * share / 100) for share in (50, *PERCENTILES)]
    mean = float((values * counts[order]).sum() / counts.sum())
    return dict(zip(keys, [mean, *(float(values[min(r, len(values) - 1)]) for r in ranks)], strict=True))

"""What a run's requests saw, under the names of vLLM's benchmark: typed results of `simulate` and `bench`.

The fields of these classes are the keys of the JSON files, in their order; no other list of the keys exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

PERCENTILES = (90, 99)
Sample = tuple[np.ndarray, np.ndarray]
"""Values in seconds, and how many times each was seen."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A result whose fields are the keys of its JSON object."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; keys whose value is None are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RequestFigures(Record):
    """Throughput and latencies of all requests.

    Attributes
    ----------
    completed, failed : requests
    duration_s : from the first arrival to the last end
    request_throughput : completed requests/s over `duration_s`
    output_throughput, total_token_throughput : tokens/s; the latter counts prompts as well
    steady_request_throughput : see steady_rate
    request_goodput : requests/s that met every target; None without targets
    attainment : share of all requests that met every target; None without targets
    mean_ttft_ms, ... : time to first token, time per output token after the first, end-to-end latency and
        inter-token latency, each as mean, median, 90th and 99th percentile
    """

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    steady_request_throughput: float
    request_goodput: float | None = None
    attainment: float | None = None
    mean_ttft_ms: float
    median_ttft_ms: float
    p90_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    p90_tpot_ms: float
    p99_tpot_ms: float
    mean_e2el_ms: float
    median_e2el_ms: float
    p90_e2el_ms: float
    p99_e2el_ms: float
    mean_itl_ms: float
    median_itl_ms: float
    p90_itl_ms: float
    p99_itl_ms: float


@dataclass(frozen=True, kw_only=True)
class _SimulationHead(Record):
    placement: str
    cluster: str
    model: str
    requests: str
    predicted_req_s: float


# Dataclass fields are collected from the last base to the first: the keys of the head come first.
@dataclass(frozen=True, kw_only=True)
class SimulationResult(RequestFigures, _SimulationHead):
    """What a simulation predicts.

    Attributes
    ----------
    placement : the strategy that made the placement
    cluster, model : names
    requests : where lengths and arrival times come from
    predicted_req_s : what the search expects of the placement
    replicas : of each replica: requests, utilisation, mean_wait_ms, mean_queue, mean_running, peak_running,
        preemptions
    routes : of each KV route: from, to, requests, bytes, utilisation, mean_after_prefill_ms
    failures : why requests failed, and how many
    assumptions : what the simulation leaves out
    """

    replicas: dict[str, dict[str, float]]
    routes: list[dict[str, Any]]
    failures: dict[str, int]
    assumptions: list[str]


@dataclass(frozen=True, kw_only=True)
class _BenchHead(Record):
    endpoint: str
    model: str
    requests: str


@dataclass(frozen=True, kw_only=True)
class BenchResult(RequestFigures, _BenchHead):
    """What a benchmark's client measured: the keys of a simulation as far as a client can know them.

    Attributes
    ----------
    endpoint, model : URL of the server, and the model as the server names it
    unfinished : requests that were cut off when the run was interrupted
    client_late_ms : longest time by which the client itself sent a request too late
    predicted_req_s : what the search expects of the placement; None for servers that have none
    """

    replicas: dict[str, dict[str, Any]]
    routes: list[dict[str, Any]]
    failures: dict[str, int]
    unfinished: int
    interrupted: bool
    client_late_ms: float
    assumptions: list[str]
    predicted_req_s: float | None = None


def summarise(
    arrival_s: np.ndarray,
    first_s: np.ndarray,
    end_s: np.ndarray,
    isl: np.ndarray,
    osl: np.ndarray,
    itl: Sample,
    targets_ms: Mapping[str, float] | None = None,
) -> RequestFigures:
    """Throughput and latencies of n requests; those without an end time (nan) failed.

    TPOT is the time from the first token to the last divided by the number of tokens after the first;
    requests with one output token have none.

    Parameters
    ----------
    arrival_s, first_s, end_s : [n] times of arrival, of the first token and of the last
    isl, osl : [n] prompt and output tokens
    itl : times between tokens
    targets_ms : targets of "ttft" and "tpot", either or both
    """
    done = ~np.isnan(end_s)
    arrival, first, end = arrival_s[done], first_s[done], end_s[done]
    prompts, outputs = isl[done], osl[done]
    duration = float(end.max() - arrival_s.min()) if len(end) else 0.0
    ttft, e2el = first - arrival, end - arrival
    several = outputs > 1
    tpot = (end - first)[several] / (outputs[several] - 1)
    per_second = 1 / duration if duration > 0 else 0.0
    goodput = attainment = None
    if targets_ms:
        met = np.ones(len(end), dtype=bool)
        if "ttft" in targets_ms:
            met &= ttft * 1e3 <= targets_ms["ttft"]
        if "tpot" in targets_ms:
            met[several] &= tpot * 1e3 <= targets_ms["tpot"]
        goodput = float(met.sum()) * per_second
        attainment = float(met.sum()) / len(done) if len(done) else 0.0
    latencies = _latencies("itl", *itl)
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2el", e2el)):
        latencies |= _latencies(name, values, np.ones(len(values)))
    return RequestFigures(
        completed=int(done.sum()),
        failed=int((~done).sum()),
        duration_s=duration,
        total_input_tokens=int(prompts.sum()),
        total_output_tokens=int(outputs.sum()),
        request_throughput=len(end) * per_second,
        output_throughput=float(outputs.sum()) * per_second,
        total_token_throughput=float(prompts.sum() + outputs.sum()) * per_second,
        steady_request_throughput=steady_rate(end),
        request_goodput=goodput,
        attainment=attainment,
        **latencies,
    )


def steady_rate(end_s: np.ndarray) -> float:
    """Requests/s between the end of the first tenth of the requests and the start of the last tenth, that is,
    without the time in which replicas fill up and drain; 0 for fewer than 20 requests."""
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

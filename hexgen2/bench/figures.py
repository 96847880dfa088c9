"""Computes the result of a benchmark from a client's measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from hexgen2.bench.completions import Dialect
from hexgen2.bench.measurements import Measurements
from hexgen2.results import BenchResult, summarise


def figures(
    endpoint: str,
    model: str,
    seen: Measurements,
    targets_ms: Mapping[str, float],
    dialect: Dialect,
    placement: Mapping[str, Any],
) -> BenchResult:
    """The result of a benchmark.

    Parameters
    ----------
    endpoint, model : URL of the server, and the model as the server names it
    targets_ms : targets of "ttft" and "tpot"; see summarise
    placement : response of `/placement`, for the planned capacity of replicas and routes; may be empty
    """
    over = ~np.isnan(seen.end_s)
    over[list(seen.failed)] = True
    gaps = np.frombuffer(seen.gap_s, dtype=float)
    found = summarise(
        seen.sent_s[over],
        seen.first_s[over],
        seen.end_s[over],
        seen.isl[over],
        seen.osl[over],
        (gaps, np.ones(len(gaps))),
        targets_ms,
    )
    replicas, routes = _traffic(seen, found.duration_s or 1.0, placement)
    return BenchResult(
        endpoint=endpoint,
        model=model,
        requests=seen.requests.source,
        **vars(found),
        replicas=replicas,
        routes=routes,
        failures=dict(Counter(seen.failed.values())),
        unfinished=int((~over).sum()),
        interrupted=seen.interrupted,
        client_late_ms=seen.late_s * 1e3,
        assumptions=_assumptions(dialect, bool(routes)),
        predicted_req_s=placement["throughput"]["req_s"] if placement else None,
    )


def _traffic(
    seen: Measurements, duration_s: float, placement: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures per replica and route, from the finished requests whose answers named their replicas."""
    replicas: dict[str, dict[str, Any]] = {}
    routes: dict[tuple[str, str], dict[str, Any]] = {}
    capacity = {r["id"]: r["capacity_req_s"] for r in placement.get("replicas", [])}
    of_route = {(r["from"], r["to"]): r["capacity_req_s"] for r in placement.get("routes", [])}
    for name in capacity:
        replicas[name] = {"requests": 0, "mean_queue": 0.0, "mean_running": 0.0}
    for ends in of_route:
        routes[ends] = {"from": ends[0], "to": ends[1], "requests": 0, "bytes": 0}
    for index in sorted(seen.routes):
        names, moved = seen.routes[index]
        if np.isnan(seen.end_s[index]):
            continue
        for name in set(names):
            row = replicas.setdefault(name, {"requests": 0, "mean_queue": 0.0, "mean_running": 0.0})
            row["requests"] += 1
        replicas[names[0]]["mean_queue"] += float(seen.first_s[index] - seen.sent_s[index]) / duration_s
        replicas[names[-1]]["mean_running"] += float(seen.end_s[index] - seen.first_s[index]) / duration_s
        for source, target in pairwise(names):
            if source == target:
                continue
            route = routes.setdefault(
                (source, target), {"from": source, "to": target, "requests": 0, "bytes": 0}
            )
            route["requests"] += 1
            route["bytes"] += moved
    for name, row in replicas.items():
        if name in capacity:
            row["utilisation"] = row["requests"] / duration_s / capacity[name]
    for ends, route in routes.items():
        if ends in of_route:
            route["utilisation"] = route["requests"] / duration_s / of_route[ends]
    return replicas, list(routes.values())


def _assumptions(dialect: Dialect, routed: bool) -> list[str]:
    notes = [
        "times are measured by the client, from sending a request, including the time to connect if needed"
    ]
    if not dialect.token_ids:
        notes.append("the server does not accept token ids: prompts are words, assumed to be one token each")
    if not dialect.ignore_eos:
        notes.append("the server does not support ignore_eos: answers may be shorter than requested")
    if routed:
        notes.append(
            "queue: requests before their first token, including those being prefilled; "
            "used: share of the planned capacity"
        )
    return notes

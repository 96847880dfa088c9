"""Prints the results of `simulate` and `bench` as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hexgen2.results import BenchResult, SimulationResult

_REPLICA: dict[str, tuple[str, Callable[[Any], str]]] = {
    "requests": ("requests", str),
    "utilisation": ("used", lambda share: f"{share:.0%}"),
    "mean_wait_ms": ("waited ms", lambda value: f"{value:.4g}"),
    "mean_queue": ("queue", lambda value: f"{value:.3g}"),
    "mean_running": ("running", lambda value: f"{value:.4g}"),
    "peak_running": ("most", str),
    "preemptions": ("preempted", str),
}
_ROUTE: dict[str, tuple[str, Callable[[Any], str]]] = {
    "requests": ("requests", str),
    "utilisation": ("used", lambda share: f"{share:.0%}"),
    "mean_after_prefill_ms": ("after prefill ms", lambda value: f"{value:.4g}"),
    "bytes": ("GB", lambda count: f"{count / 1e9:.4g}"),
}


def print_results(head: str, found: SimulationResult | BenchResult, console: Console) -> None:
    """Print the figures of all requests, then those of replicas and routes; `head` says what served them."""
    console.print(f"{head}: {found.requests}")
    counted = f"{found.completed} requests in {found.duration_s:.4g} s, {found.failed} failed"
    if isinstance(found, BenchResult) and found.unfinished:
        counted += f", {found.unfinished} unfinished: interrupted"
    console.print(counted)
    rate = f"{found.request_throughput:.4g} requests/s, {found.output_throughput:.5g} output tokens/s"
    notes = [f"{found.steady_request_throughput:.4g} between the first and the last tenth"]
    if found.predicted_req_s is not None:
        notes.append(f"the placement is made for {found.predicted_req_s:.4g}")
    console.print(f"throughput  {rate} ({'; '.join(notes)})")
    if found.attainment is not None:
        share = f"{100 * found.attainment:.4g}% within the targets"
        console.print(f"goodput     {found.request_goodput:.4g} requests/s, {share}")
    latencies = Table("", "mean ms", "median", "p90", "p99", box=None)
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = (getattr(found, f"{kind}_{name}_ms") for kind in ("mean", "median", "p90", "p99"))
        latencies.add_row(name.upper(), *(f"{value:.4g}" for value in values))
    console.print(latencies)
    _table("replica", list(found.replicas.items()), _REPLICA, console)
    routes = [(f"{route['from']} -> {route['to']}", route) for route in found.routes]
    _table("KV route", routes, _ROUTE, console)
    for why, count in found.failures.items():
        console.print(f"failed      {count}: {why}")
    console.print(f"assumed     {'; '.join(found.assumptions)}")


def _table(
    kind: str,
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, tuple[str, Callable[[Any], str]]],
    console: Console,
) -> None:
    """Print the columns that all rows have; prints nothing without rows."""
    if not rows:
        return
    kept = [key for key in columns if all(key in row for _, row in rows)]
    table = Table(kind, *(columns[key][0] for key in kept), box=None)
    for name, row in rows:
        table.add_row(name, *(columns[key][1](row[key]) for key in kept))
    console.print(table)

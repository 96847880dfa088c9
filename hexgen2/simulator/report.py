"""A simulation's results as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_results(found: dict[str, Any], console: Console) -> None:
    """Figures of all requests, then of replicas and routes."""
    head = f"{found['model']} on {found['cluster']}, strategy {found['placement']}: {found['requests']}"
    console.print(head)
    counted = f"{found['completed']} requests in {found['duration_s']:.4g} s"
    console.print(f"{counted}, {found['failed']} failed")
    rate = f"{found['request_throughput']:.4g} requests/s, {found['output_throughput']:.5g} output tokens/s"
    steady = f"{found['steady_request_throughput']:.4g} between the first and the last tenth"
    console.print(f"throughput  {rate} ({steady}; the placement is made for {found['predicted_req_s']:.4g})")
    if "request_goodput" in found:
        share = f"{100 * found['attainment']:.4g}% within the targets"
        console.print(f"goodput     {found['request_goodput']:.4g} requests/s, {share}")
    latencies = Table("", "mean ms", "median", "p90", "p99", box=None)
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = (found[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p99"))
        latencies.add_row(name.upper(), *(f"{value:.4g}" for value in values))
    console.print(latencies)
    replicas = Table(
        "replica", "requests", "busy", "waited ms", "queue", "running", "most", "preempted", box=None
    )
    for name, r in found["replicas"].items():
        replicas.add_row(
            name,
            str(r["requests"]),
            f"{r['utilisation']:.0%}",
            f"{r['mean_wait_ms']:.4g}",
            f"{r['mean_queue']:.3g}",
            f"{r['mean_running']:.4g}",
            str(r["peak_running"]),
            str(r["preemptions"]),
        )
    console.print(replicas)
    if found["routes"]:
        routes = Table("KV route", "requests", "used", "after prefill ms", "GB", box=None)
        for r in found["routes"]:
            routes.add_row(
                f"{r['from']} -> {r['to']}",
                str(r["requests"]),
                f"{r['utilisation']:.0%}",
                f"{r['mean_after_prefill_ms']:.4g}",
                f"{r['bytes'] / 1e9:.4g}",
            )
        console.print(routes)
    for why, count in found["failures"].items():
        console.print(f"failed      {count}: {why}")
    console.print(f"assumed     {'; '.join(found['assumptions'])}")

"""A comparison as tables, CSV and plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from cost_model.errors import InputError
from hexgen2.comparison.phases import CHOICES, WithinTarget, where_splitting_pays
from hexgen2.comparison.run import ATTAINMENT, SLO_SCALES, Comparison, Entry, Settings

NOTES = (
    "Peak: simulated with all requests at once. Online: random arrivals at {share:.0%} of each strategy's "
    "own peak.",
    "SLO scale: the multiple of a request's latency alone on the fewest H100s that hold the model within "
    "which {attainment:.0%} of requests finish, when all strategies get {share:.0%} of the smallest peak.",
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print one table per workload; throughput ratios are relative to the first contender."""
    settings, entries = comparison.settings, comparison.entries
    for workload, group in groupby(entries, key=lambda entry: entry.workload):
        own = list(group)
        first = own[0].peak_tok_s
        console.print(f"{settings.model_name}, {workload}")
        table = Table(
            Column("strategy", no_wrap=True),
            *("$/h", "peak req/s", "peak tok/s", "ratio"),
            *("TTFT ms (p90)", "TPOT ms (p90)", "SLO scale"),
            box=None,
        )
        for entry in own:
            if not entry.online:
                continue
            online = entry.online
            assert entry.placement is not None
            table.add_row(
                _short(entry, own[0]),
                f"{entry.placement.price_per_hour:.2f}",
                f"{entry.peak_req_s:.4g}",
                f"{entry.peak_tok_s:.5g}",
                f"{entry.peak_tok_s / first:.3f}" if first else "",
                f"{online.mean_ttft_ms:.0f} ({online.p90_ttft_ms:.0f})",
                f"{online.mean_tpot_ms:.1f} ({online.p90_tpot_ms:.1f})",
                f"{entry.scale_needed:.2f}" if entry.scale_needed else "",
            )
        console.print(table)
        for entry in own:
            if not entry.offline:
                console.print(f"{_short(entry, own[0])} has no placement: {entry.why}")
            elif not entry.online:
                console.print(f"{_short(entry, own[0])} has no steady throughput with all requests at once")
        _print_phases(own, console)
    for workload, targets in groupby(comparison.within, key=lambda one: one.workload):
        _print_targets(workload, list(targets), settings, console)
    for note in NOTES:
        console.print(note.format(share=settings.share, attainment=ATTAINMENT), style="dim")


def _print_phases(entries: Sequence[Entry], console: Console) -> None:
    """What each choice of phases would serve, where a search has looked at all of them."""
    for entry in entries:
        alternatives = entry.placement.search.alternatives if entry.placement else []
        if not alternatives:
            continue
        table = Table("phases", "req/s by formulas", "limited by", box=None)
        for each in alternatives:
            table.add_row(each.phases, f"{each.req_s:.4g}", "KV caches" if each.kv_limited else "replicas")
        console.print(f"{_short(entry, entries[0])}, by choice of phases:")
        console.print(table)


def _print_targets(
    workload: str, within: Sequence[WithinTarget], settings: Settings, console: Console
) -> None:
    """The goodput of each choice of phases, and where splitting pays."""
    first = f", TTFT within {settings.ttft_ms:g} ms" if settings.ttft_ms else ""
    console.print(f"{settings.model_name}, {workload}: goodput in req/s by target{first}")
    table = Table("TPOT ms", *CHOICES, box=None)
    for each in within:
        table.add_row(f"{each.tpot_ms:g}", *(f"{each.goodput_req_s[phases]:.4g}" for phases in CHOICES))
    console.print(table)
    console.print(where_splitting_pays(within))


def _short(entry: Entry, first: Entry) -> str:
    """The name of a contender, without the cluster if it is that of the first one."""
    name, cluster = entry.contender.name, entry.contender.cluster
    return name.removesuffix(f"@{cluster}") if cluster == first.contender.cluster else name


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write tables as CSV, placements and results as JSON, and plots if matplotlib is installed; returns the
    files written.

    Raises
    ------
    InputError : the folder cannot be written
    """
    entries = comparison.entries
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_write_csv(comparison.rows(), folder / "comparison.csv")]
        curves = [_curve(entry) for entry in entries if entry.attainment]
        if curves:
            written.append(_write_csv(curves, folder / "slo_attainment.csv"))
        if comparison.within:
            written.append(_write_csv([w.row() for w in comparison.within], folder / "phases.csv"))
        for entry in entries:
            if entry.placement is None:
                continue
            stem = f"{entry.workload}-{entry.contender.name}".replace("/", "_").replace(":", "-")
            entry.placement.save(folder / f"{stem}.placement.json")
            runs = {"offline": entry.offline, "online": entry.online, "same_rate": entry.same_rate}
            results = {kind: run.to_dict() if run else {} for kind, run in runs.items()}
            path = folder / f"{stem}.results.json"
            path.write_text(json.dumps(results, indent=1) + "\n")
            written.append(path)
    except OSError as error:
        raise InputError(
            str(folder), "", f"cannot be written ({error.strerror})", "choose a writable folder"
        ) from error
    return written + plot(entries, comparison.settings, folder)


def _curve(entry: Entry) -> dict[str, Any]:
    shares = {f"scale_{scale:g}": share for scale, share in zip(SLO_SCALES, entry.attainment, strict=True)}
    return {"workload": entry.workload, "contender": entry.contender.name, **shares}


def _write_csv(records: list[dict[str, Any]], path: Path) -> Path:
    columns = list(dict.fromkeys(key for record in records for key in record))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        writer.writerows(records)
    return path


def plot(entries: Sequence[Entry], settings: Settings, folder: Path) -> list[Path]:
    """Plot throughput as bars and SLO attainment as curves; does nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return []
    workloads = list(dict.fromkeys(entry.workload for entry in entries))
    names = list(dict.fromkeys(entry.contender.name for entry in entries))
    by_key = {(entry.workload, entry.contender.name): entry for entry in entries}
    bars = Figure(figsize=(2.5 + 2 * len(workloads), 4))
    axis = bars.subplots()
    for k, name in enumerate(names):
        heights = [by_key[workload, name].peak_tok_s for workload in workloads]
        places = [w + (k - (len(names) - 1) / 2) * 0.8 / len(names) for w in range(len(workloads))]
        axis.bar(places, heights, 0.8 / len(names), label=name)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set(ylabel="output tokens/s", title=f"{settings.model_name}: simulated peak throughput")
    axis.legend(fontsize="small")
    curves = Figure(figsize=(4 * len(workloads), 3.5))
    for axis, workload in zip(curves.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        for name in names:
            if by_key[workload, name].attainment:
                axis.plot(SLO_SCALES, by_key[workload, name].attainment, label=name)
        axis.set(title=workload, xscale="log", xlabel="SLO scale", ylabel="attainment", ylim=(0, 1.02))
    if workloads:
        axis.legend(fontsize="x-small")
    written = []
    for figure, stem in ((bars, "throughput"), (curves, "slo_attainment")):
        figure.tight_layout()
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None})
        written.append(folder / f"{stem}.svg")
    return written

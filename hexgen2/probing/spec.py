"""Turns the figures of a probe into a cluster file for `hexgen2 search --cluster`."""

from __future__ import annotations

import re

import yaml

from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE, GIB, Accelerator, find_accelerator
from hexgen2.probing.figures import AllReduceFigures, Findings


def cluster_yaml(findings: Findings, host: str, date: str) -> str:
    """The text of the file, with comments that say what was measured, how and when.

    A card of the catalogue keeps its data-sheet peaks, because the cost model's coefficients are shares of
    them. Other cards and CPU devices get the measured figures.
    """
    first = findings.devices[0]
    slowest = min(findings.devices, key=lambda device: device.flops_s)
    card = _catalogued(first.name) if findings.kind == "cuda" else None
    name = card.name if card else _plain(first.name if findings.kind == "cuda" else f"CPU-{host}")
    node: dict = {"name": _plain(host), "accelerators": f"{name}:{len(findings.devices)}"}
    if findings.links:
        node["interconnect"] = _interconnect(findings)
    spec: dict = {
        "name": _plain(host),
        "description": f"{host}, probed on {date}: {len(findings.devices)} {name}",
        "nodes": [node],
    }
    if card is None:
        spec["accelerators"] = {
            name: {
                "memory_gib": _figure(min(d.memory_bytes for d in findings.devices) / GIB),
                "bf16_dense_tflops": _figure(slowest.flops_s / 1e12),
                "memory_bandwidth_gbyte_s": _figure(min(d.read_bytes_s for d in findings.devices) / 1e9),
                "kind": "cpu" if findings.kind == "cpu" else "gpu",
            }
        }
    if findings.kind == "cpu":
        spec["nodes"][0]["price_per_gpu_hour"] = 0.0
    lines = [f"# Measured on {date} by hexgen2 probe.", *(f"# {line}" for line in _remarks(findings, card))]
    return "\n".join(lines) + "\n" + yaml.safe_dump(spec, sort_keys=False, width=110)


def _remarks(findings: Findings, card: Accelerator | None) -> list[str]:
    """One comment line per figure: what was measured, how, and the result."""
    lines = []
    for k, device in enumerate(findings.devices):
        used = "the data sheet's figures are used below" if card else "used below: the slowest device's"
        lines.append(
            f"device {k} ({device.name}): {device.flops_s / 1e12:.4g} TFLOP/s in {device.dtype} products, "
            f"{device.read_bytes_s / 1e9:.4g} GB/s read by a sum, medians while all devices work; {used}"
        )
    if findings.kind == "cpu":
        lines.append("memory: what was free when probed, in equal parts")
    if findings.topology:
        lines.append(f"nvidia-smi topo: {', '.join(findings.topology)}")
    backend = "NCCL" if findings.kind == "cuda" else "gloo"
    for link in findings.links:
        lines.append(
            f"{backend} between {link.first} and {link.second}: {link.bandwidth_bytes_s / 1e9:.4g} GB/s in "
            f"16 MiB messages, {link.latency_s * 1e6:.4g} us for 4 KiB"
        )
    for one in findings.all_reduces:
        lines.append(
            f"{backend} all-reduce of {one.message_bytes} bytes over {one.devices}: "
            f"{one.seconds * 1e6:.4g} us, bus bandwidth {one.bus_bytes_s / 1e9:.4g} GB/s"
        )
    if findings.links:
        lines.append(
            "interconnect: the lesser of the slowest pair and the largest all-reduce over all devices"
        )
    return lines


def _interconnect(findings: Findings) -> dict[str, float]:
    """The lesser of the slowest pair and the largest all-reduce over all devices."""
    pair = min(link.bandwidth_bytes_s for link in findings.links)
    latency = max(link.latency_s for link in findings.links)
    return {
        "bandwidth_gbyte_s": _figure(min(pair, _largest(findings.all_reduces).bus_bytes_s) / 1e9),
        "latency_us": _figure(latency * 1e6),
    }


def _largest(all_reduces: tuple[AllReduceFigures, ...]) -> AllReduceFigures:
    return max(all_reduces, key=lambda one: (one.devices, one.message_bytes))


def _catalogued(name: str) -> Accelerator | None:
    try:
        card = find_accelerator(name)
    except InputError:
        return None
    return CATALOGUE[card.name]


def _plain(name: str) -> str:
    """A valid name for a node or a card."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "machine"


def _figure(value: float) -> float:
    return float(f"{value:.4g}")

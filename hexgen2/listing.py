"""Everything that ships, as (name, description) rows for `hexgen2 list`, and as records for programs."""

from __future__ import annotations

from typing import Any

from cluster_specs.catalogue import CatalogueEntry, catalogue
from cluster_specs.loader import list_clusters
from cost_model.dtypes import WEIGHT_BYTES, kernels
from cost_model.gpu_catalogue import DATA_SHEETS, DataSheet
from cost_model.hardware import GIB, interconnect_link, usual_interconnect
from cost_model.models import SHIPPED, find_model
from hexgen2.strategies.registry import STRATEGIES
from hexgen2.workload.classes import list_workloads

Rows = list[tuple[str, str]]


def clusters() -> Rows:
    """Shipped cluster specs."""
    return list_clusters()


def gpus() -> Rows:
    """The GPU catalogue with prices."""
    return [(name, gpu_text(entry)) for name, entry in catalogue().items()]


def gpu_text(entry: CatalogueEntry) -> str:
    """Data-sheet figures and price of a GPU; an assumed price is marked."""
    card, price = entry.accelerator, "no price known"
    if entry.price_per_gpu_hour is not None:
        price = f"${entry.price_per_gpu_hour:.2f}/h" + (" (assumed)" if entry.price_assumed else "")
    return (
        f"{card.memory_bytes / GIB:4.0f} GiB  {card.flops_s / 1e12:6.4g} TFLOP/s  "
        f"{card.memory_bandwidth_bytes_s / 1e9:5.0f} GB/s  {price}"
    )


def gpu_records() -> list[dict[str, Any]]:
    """All that is known of each GPU, with units in the keys; None where there is no public figure or no such
    tensor cores."""
    sheets = {sheet.name: sheet for sheet in DATA_SHEETS}
    return [_gpu_record(entry, sheets.get(name)) for name, entry in catalogue().items()]


def _gpu_record(entry: CatalogueEntry, sheet: DataSheet | None) -> dict[str, Any]:
    card = entry.accelerator
    interconnect = usual_interconnect(card)
    link, assumption = interconnect_link(interconnect, card)
    return {
        "name": card.name,
        "kind": card.kind,
        "generation": card.generation,
        "memory_gib": card.memory_bytes / GIB,
        "memory_bandwidth_gbyte_s": card.memory_bandwidth_bytes_s / 1e9,
        "bf16_dense_tflops": card.flops_s / 1e12,
        "fp8_dense_tflops": sheet.fp8 if sheet else None,
        "int8_dense_tops": sheet.int8 if sheet else None,
        "fp4_dense_tflops": sheet.fp4 if sheet else None,
        "processors": sheet.processors if sheet else None,
        "interconnect": interconnect,
        "interconnect_gbyte_s": link.bandwidth_bytes_s / 1e9,
        "interconnect_assumption": assumption,
        "formats": {format: kernels(card, format) for format in WEIGHT_BYTES},
        "price_per_gpu_hour": entry.price_per_gpu_hour,
        "price_assumed": entry.price_assumed,
        "price_source": entry.price_source,
        "source": card.source,
    }


def models() -> Rows:
    """Shipped model architectures."""
    rows = []
    for name in SHIPPED:
        model = find_model(name)
        active = "" if model.experts == 1 else f" ({model.active_params / 1e9:.3g} B active)"
        rows.append((name, f"{model.total_params / 1e9:.4g} B parameters{active}, {model.layers} layers"))
    return rows


def workloads() -> Rows:
    """Shipped workload classes."""
    return list_workloads()


def strategies() -> Rows:
    """Search strategies."""
    return [(name, description) for name, (_, description) in STRATEGIES.items()]


def records(what: str) -> list[dict[str, Any]]:
    """What `hexgen2 list WHAT --json` prints: name and description, of GPUs all figures."""
    if what == "gpus":
        return gpu_records()
    rows: Rows = {"clusters": clusters, "models": models, "workloads": workloads, "strategies": strategies}[
        what
    ]()
    return [{"name": name, "description": description} for name, description in rows]

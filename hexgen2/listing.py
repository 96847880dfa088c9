"""Everything that ships, as (name, description) rows for `hexgen2 list`."""

from __future__ import annotations

from cluster_specs.catalogue import CatalogueEntry, catalogue
from cluster_specs.loader import list_clusters
from cost_model.hardware import GIB
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
    card = entry.accelerator
    price = f"${entry.price_per_gpu_hour:.2f}/h" + (" (assumed)" if entry.price_assumed else "")
    return (
        f"{card.memory_bytes / GIB:4.0f} GiB  {card.flops_s / 1e12:6.4g} TFLOP/s  "
        f"{card.memory_bandwidth_bytes_s / 1e9:5.0f} GB/s  {price}"
    )


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

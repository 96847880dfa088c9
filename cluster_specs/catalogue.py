"""The hardware catalogue joined with prices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cluster_specs.strict_yaml import MAX_YAML_BYTES, parse_mapping
from cost_model.files import read_text
from cost_model.hardware import CATALOGUE, Accelerator

_PRICES_FILE = Path(__file__).with_name("prices.yaml")


@dataclass(frozen=True)
class CatalogueEntry:
    """A card with its rental price in US dollars, None where no price is known; `price_source` says where the
    price comes from."""

    accelerator: Accelerator
    price_per_gpu_hour: float | None
    price_assumed: bool
    price_source: str


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """All known cards, by canonical name."""
    prices = parse_mapping(read_text(_PRICES_FILE, MAX_YAML_BYTES), str(_PRICES_FILE))
    return {name: _entry(card, prices.get(name)) for name, card in CATALOGUE.items()}


def _entry(card: Accelerator, price: dict[str, Any] | None) -> CatalogueEntry:
    """The card with its entry of the price list."""
    if price is None:
        return CatalogueEntry(card, None, price_assumed=False, price_source="")
    return CatalogueEntry(card, float(price["price_per_gpu_hour"]), price["assumed"], price["source"])

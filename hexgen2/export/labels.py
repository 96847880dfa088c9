"""Turns the names of nodes and replicas into names that other systems accept."""

from __future__ import annotations

import re
from collections.abc import Iterable


def safe_names(names: Iterable[str], limit: int = 40) -> dict[str, str]:
    """A DNS label for each name (RFC 1123: a-z, 0-9 and "-", first and last alphanumeric), all different."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        label = re.sub("[^a-z0-9]+", "-", name.lower())[:limit].strip("-") or "x"
        number, taken = 2, set(labels.values())
        unique = label
        while unique in taken:
            unique, number = f"{label}-{number}", number + 1
        labels[name] = unique
    return labels

"""What a search for layer ranges knows of its nodes: which GPUs they are, and where their figures come
from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hexgen2.search.layer_ranges.instance import Instance, Range


@dataclass(frozen=True)
class RangeNodes:
    """An instance, and what its nodes are.

    Attributes
    ----------
    instance : the question
    gpus : [n] indices of each node's GPUs in the cluster: the first is the node in links
    names : [n] replica ids
    most_requests : how many requests a node with that range holds KV caches of at a time
    tables : tokens/s by layers held of each type of node, where they were given; None if they are predicted
    """

    instance: Instance
    gpus: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    most_requests: Callable[[int, Range], int]
    tables: Mapping[str, list[float]] | None = field(default=None)

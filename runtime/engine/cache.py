"""The KV cache of the requests on one worker: one contiguous block per request."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from runtime.kv_layout import Part


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What every request's cache has in common on one worker."""

    part: Part
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def heads(self) -> int:
        return self.part.end_head - self.part.first_head

    @property
    def bytes_per_token_cell(self) -> int:
        """Key and value of one token in one (layer, head) cell."""
        return 2 * self.head_dim * self.dtype.itemsize


class SequenceCache:
    """Keys and values of one request in the layers and heads that this worker holds.

    Layers and heads are global numbers everywhere; capacity is in tokens.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        layers = shape.part.end_layer - shape.part.first_layer
        size = (layers, 2, shape.heads, capacity, shape.head_dim)
        self._block = torch.empty(size, dtype=shape.dtype, device=shape.device)

    def layer(self, layer: int) -> torch.Tensor:
        """Keys and values of a layer: [2, heads, capacity, head_dim], a view."""
        return self._block[layer - self.shape.part.first_layer]

    def heads(self, layer: int, first_head: int, end_head: int, tokens: int) -> torch.Tensor:
        """Keys and values of some heads of a layer: [2, end - first, tokens, head_dim], a view."""
        offset = self.shape.part.first_head
        return self.layer(layer)[:, first_head - offset : end_head - offset, :tokens]


class CacheTable:
    """The caches of one worker by request id; safe between threads."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self._caches: dict[str, SequenceCache] = {}
        self._lock = threading.Lock()

    def create(self, request_id: str, capacity: int) -> SequenceCache:
        """Allocate a request's cache; an older one under the same id is forgotten."""
        cache = SequenceCache(self.shape, capacity)
        with self._lock:
            self._caches[request_id] = cache
        return cache

    def __getitem__(self, request_id: str) -> SequenceCache:
        with self._lock:
            return self._caches[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a request; its memory goes when the last thread using it is done."""
        with self._lock:
            self._caches.pop(request_id, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._caches)

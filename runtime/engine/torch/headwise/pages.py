"""KV heads of requests in a paged cache whose blocks hold one head each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from runtime.engine.torch.attention import make_attention
from runtime.engine.torch.attention.base import Batch, Scoring
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.protocol.framing import Connection

Key = tuple[str, int]
"""A request, and the number of one of its KV heads."""
Rows = Sequence[tuple[Key, int, int]]
"""The new tokens of heads: which head, the position of its first token, and their number."""


def one_head(shape: CacheShape, layers: tuple[int, int] | None = None) -> CacheShape:
    """What a block of single heads has for each token: these layers (None: all), otherwise as in `shape`."""
    first, end = layers or (shape.part.first_layer, shape.part.end_layer)
    return replace(shape, part=Part(first, end, 0, 1))


class HeadPages:
    """Which blocks of a cache hold which head, and attention over them. Heads move as the cache stores them.

    Attributes
    ----------
    cache : of single heads, so [layers, 2, slots, 1, width]
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self._attention = cache, make_attention(cache)
        self._tables: dict[Key, list[int]] = {}

    def grant(self, key: Key, blocks: Sequence[int]) -> None:
        """Give a head further blocks."""
        self._tables.setdefault(key, []).extend(blocks)

    def forget(self, request_id: str, heads: int) -> None:
        """Forget the heads of a request; others get their blocks."""
        for head in range(heads):
            self._tables.pop((request_id, head), None)

    def batch(self, rows: Rows) -> Batch:
        """A batch of these heads, each as if it were a sequence."""
        return Batch.make(
            self._attention,
            [range(count) for _, _, count in rows],
            [first for _, first, _ in rows],
            [self._tables[key] for key, _, _ in rows],
            [False] * len(rows),
        )

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch) -> None:
        """Write the batch's keys and values, [rows, 1, head_dim], to a layer."""
        self._attention.store(key, value, layer, batch)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        window: int | None,
    ) -> torch.Tensor:
        """What queries [rows, query_heads, head_dim] attend to, of the same shape. The cache holds the keys
        and values already."""
        scoring = Scoring(window)
        return self._attention.attend(query, key, value, layer, batch, scoring).view(query.shape)

    def before(self, layer: int, key: Key, end_token: int) -> torch.Tensor:
        """Keys and values of the first tokens of a head in one layer, [2, tokens, width]."""
        return self.cache.layer(layer)[:, self._slots(key, 0, end_token), 0]

    def take(self, key: Key, first_token: int, end_token: int) -> torch.Tensor:
        """Keys and values of a head's tokens, [layers, 2, tokens, width]."""
        return self.cache.pool[:, :, self._slots(key, first_token, end_token), 0]

    def put(
        self, key: Key, first_token: int, end_token: int, blocks: Sequence[int], kv: torch.Tensor
    ) -> None:
        """Write keys and values of a head that moves here, [layers, 2, tokens, width]; with the first
        token, what was known of the head is outdated."""
        if first_token == 0:
            self._tables.pop(key, None)
        self.grant(key, blocks)
        self.write(key, first_token, end_token, kv)

    def write(self, key: Key, first_token: int, end_token: int, kv: torch.Tensor) -> None:
        """Write keys and values of a head's tokens, [layers, 2, tokens, width]."""
        self.cache.pool[:, :, self._slots(key, first_token, end_token), 0] = kv

    def _slots(self, key: Key, first_token: int, end_token: int) -> torch.Tensor:
        slots = self.cache.slots(self._tables[key], first_token, end_token)
        return torch.from_numpy(slots).to(self.cache.shape.device)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, for a socket."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def receive_tensor(
    connection: Connection, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor whose bytes come next.

    Raises
    ------
    OSError : the connection ended before
    """
    tensor = torch.empty(tuple(shape), dtype=dtype)
    connection.receive_into(bytes_of(tensor))
    return tensor.to(device)

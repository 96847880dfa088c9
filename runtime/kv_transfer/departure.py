"""One request's KV cache as it leaves a worker: what is still to be computed, and what is in flight."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.kv_cache.layout import KvTransfer
from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.slices import Runs

if TYPE_CHECKING:
    import torch

SLICE_BYTES = 8 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Item:
    """Tokens [first, end) of one layer and some heads for one destination, ready since `ready_s`."""

    departure: KvDeparture
    destination: str
    layer: int
    heads: tuple[int, int]
    first_token: int
    end_token: int
    bytes: int
    runs: Runs
    event: torch.cuda.Event | None
    ready_s: float = field(default_factory=time.monotonic)

    def continues(self, other: Item) -> bool:
        """Whether this is the next layer of the same cells."""
        return (
            self.departure is other.departure
            and self.layer == other.layer + 1
            and self.heads == other.heads
            and (self.first_token, self.end_token) == (other.first_token, other.end_token)
        )


class KvDeparture:
    """What is left to send of a request. The sender's lock guards it.

    Attributes
    ----------
    given_up : send nothing more

    Parameters
    ----------
    plan : the parts that this worker sends, and to whom
    first_token, end_token : the tokens [first, end) to send
    slice_bytes : of a slice, at most
    """

    def __init__(
        self,
        request_id: str,
        plan: tuple[KvTransfer, ...],
        first_token: int,
        end_token: int,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        self.request_id, self.end_token, self._slice_bytes = request_id, end_token, slice_bytes
        self.given_up = False
        self._in_flight = 0
        self._by_layer: dict[int, list[KvTransfer]] = defaultdict(list)
        for transfer in plan:
            for layer in range(transfer.part.first_layer, transfer.part.end_layer):
                self._by_layer[layer].append(transfer)
        self._next_token = dict.fromkeys(self._by_layer, first_token)
        self._to_come = (end_token - first_token) * len(self._by_layer)
        self._latest: tuple[int, int, Runs] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight and nothing more will be."""
        return self._in_flight == 0 and (self.given_up or self._to_come == 0)

    def advance(
        self,
        cache: Pages,
        layer: int,
        table: Sequence[int],
        upto_token: int,
        event: torch.cuda.Event | None,
    ) -> list[Item]:
        """The items that are new since the last call; they count as in flight from now on."""
        first, end = self._next_token.get(layer, self.end_token), min(upto_token, self.end_token)
        if self.given_up or first >= end:
            return []
        self._next_token[layer] = end
        self._to_come -= end - first
        runs = self._runs(cache, table, first, end)
        items = list[Item]()
        for transfer in self._by_layer[layer]:
            heads = (transfer.part.first_head, transfer.part.end_head)
            token_bytes = (heads[1] - heads[0]) * cache.shape.bytes_per_token_cell
            step = max(1, self._slice_bytes // token_bytes)
            for token in range(first, end, step):
                last = min(token + step, end)
                size = (last - token) * token_bytes
                part = runs if last - token == end - first else runs.between(token - first, last - first)
                items.append(Item(self, transfer.destination, layer, heads, token, last, size, part, event))
        self._in_flight += len(items)
        return items

    def hold(self) -> None:
        """Keep `is_over` False until one more `finish`."""
        self._in_flight += 1

    def finish(self) -> None:
        """Count an item that was taken by the receiver, or dropped."""
        self._in_flight -= 1

    def _runs(self, cache: Pages, table: Sequence[int], first: int, end: int) -> Runs:
        """The slots of tokens [first, end), computed once for all layers of a step."""
        if self._latest is None or self._latest[:2] != (first, end):
            self._latest = (first, end, Runs(cache.runs(table, first, end), end - first))
        return self._latest[2]

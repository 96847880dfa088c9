"""One request's KV cache as it arrives: which part is here, and who may still write to its blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.slices import Runs, slice_bytes
from runtime.protocol.between_workers import KvSlice


class KvArrival:
    """Tokens [first, end) of a request, in this worker's layers and heads.

    When a request is forgotten, its blocks may go to another one at once. So bytes are written to the pool
    only inside `writing`, and `close` returns when no thread is inside.
    """

    def __init__(
        self, cache: Pages, request_id: str, table: Sequence[int], first_token: int, end_token: int
    ) -> None:
        self.request_id = request_id
        self.bytes_received = 0
        self.first_s = self.last_s = 0.0
        self._cache = cache
        self._first_token, self._end_token = first_token, end_token
        self._runs = Runs(cache.runs(table, first_token, end_token), end_token - first_token)
        self._claimed = [[first_token] * cache.shape.heads for _ in range(cache.shape.layers)]
        self._missing = (end_token - first_token) * cache.shape.part.cells
        self._open, self._writers = True, 0
        self._changed = threading.Condition()

    def claim(self, header: KvSlice) -> str:
        """Reserve a slice's cells for one connection; returns what is wrong with it, "" if it is fine."""
        shape, part = self._cache.shape, self._cache.shape.part
        layers, heads = range(header.first_layer, header.end_layer), range(header.first_head, header.end_head)
        inside = (
            part.first_layer <= header.first_layer < header.end_layer <= part.end_layer
            and part.first_head <= header.first_head < header.end_head <= part.end_head
        )
        if not inside:
            return f"layers {layers} x heads {heads} are not in this worker's part {part}"
        tokens = header.end_token - header.first_token
        if not self._first_token <= header.first_token < header.end_token <= self._end_token:
            return f"tokens {header.first_token} to {header.end_token} were not expected"
        size = slice_bytes(header, shape.bytes_per_token_cell)
        if header.payload_bytes != size:
            return f"{tokens} tokens have {header.payload_bytes} bytes instead of {size}"
        claimed = self._claimed[header.first_layer - part.first_layer : header.end_layer - part.first_layer]
        cells = slice(header.first_head - part.first_head, header.end_head - part.first_head)
        before, after = ([token] * len(heads) for token in (header.first_token, header.end_token))
        with self._changed:
            if any(row[cells] != before for row in claimed):
                return f"layers {layers} x heads {heads}: twice or with a gap at token {header.first_token}"
            for row in claimed:
                row[cells] = after
            self.first_s = self.first_s or time.monotonic()
        return ""

    def arrived(self, header: KvSlice) -> bool:
        """Count a slice that is in the pool; True for the last one."""
        cells = (header.end_layer - header.first_layer) * (header.end_head - header.first_head)
        with self._changed:
            self.bytes_received += header.payload_bytes
            self._missing -= cells * (header.end_token - header.first_token)
            self.last_s = time.monotonic()
            return self._missing == 0

    def runs(self, first_token: int, end_token: int) -> Runs:
        """The slots of tokens [first, end)."""
        return self._runs.between(first_token - self._first_token, end_token - self._first_token)

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Delay `close` while the pool is written; yields False if it is closed: then write nothing."""
        with self._changed:
            is_open = self._open
            self._writers += is_open
        try:
            yield is_open
        finally:
            with self._changed:
                self._writers -= is_open
                self._changed.notify_all()

    def close(self) -> None:
        """Forbid further writes and wait for those in progress."""
        with self._changed:
            self._open = False
            while self._writers:
                self._changed.wait()

"""The receiving side of a KV cache's way: bytes go straight into the reserved cache, re-laid out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from runtime.engine.cache import CacheTable, SequenceCache
from runtime.engine.kv_transfer import byte_views
from runtime.messages import KvLanded, KvSlice
from runtime.transport import Connection

log = logging.getLogger(__name__)

_SCRATCH_BYTES = 256 * 1024


class Landing:
    """What has arrived of one request's KV cache on this worker."""

    def __init__(self, cache: SequenceCache, prompt_tokens: int) -> None:
        self.cache, self.tokens = cache, prompt_tokens
        self.bytes_received = 0
        self.missing = cache.shape.part.cells
        self.first_s = self.last_s = 0.0
        self._claimed: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def claim(self, header: KvSlice, started_s: float) -> str:
        """Take a slice's cells for a connection; what is wrong with it, or "" if nothing is."""
        part = self.cache.shape.part
        layers, heads = range(header.first_layer, header.end_layer), range(header.first_head, header.end_head)
        inside = (
            part.first_layer <= header.first_layer < header.end_layer <= part.end_layer
            and part.first_head <= header.first_head < header.end_head <= part.end_head
        )
        if not inside:
            return f"layers {layers} x heads {heads} are not of this worker's part {part}"
        size = len(layers) * len(heads) * self.tokens * self.cache.shape.bytes_per_token_cell
        if header.tokens != self.tokens or header.payload_bytes != size:
            return f"{header.tokens} tokens in {header.payload_bytes} bytes, not {self.tokens} in {size}"
        cells = {(layer, head) for layer in layers for head in heads}
        with self._lock:
            if self._claimed & cells:
                return f"layers {layers} x heads {heads} come a second time"
            self._claimed |= cells
            self.first_s = self.first_s or started_s
        return ""

    def arrived(self, header: KvSlice) -> bool:
        """Count a slice whose bytes are in place; True for the last one."""
        cells = (header.end_layer - header.first_layer) * (header.end_head - header.first_head)
        with self._lock:
            self.bytes_received += header.payload_bytes
            self.missing -= cells
            self.last_s = time.monotonic()
            return self.missing == 0


class KvReceiver:
    """Receives KV caches for the requests that this worker expects.

    Room is promised (Reserved) only when every worker of the replica has made it. So a slice of a
    request that nobody expects belongs to one that was cancelled: its bytes are read and dropped.

    Parameters
    ----------
    on_landed : called once per request, when all that this worker holds of it is here
    on_failed : called with a request id and a reason when a connection breaks within its slice
    """

    def __init__(
        self,
        worker: str,
        caches: CacheTable,
        on_landed: Callable[[KvLanded], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self._worker, self._caches = worker, caches
        self._on_landed, self._on_failed = on_landed, on_failed
        self._landings: dict[str, Landing] = {}

    def expect(self, request_id: str, prompt_tokens: int, capacity_tokens: int) -> None:
        """Make room for a request."""
        cache = self._caches.create(request_id, capacity_tokens)
        self._landings[request_id] = Landing(cache, prompt_tokens)

    def forget(self, request_id: str) -> None:
        """Drop what arrives of a request from now on."""
        self._landings.pop(request_id, None)

    def serve(self, connection: Connection, peer: str) -> None:
        """Receive slices until the peer closes; what a broken connection cuts short fails alone."""
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        header: KvSlice | None = None
        try:
            while (message := connection.receive()) is not None:
                if not isinstance(message, KvSlice):
                    raise ConnectionError(f"a {type(message).__name__} is not for a KV connection")
                header = message
                self._receive(connection, header, scratch)
                header = None
        except (OSError, RuntimeError) as error:
            log.warning("worker %s: KV from %s broke off: %s", self._worker, peer, error)
            if header is not None and self._landings.pop(header.request_id, None) is not None:
                self._on_failed(header.request_id, f"KV cache from {peer} broke off: {error}")
        finally:
            connection.close()

    def _receive(self, connection: Connection, header: KvSlice, scratch: memoryview) -> None:
        landing = self._landings.get(header.request_id)
        if landing is None:
            _drain(connection, header.payload_bytes, scratch)
            return
        if problem := landing.claim(header, time.monotonic()):
            raise ConnectionError(problem)
        for layer in range(header.first_layer, header.end_layer):
            _receive_block(connection, landing.cache, layer, header)
        if landing.arrived(header) and self._landings.pop(header.request_id, None) is not None:
            self._on_landed(
                KvLanded(
                    request_id=header.request_id,
                    worker=self._worker,
                    bytes_received=landing.bytes_received,
                    seconds=landing.last_s - landing.first_s,
                )
            )


def _receive_block(connection: Connection, cache: SequenceCache, layer: int, header: KvSlice) -> None:
    """One layer's [2, heads, tokens, head_dim] from the stream into the cache."""
    block = cache.heads(layer, header.first_head, header.end_head, header.tokens)
    if block.device.type == "cpu":
        for view in byte_views(block):
            connection.receive_into(view)
        return
    with torch.cuda.device(block.device):
        staged = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        for view in byte_views(staged):
            connection.receive_into(view)
        block.copy_(staged)
        torch.cuda.synchronize()


def _drain(connection: Connection, count: int, scratch: memoryview) -> None:
    while count > 0:
        size = min(count, len(scratch))
        connection.receive_into(scratch[:size])
        count -= size

"""What an attention worker computes: decode attention over the KV heads that it holds for stages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import torch

from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.headwise.pages import HeadPages, Key, bytes_of, receive_tensor
from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.protocol.framing import Connection
from runtime.protocol.to_attention_workers import (
    AttendHeads,
    GrantHeads,
    HeadKey,
    HeadRows,
    HeadStep,
    OpenHeads,
    PutHead,
    TakeHead,
)

log = logging.getLogger(__name__)


class AttentionServer:
    """The lanes of one attention worker, each served in the thread of its connection.

    The memory of a lane is taken when its worker connects, and kept for its next connection.

    Parameters
    ----------
    blocks : that each worker of a stage has here, by name
    """

    def __init__(self, blocks: Mapping[str, int], block_tokens: int, device: str, threads: int) -> None:
        self._blocks, self._block_tokens, self._device = blocks, block_tokens, torch.device(device)
        torch.set_num_threads(threads)
        self._pools: dict[str, PagedCache] = {}
        self._lock = threading.Lock()
        self._turns = {worker: threading.Lock() for worker in blocks}

    def serve(self, connection: Connection, worker: str) -> None:
        """Serve a stage's worker until its connection ends. A new connection waits for the end of the one
        before, which may still write to the same blocks."""
        try:
            opened = connection.receive()
            if worker in self._blocks and isinstance(opened, OpenHeads):
                with self._turns[worker], torch.inference_mode():
                    _Lane(connection, self._pool(worker, opened), opened.query_heads).serve()
        except OSError as error:
            log.warning("the connection of worker %s ended: %s", worker, error)
        finally:
            connection.close()

    def _pool(self, worker: str, opened: OpenHeads) -> PagedCache:
        with self._lock:
            if worker not in self._pools:
                dtype = getattr(torch, opened.dtype)
                part, form = Part(opened.first_layer, opened.end_layer, 0, 1), kv_format(opened.kv_format)
                shape = CacheShape(part, opened.head_dim, dtype, self._device, format=form)
                blocks = self._blocks[worker]
                self._pools[worker] = PagedCache(shape, blocks, self._block_tokens)
            return self._pools[worker]


class _Lane:
    """One connection: the heads of one worker of a stage."""

    def __init__(self, connection: Connection, cache: PagedCache, query_heads: int) -> None:
        self._connection, self._cache, self._query_heads = connection, cache, query_heads
        self._pages, self._shape = HeadPages(cache), cache.shape
        self._heads = 0
        self._decodes: tuple[HeadRows, ...] = ()
        self._prompts: tuple[HeadRows, ...] = ()
        self._stored: Batch | None = None
        self._attended: Batch | None = None

    def serve(self) -> None:
        while (message := self._connection.receive()) is not None:
            match message:
                case GrantHeads():
                    self._grant(message)
                case HeadStep():
                    self._begin(message)
                case AttendHeads():
                    self._attend(message)
                case PutHead(key=key, first_token=first, end_token=end, blocks=blocks):
                    width, dtype = self._shape.width, self._shape.stored_dtype
                    kv = self._receive(self._shape.layers, 2, end - first, width, dtype=dtype)
                    self._pages.put(_key(key), first, end, blocks, kv)
                    self._heads = max(self._heads, key.head + 1)
                case TakeHead(key=key, first_token=first, end_token=end):
                    self._answer(self._pages.take(_key(key), first, end))
                case _:
                    raise ConnectionError(f"{type(message).__name__} is not for an attention worker")

    def _grant(self, message: GrantHeads) -> None:
        for request_id in message.forgotten:
            self._pages.forget(request_id, self._heads)
        for each in message.granted:
            self._pages.grant(_key(each.key), each.blocks)
            self._heads = max(self._heads, each.key.head + 1)

    def _begin(self, message: HeadStep) -> None:
        self._decodes, self._prompts = message.decodes, message.prompts
        decodes, prompts = (
            [(_key(row.key), row.first_token, row.count) for row in rows]
            for rows in (message.decodes, message.prompts)
        )
        self._attended = self._pages.batch(decodes) if decodes else None
        self._stored = self._pages.batch(decodes + prompts) if prompts else self._attended

    def _attend(self, message: AttendHeads) -> None:
        assert self._stored is not None
        count, dim, layer = len(self._decodes), self._shape.head_dim, message.layer
        query = self._receive(count, self._query_heads, dim)
        key, value = (self._receive(len(self._stored.tokens), 1, dim) for _ in range(2))
        self._pages.store(key, value, layer, self._stored)
        if self._attended is not None:
            own = key[:count], value[:count]
            self._answer(self._pages.attend(query, *own, layer, self._attended, message.window))
        for row in self._prompts:
            if row.first_token:
                self._answer(self._pages.before(layer, _key(row.key), row.first_token))

    def _receive(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return receive_tensor(self._connection, shape, dtype or self._shape.dtype, self._shape.device)

    def _answer(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._connection.send_buffers([bytes_of(tensor)])


def _key(key: HeadKey) -> Key:
    return key.request_id, key.head

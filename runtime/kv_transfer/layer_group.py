"""The KV caches of a group of layers in one worker: the tables of requests, and what sends and receives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from cost_model.lengths import first_kept
from runtime.kv_cache.layout import KvTransfer, Stages, outgoing
from runtime.kv_cache.pages import Pages
from runtime.kv_cache.windows import numbered
from runtime.kv_transfer.receiver import KvReceiver
from runtime.kv_transfer.sender import KvSender
from runtime.kv_transfer.stream import Shapers
from runtime.protocol.between_workers import KvLanded
from runtime.protocol.handshake import Credentials
from runtime.protocol.message import StageShape
from runtime.protocol.to_workers import Configure, Connect

if TYPE_CHECKING:
    import torch

    from runtime.kv_transfer.memory import SharedPool

KvPlan = tuple[KvTransfer, ...]
"""Which heads of which layers go from one worker to which others; empty: nothing is sent."""

WHOLE, WINDOWED = "kv", "kv-windowed"
"""The purposes of connections that carry the KV caches of layers that keep all tokens, and of those with a
window."""


class LayerGroup:
    """Layers of a worker whose KV caches are in one pool.

    Parameters
    ----------
    purpose : WHOLE or WINDOWED
    layers : of the whole model, numbers rising; None: all, under their own numbers
    window : tokens that a token of these layers attends to, itself included; None: all before it
    cache, shared : their pool, and the shared memory that it is in, if any
    on_landed, on_sent, on_failed, shapers : as of KvReceiver and KvSender

    Attributes
    ----------
    tables : the blocks of each request
    receiver : serves connections of this purpose
    """

    def __init__(
        self,
        purpose: str,
        config: Configure,
        connect: Connect,
        cache: Pages,
        shared: SharedPool | None,
        on_landed: Callable[[KvLanded], None],
        on_sent: Callable[[str], None],
        on_failed: Callable[[str, str], None],
        shapers: Shapers,
        *,
        layers: Sequence[int] | None = None,
        window: int | None = None,
    ) -> None:
        self.purpose, self._worker = purpose, config.worker
        self._layers, self._window, self._block_tokens = layers, window, config.block_tokens
        self._stages = self._numbered(config.stages)
        self.tables: dict[str, list[int]] = {}
        self.receiver = KvReceiver(config.worker, cache, on_landed, on_failed)
        self._sender = KvSender(
            Credentials(config.worker, purpose, config.secret),
            cache,
            connect.peers,
            on_sent,
            on_failed,
            shared=shared,
            transport=config.kv_transport,
            links=config.kv_links,
            shapers=shapers,
        )

    def reconnect(self, connect: Connect, config: Configure) -> None:
        """Take new addresses."""
        self._sender.reconnect(connect.peers, config.kv_links)

    def close(self) -> None:
        """End all connections."""
        self.receiver.close()
        self._sender.close()

    def expect(self, request_id: str, table: Sequence[int], first_token: int, end_token: int) -> None:
        """Announce that tokens [first, end) of a request arrive, of these layers only what is read later."""
        self.receiver.expect(request_id, table, self._first(first_token, end_token), end_token)

    def plan(self, target: Iterable[StageShape], kv_heads: int) -> KvPlan:
        """What this worker sends to a replica of these stages.

        Raises
        ------
        ValueError : the replicas cannot divide the heads
        """
        return outgoing(self._stages, self._worker, self._numbered(tuple(target)), kv_heads)

    def begin(self, request_id: str, plan: KvPlan, first_token: int, end_token: int) -> None:
        """Announce that tokens [first, end) of a request will be sent by a plan, or nothing of it by none."""
        self._sender.begin(request_id, plan, self._first(first_token, end_token), end_token)

    def layer_ready(
        self, request_id: str, layer: int, upto_token: int, event: torch.cuda.Event | None
    ) -> None:
        """Send what is new of a request in a layer of the model, if that is one of this group."""
        if (number := self.number(layer)) is not None:
            self._sender.layer_ready(request_id, number, self.tables[request_id], upto_token, event)

    def give_up(self, request_id: str) -> None:
        """Send nothing more of a request."""
        self._sender.give_up(request_id)

    def number(self, layer: int) -> int | None:
        """The number of a layer of the model in this group; None: it is in another one."""
        if self._layers is None:
            return layer
        number = bisect_left(self._layers, layer)
        return number if number < len(self._layers) and self._layers[number] == layer else None

    def _numbered(self, stages: Stages) -> Stages:
        return stages if self._layers is None else numbered(stages, self._layers)

    def _first(self, first_token: int, end_token: int) -> int:
        """The first token that moves of [first, end): the next one is at `end`. Blocks move whole, so that
        others can share them."""
        if self._window is None:
            return first_token
        return min(end_token, max(first_token, first_kept(end_token, self._window, self._block_tokens)))

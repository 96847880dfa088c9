"""The sending side of a KV cache's way from a prefill to a decode replica.

Each destination worker has a connection with a thread of its own. A layer is queued as soon as it
is computed; the compute thread never waits for the network.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.engine.cache import SequenceCache
from runtime.kv_layout import KvTransfer
from runtime.messages import Hello, KvSlice
from runtime.transport import Connection, connect

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 20.0


class Push:
    """One request's KV cache on its way: counts what is still to be sent by this worker."""

    def __init__(self, request_id: str, cache: SequenceCache, tokens: int, slices: int) -> None:
        self.request_id, self.cache, self.tokens = request_id, cache, tokens
        self.given_up = False
        self._left = slices
        self._lock = threading.Lock()

    def finish_slice(self) -> bool:
        """Count one slice as dealt with; True for the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def give_up(self) -> bool:
        """Send nothing more of it; True the first time."""
        with self._lock:
            first, self.given_up = not self.given_up, True
            return first


@dataclass(frozen=True, slots=True)
class _Slice:
    push: Push
    layer: int
    first_head: int
    end_head: int
    ready: torch.cuda.Event | None


class KvSender:
    """Pushes KV caches of one worker.

    Parameters
    ----------
    hello : introduces this worker to the others
    peers : address of every worker; may be replaced when workers are, new connections then use it
    on_sent : called with a request id once nothing of it is left to send (or it was given up)
    on_failed : called with a request id and a reason, before on_sent, if a destination is lost
    """

    def __init__(
        self,
        hello: Hello,
        peers: dict[str, tuple[str, int]],
        on_sent: Callable[[str], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self.peers = peers
        self._hello = hello
        self._on_sent, self._on_failed = on_sent, on_failed
        self._lanes: dict[str, queue.SimpleQueue[_Slice]] = {}
        self._pushes: dict[str, Push] = {}

    def begin(
        self, request_id: str, cache: SequenceCache, tokens: int, plan: tuple[KvTransfer, ...]
    ) -> Callable[[int, torch.cuda.Event | None], None]:
        """Announce a request's transfers; the returned function queues what a computed layer adds."""
        by_layer: dict[int, list[KvTransfer]] = defaultdict(list)
        for transfer in plan:
            for layer in range(transfer.part.first_layer, transfer.part.end_layer):
                by_layer[layer].append(transfer)
        slices = sum(len(members) for members in by_layer.values())
        push = Push(request_id, cache, tokens, slices)
        if slices == 0:
            self._on_sent(request_id)
        else:
            self._pushes[request_id] = push

        def layer_ready(layer: int, ready: torch.cuda.Event | None) -> None:
            for transfer in by_layer.get(layer, ()):
                part = transfer.part
                self._lane(transfer.destination).put(
                    _Slice(push, layer, part.first_head, part.end_head, ready)
                )

        return layer_ready

    def give_up(self, request_id: str) -> None:
        """Send nothing more of a cancelled request."""
        if push := self._pushes.get(request_id):
            push.give_up()

    def _lane(self, destination: str) -> queue.SimpleQueue[_Slice]:
        if destination not in self._lanes:
            lane: queue.SimpleQueue[_Slice] = queue.SimpleQueue()
            self._lanes[destination] = lane
            name = f"kv to {destination}"
            threading.Thread(target=self._serve, args=(destination, lane), name=name, daemon=True).start()
        return self._lanes[destination]

    def _serve(self, destination: str, lane: queue.SimpleQueue[_Slice]) -> None:
        """Send a destination's slices in turn. A lost connection fails the request that meets it; the
        next request tries a new one."""
        stream = _Stream(self._hello)
        while True:
            item = lane.get()
            push = item.push
            if not push.given_up:
                try:
                    stream.send(self.peers[destination], item)
                except Exception as error:
                    stream.close()
                    log.warning(
                        "request %s: sending KV to %s failed: %s", push.request_id, destination, error
                    )
                    if push.give_up():
                        self._on_failed(push.request_id, f"sending KV cache to {destination} failed: {error}")
            if push.finish_slice():
                self._pushes.pop(push.request_id, None)
                self._on_sent(push.request_id)
            del item, push


class _Stream:
    """A connection to one destination, opened when needed and again when its address changes."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._connection: Connection | None = None
        self._address: tuple[str, int] | None = None

    def send(self, address: tuple[str, int], item: _Slice) -> None:
        if address != self._address:
            self.close()
        if self._connection is None:
            self._connection = connect(address, self._hello, SEND_TIMEOUT_S)
            self._address = address
        _send(self._connection, item)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def byte_views(block: torch.Tensor) -> list[memoryview]:
    """The bytes of a CPU block [2, heads, tokens, head_dim] in C order, not copied: as few pieces as
    its layout allows."""
    pieces = [*block] if block[0].is_contiguous() else [head for side in block for head in side]
    return [memoryview(piece.view(torch.uint8).numpy()).cast("B") for piece in pieces]


def _send(connection: Connection, item: _Slice) -> None:
    cache, tokens = item.push.cache, item.push.tokens
    block = cache.heads(item.layer, item.first_head, item.end_head, tokens)
    header = KvSlice(
        request_id=item.push.request_id,
        first_layer=item.layer,
        end_layer=item.layer + 1,
        first_head=item.first_head,
        end_head=item.end_head,
        tokens=tokens,
        payload_bytes=block.nbytes,
    )
    if item.ready is not None:
        block = _to_host(block, item.ready)
    connection.send_with_payload(header, byte_views(block))


def _to_host(block: torch.Tensor, ready: torch.cuda.Event) -> torch.Tensor:
    """Copy to pinned memory on a stream of its own, so that the compute stream goes on meanwhile."""
    stream = torch.cuda.Stream(block.device)
    with torch.cuda.stream(stream):
        staged = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        stream.wait_event(ready)
        staged.copy_(block, non_blocking=True)
    stream.synchronize()
    return staged

"""Where the KV heads of a stage's worker are: in its own cache or on attention workers; and how they move."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from runtime.engine.torch.headwise.pages import HeadPages, Key, one_head
from runtime.engine.torch.headwise.remote import RemoteHeads
from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.protocol.between_workers import HeadHaul, Step
from runtime.protocol.to_workers import HeadLane

log = logging.getLogger(__name__)

OWN = 0
"""The worker itself among the devices of its lane."""


class Heads:
    """The devices of one lane: which heads each holds, as the driver says step by step.

    If an attention worker is lost, the heads that it held are gone until their request begins anew.

    Parameters
    ----------
    number, lane : of this worker
    shape : of its cache for all its heads
    lost : called with the name of an attention worker whose connection is gone

    Attributes
    ----------
    cache : this worker's own, in blocks of one head
    own : the heads there
    """

    def __init__(
        self, number: int, lane: HeadLane, shape: CacheShape, block_tokens: int, lost: Callable[[str], None]
    ) -> None:
        self.number, self.lane = number, lane
        self.one_head = one_head(shape)
        self.cache = PagedCache(self.one_head, lane.devices[OWN].blocks, block_tokens)
        self.own = HeadPages(self.cache)
        self._names, self._lost = [device.worker for device in lane.devices], lost
        self._remote: dict[int, RemoteHeads] = {}
        self._coming: dict[int, RemoteHeads] = {}
        self._lock = threading.Lock()
        self._held: dict[str, list[int]] = {}
        self._gone = set[Key]()

    def connected(self, attention_worker: str, heads: RemoteHeads) -> None:
        """Use a new connection from the next step on; any thread may call this."""
        with self._lock:
            self._coming[self._names.index(attention_worker)] = heads

    def connect(self) -> None:
        """Take the connections that have come up."""
        with self._lock:
            coming, self._coming = self._coming, {}
        for device, heads in coming.items():
            self._drop(device)
            self._remote[device] = heads

    def device_of(self, request_id: str, head: int) -> int | None:
        """The device that holds a head; None if it is gone."""
        device = self._held[request_id][head]
        usable = device == OWN or device in self._remote
        return device if usable and (request_id, head) not in self._gone else None

    def remote(self, device: int) -> RemoteHeads:
        """The heads on an attention worker.

        Raises
        ------
        OSError : it is lost
        """
        if device not in self._remote:
            raise ConnectionError(f"attention worker {self._names[device]} is lost")
        return self._remote[device]

    def lose(self, device: int, error: OSError) -> None:
        """Give up an attention worker, and the heads that it holds."""
        if device in self._remote:
            log.warning("attention worker %s is lost: %s", self._names[device], error)
            self._drop(device)
            self._lost(self._names[device])

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended or was preempted."""
        if self._held.pop(request_id, None) is None:
            return
        self._gone -= {(request_id, head) for head in range(self.lane.heads)}
        self.own.forget(request_id, self.lane.heads)
        for there in self._remote.values():
            there.forget(request_id, self.lane.heads)

    def begin(self, step: Step) -> None:
        """Give heads their blocks and move them, before a step."""
        self.connect()
        for grant in step.grants:
            if grant.lane == self.number:
                held = self._held.setdefault(grant.request_id, [OWN] * self.lane.heads)
                held[grant.head] = grant.device
                self._grant((grant.request_id, grant.head), grant.device, grant.blocks)
        for device, there in list(self._remote.items()):
            try:
                there.tell()
            except OSError as error:
                self.lose(device, error)
        for haul in step.hauls:
            if haul.lane == self.number:
                self._haul(haul)

    def _grant(self, key: Key, device: int, blocks: tuple[int, ...]) -> None:
        if device == OWN:
            self.own.grant(key, blocks)
        elif device in self._remote:
            self._remote[device].grant(key, blocks)
        else:
            self._gone.add(key)

    def _haul(self, haul: HeadHaul) -> None:
        """Copy a part of a head's cache, and perhaps let the head switch over."""
        key, device = (haul.request_id, haul.head), haul.source
        tokens = haul.first_token, haul.end_token
        try:
            if key not in self._gone:
                kv = (self.remote(device) if device else self.own).take(key, *tokens)
                device = haul.target
                (self.remote(device) if device else self.own).put(key, *tokens, haul.blocks, kv)
        except OSError as error:
            self.lose(device, error)
            self._gone.add(key)
        if haul.switches:
            self._held[haul.request_id][haul.head] = haul.target

    def _drop(self, device: int) -> None:
        if (heads := self._remote.pop(device, None)) is not None:
            heads.close()
        for request_id, held in self._held.items():
            self._gone |= {(request_id, head) for head, there in enumerate(held) if there == device}

"""The connections of a stage's worker to the attention workers of its replica."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from runtime.engine.torch.headwise.heads import Heads
from runtime.engine.torch.headwise.remote import RemoteHeads
from runtime.protocol.between_workers import HeadsLost, HeadsReady
from runtime.protocol.handshake import TIMEOUT_S, Credentials, connect
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 1.0


class Connections:
    """Connects to attention workers, and again to those that are lost until it works.

    Parameters
    ----------
    heads : gets the connections
    report : called with messages for the driver, from any thread
    """

    def __init__(self, config: Configure, heads: Heads, report: Callable[[Message], None]) -> None:
        self._worker, self._heads, self._report = config.worker, heads, report
        self._credentials = Credentials(config.worker, "heads", config.secret)
        self._peers: Mapping[str, tuple[str, int]] = {}
        self._reaching = set[str]()
        self._lock = threading.Lock()

    def join(self, peers: Mapping[str, tuple[str, int]]) -> None:
        """Connect to all attention workers for the first time; those that do not answer count as lost."""
        self._peers = peers
        for device in self._heads.lane.devices[1:]:
            if not self._connect(device.worker):
                self.lost(device.worker)

    def reconnect(self, peers: Mapping[str, tuple[str, int]]) -> None:
        """Take the addresses of attention workers that have started again, and connect to them."""
        before, self._peers = self._peers, peers
        for device in self._heads.lane.devices[1:]:
            if peers.get(device.worker) != before.get(device.worker):
                self.lost(device.worker)

    def lost(self, attention_worker: str) -> None:
        """Tell the driver that an attention worker is lost, and try to reach it; nothing if that is being
        done."""
        with self._lock:
            if attention_worker in self._reaching:
                return
            self._reaching.add(attention_worker)
        self._report(HeadsLost(worker=self._worker, attention_worker=attention_worker))
        name = f"to {attention_worker}"
        threading.Thread(target=self._reach, args=(attention_worker,), name=name, daemon=True).start()

    def _reach(self, attention_worker: str) -> None:
        wait_s = FIRST_WAIT_S
        while not self._connect(attention_worker):
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        log.info("connected to attention worker %s again", attention_worker)
        with self._lock:
            self._reaching.discard(attention_worker)
        self._report(HeadsReady(worker=self._worker, attention_worker=attention_worker))

    def _connect(self, attention_worker: str) -> bool:
        try:
            connection = connect(self._peers[attention_worker], self._credentials, TIMEOUT_S)
            lane = self._heads.lane
            remote = RemoteHeads(connection, self._heads.one_head, lane.query_heads)
        except (OSError, KeyError):
            return False
        self._heads.connected(attention_worker, remote)
        return True

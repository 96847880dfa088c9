"""The node table: the newest record of each node, when it was last heard of, and what is measured here.

Merging is choosing the greater of two (sequence, content) per node, so that any order of any records ends in
the same table. A node that left stays as a tombstone, a dead one as lost, until every record that could
bring it back is older than clocks allow.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from runtime.p2p.membership.record import CLOCK_BOUND_S, BadRecord, NodeRecord, SignedRecord, verify

log = logging.getLogger(__name__)

MAX_NODES = 1024
SILENT_S = 15.0  # a node that nobody heard of for so long is lost
KEEP_S = 2.5 * CLOCK_BOUND_S  # longer than any record of it is accepted, on clocks that differ both ways


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as this one sees it.

    state : its own status, or `lost`; last_seen_s : seconds since it was heard of;
    measured_latency_ms : by this node's own pings, None if they are not connected
    """

    record: NodeRecord
    state: str
    last_seen_s: float
    measured_latency_ms: float | None


@dataclass(frozen=True)
class News:
    """A record that was not known; changed : it says more than that its node lives."""

    record: NodeRecord
    changed: bool


@dataclass
class _Entry:
    record: NodeRecord
    signed: SignedRecord
    seen_at: float
    own_word: bool
    lost: bool = False
    latency_ms: float | None = None

    @property
    def state(self) -> str:
        return "lost" if self.lost and self.record.status != "left" else self.record.status


class NodeTable:
    """Records of all nodes, its own too.

    rejected : how many records were refused, by reason

    Parameters
    ----------
    allowed : peer ids whose records are taken; None for all
    now, monotonic : clocks, in seconds; the first compares with other nodes', the second measures
    """

    def __init__(
        self,
        allowed: Collection[str] | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self._allowed, self.now, self._monotonic = allowed, now, monotonic
        self._entries: dict[str, _Entry] = {}
        self._subscribers: list[Callable[[str, NodeView | None], None]] = []
        self._logged: set[str] = set()

    def merge(self, signed: SignedRecord, source: str = "") -> News | None:
        """Take a record in; returns it if it is news. What is refused is counted, and logged once a reason.

        source : the peer that sent it, for the log
        """
        try:
            return self._merge(signed, source)
        except BadRecord as error:
            self.rejected[error.reason] += 1
            if error.reason not in self._logged and error.reason != "older":  # those also come by long ways
                self._logged.add(error.reason)
                log.warning("refused a node record from peer %s: %s (logged once)", source or "?", error)
            return None

    def _merge(self, signed: SignedRecord, source: str) -> News | None:
        record = verify(signed, self.now())
        peer_id = record.peer_id
        if self._allowed is not None and peer_id not in self._allowed:
            raise BadRecord("stranger", peer_id)
        known = self._entries.get(peer_id)
        if known is None:
            own_word = source in ("", peer_id)
            if len(self._entries) >= MAX_NODES:
                self._make_room(own_word)
            self._entries[peer_id] = _Entry(record, signed, self._monotonic(), own_word)
            changed = True
        else:
            known.own_word = known.own_word or source in ("", peer_id)
            if signed.content == known.signed.content:
                return None
            if record.sequence < known.record.sequence:
                raise BadRecord("older", f"{record.sequence} of {peer_id} after {known.record.sequence}")
            if (record.sequence, signed.content) < (known.record.sequence, known.signed.content):
                raise BadRecord("conflict", f"two records {record.sequence} of {peer_id}")
            changed = known.lost or not record.says_the_same(known.record)
            known.record, known.signed, known.seen_at, known.lost = record, signed, self._monotonic(), False
        self._tell(peer_id)
        return News(record, changed)

    def _make_room(self, own_word: bool) -> None:
        """Forget a node of which others alone have told, for one that tells itself: no member can fill the
        table with nodes that are not there, and keep others out.

        Raises
        ------
        BadRecord : there is none, or the new one is such a node itself
        """
        told = [(entry.seen_at, peer_id) for peer_id, entry in self._entries.items() if not entry.own_word]
        if not own_word or not told:
            raise BadRecord("full", f"more than {MAX_NODES} nodes")
        oldest = min(told)[1]
        del self._entries[oldest]
        self._tell(oldest)

    def next_sequence(self, peer_id: str) -> int:
        """One above all that the node has issued, before a restart too: its clock in ms, or more."""
        known = self._entries.get(peer_id)
        now_ms = int(1000 * self.now())
        return now_ms if known is None else max(now_ms, known.record.sequence + 1)

    def measured(self, peer_id: str, latency_ms: float) -> None:
        """A ping of ours came back: the node lives."""
        if (entry := self._entries.get(peer_id)) is not None:
            entry.latency_ms, entry.seen_at = latency_ms, self._monotonic()

    def lost(self, peer_id: str) -> None:
        """Its last connection to us is gone; a newer record of it, by way of others, revokes this."""
        entry = self._entries.get(peer_id)
        if entry is not None and not entry.lost:
            entry.lost, entry.latency_ms = True, None
            self._tell(peer_id)

    def expire(self) -> None:
        """Mark who was silent for long, forget who was so for very long; to be called now and then."""
        now = self._monotonic()
        for peer_id, entry in list(self._entries.items()):
            silent_s = now - entry.seen_at
            if silent_s > KEEP_S and (entry.lost or entry.record.status == "left"):
                del self._entries[peer_id]
                self._tell(peer_id)
            elif silent_s > SILENT_S:
                self.lost(peer_id)

    def signed(self) -> list[SignedRecord]:
        """All records, for another node; those that clocks have outrun are left out."""
        oldest = self.now() - CLOCK_BOUND_S
        return [entry.signed for entry in self._entries.values() if entry.record.issued_at > oldest]

    def sequences(self) -> dict[str, int]:
        """The sequence number known of each node."""
        return {peer_id: entry.record.sequence for peer_id, entry in self._entries.items()}

    def newer_than(self, sequences: dict[str, int]) -> list[SignedRecord]:
        """The records that somebody who knows only these lacks."""
        oldest = self.now() - CLOCK_BOUND_S
        return [
            entry.signed
            for peer_id, entry in self._entries.items()
            if entry.record.sequence > sequences.get(peer_id, -1) and entry.record.issued_at > oldest
        ]

    def snapshot(self) -> list[NodeView]:
        """Every node, tombstones and lost ones included, by name."""
        views = [self._view(entry) for entry in self._entries.values()]
        return sorted(views, key=lambda view: (view.record.name, view.record.peer_id))

    def get(self, peer_id: str) -> NodeView | None:
        """One node."""
        entry = self._entries.get(peer_id)
        return None if entry is None else self._view(entry)

    def subscribe(self, callback: Callable[[str, NodeView | None], None]) -> None:
        """Call this with a peer id and its view whenever that changes; None when it is forgotten."""
        self._subscribers.append(callback)

    def _tell(self, peer_id: str) -> None:
        view = self.get(peer_id)
        for callback in self._subscribers:
            callback(peer_id, view)

    def _view(self, entry: _Entry) -> NodeView:
        return NodeView(
            record=entry.record,
            state=entry.state,
            last_seen_s=self._monotonic() - entry.seen_at,
            measured_latency_ms=entry.latency_ms,
        )

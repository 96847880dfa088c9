"""The node table: the newest record of each node, when the node was last heard of, and its measured latency.

Of two records of a node, merging keeps the one with the greater (sequence, content), so that records lead to
the same table in any order. Nodes that have left or are lost stay in the table until every record that could
bring them back is too old to be accepted.
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
SILENT_S = 15.0  # a node that has not been heard of for this long is lost
KEEP_S = 2.5 * CLOCK_BOUND_S  # no record is accepted for longer, whichever of two clocks is ahead


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as this node sees it.

    state : its announced status, or `lost`; last_seen_s : seconds since it was last heard of;
    measured_latency_ms : of this node's own pings, None if the two are not connected
    """

    record: NodeRecord
    state: str
    last_seen_s: float
    measured_latency_ms: float | None


@dataclass(frozen=True)
class News:
    """A record that is new to the table; changed : it is more than a heartbeat."""

    record: NodeRecord
    changed: bool


@dataclass
class _Entry:
    record: NodeRecord
    signed: SignedRecord
    seen_at: float
    first_hand: bool
    lost: bool = False
    latency_ms: float | None = None

    @property
    def state(self) -> str:
        return "lost" if self.lost and self.record.status != "left" else self.record.status


class NodeTable:
    """The records of all nodes, including this one.

    rejected : how many records were refused, by reason

    Parameters
    ----------
    allowed : peer ids whose records are accepted; None for all
    now, monotonic : clocks, in seconds; `now` is compared with other nodes' clocks
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
        """Add a record to the table; returns it if it is new. Counts refusals, and logs each reason once.

        source : the peer that sent the record
        """
        try:
            return self._merge(signed, source)
        except BadRecord as error:
            self.rejected[error.reason] += 1
            if (
                error.reason not in self._logged and error.reason != "older"
            ):  # normal: records also come by slow routes
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
            first_hand = source in ("", peer_id)
            if len(self._entries) >= MAX_NODES:
                self._make_room(first_hand)
            self._entries[peer_id] = _Entry(record, signed, self._monotonic(), first_hand)
            changed = True
        else:
            known.first_hand = known.first_hand or source in ("", peer_id)
            if signed.content == known.signed.content:
                return None
            if record.sequence < known.record.sequence:
                raise BadRecord("older", f"{record.sequence} of {peer_id} after {known.record.sequence}")
            if (record.sequence, signed.content) < (known.record.sequence, known.signed.content):
                raise BadRecord("conflict", f"two records with number {record.sequence} of {peer_id}")
            changed = known.lost or not record.says_the_same(known.record)
            known.record, known.signed, known.seen_at, known.lost = record, signed, self._monotonic(), False
        self._tell(peer_id)
        return News(record, changed)

    def _make_room(self, first_hand: bool) -> None:
        """Drop the oldest node known only from others, to make room for one that announces itself.

        So no member can fill the table with invented nodes and keep real ones out.

        Raises
        ------
        BadRecord : there is no such node, or the new node is itself known only from others
        """
        hearsay = [
            (entry.seen_at, peer_id) for peer_id, entry in self._entries.items() if not entry.first_hand
        ]
        if not first_hand or not hearsay:
            raise BadRecord("full", f"more than {MAX_NODES} nodes")
        oldest = min(hearsay)[1]
        del self._entries[oldest]
        self._tell(oldest)

    def next_sequence(self, peer_id: str) -> int:
        """A number above all that the node has used, also before a restart: its clock in ms, or more."""
        known = self._entries.get(peer_id)
        now_ms = int(1000 * self.now())
        return now_ms if known is None else max(now_ms, known.record.sequence + 1)

    def measured(self, peer_id: str, latency_ms: float) -> None:
        """Note that the node answered a ping of this node."""
        if (entry := self._entries.get(peer_id)) is not None:
            entry.latency_ms, entry.seen_at = latency_ms, self._monotonic()

    def lost(self, peer_id: str) -> None:
        """Mark a node as lost, until a newer record of it arrives."""
        entry = self._entries.get(peer_id)
        if entry is not None and not entry.lost:
            entry.lost, entry.latency_ms = True, None
            self._tell(peer_id)

    def expire(self) -> None:
        """Mark nodes as lost after SILENT_S of silence; forget nodes that left or are lost after KEEP_S.

        Call it every few seconds.
        """
        now = self._monotonic()
        for peer_id, entry in list(self._entries.items()):
            silent_s = now - entry.seen_at
            if silent_s > KEEP_S and (entry.lost or entry.record.status == "left"):
                del self._entries[peer_id]
                self._tell(peer_id)
            elif silent_s > SILENT_S:
                self.lost(peer_id)

    def signed(self) -> list[SignedRecord]:
        """All records that other nodes still accept; older ones are left out."""
        oldest = self.now() - CLOCK_BOUND_S
        return [entry.signed for entry in self._entries.values() if entry.record.issued_at > oldest]

    def sequences(self) -> dict[str, int]:
        """The newest sequence number of each node, by peer id."""
        return {peer_id: entry.record.sequence for peer_id, entry in self._entries.items()}

    def newer_than(self, sequences: dict[str, int]) -> list[SignedRecord]:
        """The records that a node with these sequence numbers lacks."""
        oldest = self.now() - CLOCK_BOUND_S
        return [
            entry.signed
            for peer_id, entry in self._entries.items()
            if entry.record.sequence > sequences.get(peer_id, -1) and entry.record.issued_at > oldest
        ]

    def snapshot(self) -> list[NodeView]:
        """All nodes sorted by name, including those that left or are lost."""
        views = [self._view(entry) for entry in self._entries.values()]
        return sorted(views, key=lambda view: (view.record.name, view.record.peer_id))

    def get(self, peer_id: str) -> NodeView | None:
        """The view of one node; None if it is not known."""
        entry = self._entries.get(peer_id)
        return None if entry is None else self._view(entry)

    def subscribe(self, callback: Callable[[str, NodeView | None], None]) -> None:
        """Call `callback` with a peer id and its view whenever that changes; None: the node is forgotten."""
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

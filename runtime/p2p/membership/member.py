"""A member of the network: its connections to the others, and the table of all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from runtime.p2p.host import Peers
from runtime.p2p.membership.gossip import Gossip
from runtime.p2p.membership.identity import Identity
from runtime.p2p.membership.record import NodeRecord
from runtime.p2p.membership.table import NodeTable

RECORD_KEYS = ("name", "peer_id", "role", "addresses", "services", "load", "latency_ms")


class Member:
    """Joins and leaves the network; what there is to see of it, as values for JSON.

    Parameters
    ----------
    about : what this member says of itself, peer id and addresses aside
    allowed : peer ids that are let in; None: all who have the network key
    mdns : also find members on the local network
    protocol : version of what members send each other through channels (see Peers)
    """

    def __init__(
        self,
        identity: Identity,
        about: NodeRecord,
        listen: Sequence[str],
        network_key: bytes | None,
        allowed: Collection[str] | None,
        bootstrap: Sequence[str],
        mdns: bool = False,
        protocol: str = "",
    ) -> None:
        self.peers = Peers(identity, listen, network_key, allowed, bootstrap, mdns, protocol)
        known = None if allowed is None else {*allowed, identity.peer_id}
        self.table = NodeTable(known)
        self._gossip = Gossip(self.peers, identity, self.table, about)

    async def start(self) -> None:
        """Join.

        Raises
        ------
        InputError : its address can't be listened on
        """
        await self.peers.start()
        await self._gossip.start()

    async def stop(self) -> None:
        """Say goodbye and leave; again is no harm."""
        await self._gossip.stop()
        await self.peers.stop()

    def announce(self, **changes: Any) -> None:
        """Tell the others what has changed of this member: status, load."""
        self._gossip.announce(**changes)

    def show_nodes(self) -> dict[str, Any]:
        """The table: each member's own record, and what is measured of it here."""
        nodes = [
            {
                **{key: getattr(view.record, key) for key in RECORD_KEYS},
                "hardware": [msgspec.structs.asdict(each) for each in view.record.hardware],
                "state": view.state,
                "last_seen_s": view.last_seen_s,
                "measured_latency_ms": view.measured_latency_ms,
            }
            for view in self.table.snapshot()
        ]
        return {"nodes": nodes, "rejected_records": dict(self.table.rejected)}

    def show_peers(self) -> dict[str, Any]:
        """Who is connected, with the milliseconds of the last ping, and who was refused how often."""
        peers, latency_ms = self.peers, self.peers.latency_ms
        others = [
            {"peer_id": peer_id, "name": self._name(peer_id), "latency_ms": latency_ms.get(peer_id)}
            for peer_id in sorted(peers.connected)
        ]
        itself = {"peer_id": peers.peer_id, "addresses": peers.addresses}
        return itself | {"peers": others, "refused": dict(peers.refused)}

    def _name(self, peer_id: str) -> str | None:
        view = self.table.get(peer_id)
        return None if view is None else view.record.name

"""A member of the network: its connections to other members, and the table of all members."""

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
    """Joins and leaves the network, and shows its state as JSON values.

    Parameters
    ----------
    about : this member's record; peer id and addresses are filled in
    allowed : peer ids that may connect; None: everybody who has the network key
    mdns : also find members on the local network by multicast DNS
    protocol : version of the messages that members exchange over channels (see Peers)
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
        """Join the network.

        Raises
        ------
        InputError : an address cannot be listened on
        """
        await self.peers.start()
        await self._gossip.start()

    async def stop(self) -> None:
        """Announce the departure and leave. May be called twice."""
        await self._gossip.stop()
        await self.peers.stop()

    def announce(self, **changes: Any) -> None:
        """Announce changes of this member's record, such as its status or load."""
        self._gossip.announce(**changes)

    def show_nodes(self) -> dict[str, Any]:
        """The node table: each member's record, and what this member has measured of it."""
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
        """The connected peers, the latency of their last pings, and how often each stranger was refused."""
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

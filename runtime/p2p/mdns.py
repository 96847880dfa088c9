"""Finding peers on the local network by multicast DNS, on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from libp2p.discovery.events.peerDiscovery import peerDiscovery
from libp2p.discovery.mdns.mdns import MDNSDiscovery
from libp2p.network.swarm import Swarm
from multiaddr import Multiaddr


@contextmanager
def discovery(swarm: Swarm, addresses: list[str], found: Callable[[str, list[str]], None]) -> Iterator[None]:
    """Announce these addresses, and call `found`, in zeroconf's thread, for each peer."""

    def tell(info: Any) -> None:
        found(str(info.peer_id), [str(address) for address in info.addrs])

    listening = [address.rsplit("/p2p/", 1)[0] for address in addresses]
    port = int(Multiaddr(listening[0]).value_for_protocol("tcp"))
    peerDiscovery.register_peer_discovered_handler(tell)
    service = MDNSDiscovery(swarm, port=port, listen_addrs=listening)
    try:
        service.start()
        yield
    finally:
        service.stop()
        peerDiscovery.unregister_peer_discovered_handler(tell)

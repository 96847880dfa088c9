"""Optional discovery of nodes of the same private network by multicast DNS (RFC 6762, 6763).

libp2p's own mDNS is not used: it blocks libp2p's thread for 1.7 s while it registers, announces on every
interface, and accepts every answer to a name that all libp2p programs share. Here a node announces its peer
id and addresses only on the interfaces on which it listens, with an HMAC-SHA256 under the network key, so
that nobody without the key can make a node dial. Everybody on the link can read an announcement. A stranger
who replays it gains nothing: every connection proves who is at the other end.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Sequence

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger(__name__)

SERVICE_TYPE = "_hexgen2._tcp.local."
ASK_S = 3.0
MAX_ASKED = 32  # names looked up at a time; further ones are ignored, so that a flood does no harm
MAX_NEIGHBOURS = 1024
MAX_ADDRESSES = 32
_CONTEXT = b"hexgen2 mdns 1\n"

Properties = dict[bytes, bytes | None]


def announcement(peer_id: str, addresses: Sequence[str], network_key: bytes) -> dict[str, str]:
    """The TXT record that a node announces, with the proof that it has the network key."""
    listening = [address.partition("/p2p/")[0] for address in addresses][:MAX_ADDRESSES]
    fields = {"peer": peer_id} | {f"address{number}": each for number, each in enumerate(listening)}
    return fields | {"proof": _proof(peer_id, listening, network_key)}


def understood(properties: Properties, network_key: bytes) -> tuple[str, list[str]] | None:
    """The peer id and addresses in an announcement; None unless it proves knowledge of the network key."""
    try:
        fields = {key.decode(): (value or b"").decode() for key, value in properties.items()}
        listening = [fields[f"address{number}"] for number in range(len(fields) - 2)]
        peer_id, proof = fields["peer"], fields["proof"].encode()
    except (KeyError, UnicodeDecodeError):
        return None
    if len(listening) > MAX_ADDRESSES:
        return None
    if not hmac.compare_digest(proof, _proof(peer_id, listening, network_key).encode()):
        return None
    return peer_id, [f"{address}/p2p/{peer_id}" for address in listening]


def _proof(peer_id: str, listening: Sequence[str], network_key: bytes) -> str:
    content = _CONTEXT + json.dumps([peer_id, *listening]).encode()
    return hmac.digest(network_key, content, hashlib.sha256).hex()


class Neighbours:
    """Announces this node on its local networks and finds other nodes, until it is stopped.

    Parameters
    ----------
    addresses : where this node listens, at least one; it is announced only on these interfaces
    network_key : key of the private network; b"" if there is none
    found : called with the peer id and addresses of each other node, and again when the addresses change

    Attributes
    ----------
    known : addresses of the nodes that were found and have not left, by peer id
    """

    def __init__(
        self,
        peer_id: str,
        addresses: Sequence[str],
        network_key: bytes,
        found: Callable[[str, list[str]], None],
    ) -> None:
        self.known: dict[str, list[str]] = {}
        self._peer_id, self._addresses, self._network_key = peer_id, addresses, network_key
        self._found = found
        self._names: dict[str, str] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._refused = False

    async def start(self) -> None:
        """Begin to announce and to listen.

        Raises
        ------
        OSError : an interface has no multicast
        """
        hosts = list(dict.fromkeys(address.split("/")[2] for address in self._addresses))
        self._zeroconf = AsyncZeroconf(interfaces=hosts)
        own = AsyncServiceInfo(
            SERVICE_TYPE,
            f"{self._peer_id}.{SERVICE_TYPE}",
            parsed_addresses=hosts,
            port=int(self._addresses[0].split("/")[4]),
            properties=announcement(self._peer_id, self._addresses, self._network_key),
            server=f"{self._peer_id}.local.",
        )
        handlers: list[Callable[..., None]] = [self._heard]
        try:
            # The name may change: otherwise another program could block this node by taking its name.
            await self._zeroconf.async_register_service(own, allow_name_change=True)
            self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=handlers)
        except BaseException:
            await self._zeroconf.async_close()
            raise

    async def stop(self) -> None:
        """Withdraw the announcement and stop."""
        await self._browser.async_cancel()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._zeroconf.async_close()

    def _heard(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        if state_change is ServiceStateChange.Removed:
            self.known.pop(self._names.pop(name, ""), None)
        elif len(self._asking) < MAX_ASKED:
            task = asyncio.get_running_loop().create_task(self._ask(zeroconf, name))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str) -> None:
        """Look up the announcement under a name."""
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(zeroconf, 1000 * ASK_S):
            return
        announced = understood(info.properties, self._network_key)
        if announced is None:
            self._refuse(name)
            return
        peer_id, addresses = announced
        if peer_id != self._peer_id and (peer_id in self.known or len(self.known) < MAX_NEIGHBOURS):
            self._names[name], self.known[peer_id] = peer_id, addresses
            self._found(peer_id, addresses)

    def _refuse(self, name: str) -> None:
        if not self._refused:
            self._refused = True
            label = name.removesuffix(f".{SERVICE_TYPE}")[:63]
            log.warning(
                "mDNS: ignored %r, which does not prove that it has this network's key (logged once)", label
            )

"""Finding nodes of the same private network by multicast DNS (RFC 6762, 6763), on request.

Not with libp2p's own, which stops the thread of libp2p for 1.7 s while it registers, announces on every
interface, and takes whatever answers to the name that all programs with libp2p share. Here a node announces
its peer id and addresses on the interfaces on which it listens, with an HMAC-SHA256 keyed with the network
key: who has not the key can make nobody dial. The announcement itself can be read by everybody on the link;
repeated by a stranger, it leads to its node or to nobody, since every connection proves who is at its end.
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
MAX_ASKED = 32  # names at a time; of what a flood brings beyond that nothing is heard
MAX_NEIGHBOURS = 1024
MAX_ADDRESSES = 32
_CONTEXT = b"hexgen2 mdns 1\n"

Properties = dict[bytes, bytes | None]


def announcement(peer_id: str, addresses: Sequence[str], network_key: bytes) -> dict[str, str]:
    """What a node says of itself in its TXT record, with the proof that it has the network key."""
    listening = [address.partition("/p2p/")[0] for address in addresses][:MAX_ADDRESSES]
    said = {"peer": peer_id} | {f"address{number}": each for number, each in enumerate(listening)}
    return said | {"proof": _proof(peer_id, listening, network_key)}


def understood(said: Properties, network_key: bytes) -> tuple[str, list[str]] | None:
    """The peer id and the addresses of an announcement; None unless its node has the network key."""
    try:
        told = {key.decode(): (value or b"").decode() for key, value in said.items()}
        listening = [told[f"address{number}"] for number in range(len(told) - 2)]
        peer_id, proof = told["peer"], told["proof"].encode()
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
    """Announces this node on its local networks, and hears of others, until it is stopped.

    Parameters
    ----------
    addresses : where this node listens, at least one; it is announced on these interfaces alone
    network_key : of the private network; b"" if it has none
    found : told of each other node, with its peer id and addresses, and again when these change

    Attributes
    ----------
    known : the addresses of all that were found and have not left, by peer id
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
        """Begin.

        Raises
        ------
        OSError : there is no multicast on an interface
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
            # The name may be changed, so that nobody can take it from its node.
            await self._zeroconf.async_register_service(own, allow_name_change=True)
            self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=handlers)
        except BaseException:
            await self._zeroconf.async_close()
            raise

    async def stop(self) -> None:
        """Say goodbye, and end."""
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
        """Hear what is announced under a name."""
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(zeroconf, 1000 * ASK_S):
            return
        told = understood(info.properties, self._network_key)
        if told is None:
            self._refuse(name)
            return
        peer_id, addresses = told
        if peer_id != self._peer_id and (peer_id in self.known or len(self.known) < MAX_NEIGHBOURS):
            self._names[name], self.known[peer_id] = peer_id, addresses
            self._found(peer_id, addresses)

    def _refuse(self, name: str) -> None:
        if not self._refused:
            self._refused = True
            label = name.removesuffix(f".{SERVICE_TYPE}")[:63]
            log.warning("mDNS: %r is announced without a proof of this network's key (logged once)", label)

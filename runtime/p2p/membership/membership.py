"""The command line's options for joining a network of nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cost_model.errors import InputError

if TYPE_CHECKING:
    from runtime.p2p.membership.member import Member
    from runtime.p2p.membership.record import Device, Role

LOOPBACK_LISTEN = "/ip4/127.0.0.1/tcp/0"
IDENTITIES = Path.home() / ".hexgen2"


@dataclass(frozen=True)
class Membership:
    """Options of `hexgen2 node` and of `hexgen2 launch --launcher p2p`.

    Attributes
    ----------
    join : multiaddrs of members to connect to
    listen : multiaddr on which this member listens
    identity : file of this member's key pair; created if missing
    network_key : file of the key that every member needs; None: an open network, on loopback only
    allow : peer ids that may connect; empty: everybody who has the network key
    mdns : also find members of the same network by multicast DNS, on the interface of `listen`
    """

    identity: Path
    join: Sequence[str] = ()
    listen: str = LOOPBACK_LISTEN
    network_key: Path | None = None
    allow: Sequence[str] = ()
    mdns: bool = False

    def member(
        self,
        name: str,
        role: Role,
        services: Iterable[str] = (),
        hardware: Iterable[Device] = (),
        protocol: str = "",
    ) -> Member:
        """Make this process a member of the network, not started yet; `protocol` as in Peers.

        Raises
        ------
        InputError : an option is wrong, or the network has no key although other machines can reach it
        """
        try:
            from runtime.p2p.membership.identity import load_identity, load_network_key
            from runtime.p2p.membership.member import Member
            from runtime.p2p.membership.record import NodeRecord
        except ModuleNotFoundError as error:
            problem = f"the Python package {error.name} is not installed"
            raise InputError("peers", "", problem, "pip install 'hexgen2[p2p]'") from error
        for option, addresses in (("--join", self.join), ("--listen", (self.listen,))):
            for address in addresses:
                if self.network_key is None and not is_loopback(host_of(address, option)):
                    problem = f"{address} is not on loopback, and there is no network key"
                    remedy = (
                        "create one with `hexgen2 node --new-network-key FILE` and give it with --network-key"
                    )
                    raise InputError(option, "", problem, remedy)
        key = None if self.network_key is None else load_network_key(self.network_key)
        allowed = _checked_ids(self.allow) or None
        identity = load_identity(self.identity)
        about = NodeRecord(
            peer_id=identity.peer_id,
            name=name,
            role=role,
            services=tuple(services),
            hardware=tuple(hardware),
            status="ready",
        )
        return Member(identity, about, [self.listen], key, allowed, self.join, self.mdns, protocol)


def host_of(address: str, option: str) -> str:
    """The host in a multiaddr such as /ip4/10.0.0.4/tcp/4001/p2p/12D3Koo....

    Raises
    ------
    InputError : this is not such an address
    """
    parts = address.split("/")
    if len(parts) < 5 or parts[0] or parts[1] not in ("ip4", "ip6", "dns4") or parts[3] != "tcp":
        problem = f"{address!r} is not the address of a node"
        raise InputError(option, "", problem, "write /ip4/HOST/tcp/PORT, with /p2p/PEERID to join")
    try:
        if parts[1] != "dns4":
            ipaddress.ip_address(parts[2])
        if not 0 <= int(parts[4]) <= 65535 or (option == "--join" and (len(parts) != 7 or parts[5] != "p2p")):
            raise ValueError
    except ValueError:
        problem = f"{address!r} is not the address of a node"
        raise InputError(option, "", problem, "write /ip4/HOST/tcp/PORT, with /p2p/PEERID to join") from None
    return parts[2]


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address, which only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_ids(peer_ids: Iterable[str]) -> list[str]:
    """Check that these are peer ids of Ed25519 keys, which all nodes have.

    Raises
    ------
    InputError : one of them is not
    """
    checked = list(peer_ids)
    for peer_id in checked:
        if not peer_id.startswith("12D3Koo") or not peer_id.isalnum():
            problem = f"{peer_id!r} is not a peer id"
            raise InputError("--allow", "", problem, "copy it from the line that `hexgen2 node` prints")
    return checked

"""`hexgen2 node`: offers this machine to launches elsewhere, which start workers on it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import click

from cost_model.errors import InputError
from hexgen2.commands.options import PATH, Command, options
from hexgen2.terminal import quiet
from runtime.options import INSTRUCTIONS

_machine, _network = options("This machine"), options("Network of nodes")
EXTRAS = "pip install 'hexgen2[runtime,p2p]'"


@click.command(
    cls=Command,
    short_help="Offer this machine's GPUs to a launch elsewhere.",
    examples=(
        "hexgen2 node --new-network-key network.key",
        "hexgen2 node --name pod-a --listen /ip4/10.0.0.4/tcp/9000 --network-key network.key \\\n"
        "      --model-path /models/llama-3-8b",
        "hexgen2 node --name pod-b --mdns --listen /ip4/10.0.0.5/tcp/9000 --network-key network.key",
    ),
)
@_machine(
    "--name",
    default=socket.gethostname,
    show_default="host name",
    metavar="NAME",
    help="Name of this node in the cluster spec; must be unique.",
)
@_machine("--model-path", type=PATH, metavar="DIR", help="Folder of the checkpoint on this machine.")
@_machine(
    "--accelerators",
    metavar="NAME:COUNT",
    help="GPUs of this machine, as in the cluster spec.  [default: what the driver reports]",
)
@_machine("--address", metavar="HOST", help="Address at which workers on other nodes reach the workers here.")
@_machine(
    "--cpu-instructions",
    type=click.Choice(INSTRUCTIONS),
    default=INSTRUCTIONS[0],
    show_default=True,
    help="avx2: workers use no wider instructions, so that different processors round alike.",
)
@_network(
    "--join", multiple=True, metavar="MULTIADDR", help="Address of a member of the network; repeatable."
)
@_network("--mdns", is_flag=True, help="Find members on the local network, and be found there.")
@_network("--listen", metavar="MULTIADDR", help="Address to listen on.  [default: loopback, any port]")
@_network("--network-key", type=PATH, metavar="FILE", help="File of the network's key.")
@_network("--new-network-key", type=PATH, metavar="FILE", help="Write a new network key to FILE and exit.")
@_network("--identity", type=PATH, metavar="FILE", help="File of this node's key pair; made if missing.")
@_network("--allow", multiple=True, metavar="PEERID", help="Let in only these members; repeatable.")
def node(
    name: str,
    join: tuple[str, ...],
    listen: str | None,
    identity: Path | None,
    network_key: Path | None,
    allow: tuple[str, ...],
    mdns: bool,
    model_path: Path | None,
    address: str | None,
    accelerators: str | None,
    cpu_instructions: str,
    new_network_key: Path | None,
) -> None:
    """Offer this machine's GPUs until Ctrl-C: launches elsewhere (--launcher p2p) start workers on it."""
    try:
        from runtime.launcher.nodes.node import run_node
        from runtime.launcher.processes import limit_instructions
        from runtime.operator import be_quiet
        from runtime.p2p.membership import identity as keys
        from runtime.p2p.membership.membership import IDENTITIES, LOOPBACK_LISTEN, Membership
    except ModuleNotFoundError as error:
        raise InputError("hexgen2 node", "", f"needs {error.name}", EXTRAS) from error
    if quiet():
        be_quiet()
    if new_network_key is not None:
        keys.new_network_key(new_network_key)
        return
    limit_instructions(cpu_instructions)
    membership = Membership(
        identity=identity or IDENTITIES / f"{name}.key",
        join=join,
        listen=listen or LOOPBACK_LISTEN,
        network_key=network_key,
        allow=allow,
        mdns=mdns,
    )
    sys.exit(run_node(name, membership, address, model_path, accelerators))

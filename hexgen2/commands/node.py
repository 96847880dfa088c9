"""`hexgen2 node`: makes a machine a node, on which a head elsewhere starts the workers of a placement."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import click

from cost_model.errors import InputError
from runtime.options import INSTRUCTIONS

EXTRAS = "pip install 'hexgen2[runtime,p2p]'"


@click.command()
@click.option(
    "--name",
    default=socket.gethostname,
    show_default="host name",
    help="The node's name in the cluster and its placements, used by no other node.",
)
@click.option("--join", multiple=True, metavar="MULTIADDR", help="A member that is there already.")
@click.option("--listen", metavar="MULTIADDR", help="Where members are heard.  [default: loopback, any port]")
@click.option("--identity", type=click.Path(path_type=Path), help="File of the key pair, made if missing.")
@click.option("--network-key", type=click.Path(path_type=Path), help="File of the network's key.")
@click.option("--allow", multiple=True, metavar="PEERID", help="Let in these members only.")
@click.option("--mdns", is_flag=True, help="Find members on the local network, and be found there.")
@click.option("--model-path", type=click.Path(path_type=Path), help="The checkpoint's folder here.")
@click.option("--address", metavar="HOST", help="Where workers of other nodes reach those of this one.")
@click.option(
    "--accelerators",
    metavar="NAME:COUNT",
    help="The GPUs here, as the cluster has them.  [default: what the driver shows]",
)
@click.option(
    "--cpu-instructions",
    type=click.Choice(INSTRUCTIONS),
    default=INSTRUCTIONS[0],
    show_default=True,
    help="avx2: workers use no wider ones, so that replicas on different processors round alike.",
)
@click.option(
    "--new-network-key", type=click.Path(path_type=Path), help="Write a new network key, and do nothing else."
)
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
    """Make this machine a node, until Ctrl-C: heads of its network start workers here."""
    try:
        from runtime.launcher.nodes.node import run_node
        from runtime.launcher.processes import limit_instructions
        from runtime.p2p.membership import identity as keys
        from runtime.p2p.membership.membership import IDENTITIES, LOOPBACK_LISTEN, Membership
    except ModuleNotFoundError as error:
        raise InputError("hexgen2 node", "", f"needs {error.name}", EXTRAS) from error
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

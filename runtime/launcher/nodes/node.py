"""Runs `hexgen2 node`: joins the network and serves heads through an agent until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from cost_model.errors import InputError
from runtime import logs
from runtime.launcher.nodes.agent import NodeAgent
from runtime.launcher.nodes.agent_messages import NODE_PROTOCOL, NODE_SERVICE, WORKERS_SERVICE
from runtime.launcher.nodes.hardware import hardware_of, local_gpus
from runtime.operator import report, stop_signals
from runtime.p2p.membership.member import Member
from runtime.p2p.membership.membership import Membership, host_of
from runtime.p2p.membership.record import MAX_NAME, Device, is_node_name
from runtime.p2p.membership.table import NodeView

ANY_HOST = ("0.0.0.0", "::")


def run_node(
    name: str,
    membership: Membership,
    address: str | None,
    model_path: Path | None,
    accelerators: str | None = None,
) -> int:
    """Run a node until SIGINT or SIGTERM.

    Parameters
    ----------
    name : the node's name in the cluster and its placements
    address : where workers of other nodes reach this machine; None: the host on which it listens for peers
    model_path : folder of the checkpoint; None: the folder that the head names
    accelerators : the GPUs of this machine, as NAME:COUNT; None: those that the driver reports

    Returns
    -------
    0 once a signal has stopped the node and all its workers have ended

    Raises
    ------
    InputError : an option is wrong
    """
    if not is_node_name(name):
        problem = f"{name!r} is not a valid node name (1 to {MAX_NAME} characters, no spaces, no /)"
        raise InputError("--name", "", problem, "use the name in the cluster file")
    if model_path is not None and not model_path.is_dir():
        raise InputError("--model-path", "", f"{model_path} is not a folder", "give the folder of the model")
    heard_on = host_of(membership.listen, "--listen")
    if address is None and heard_on in ANY_HOST:
        problem = f"other nodes cannot connect to {heard_on}"
        raise InputError("--listen", "", problem, "give this machine's address with --address")
    gpus = local_gpus(accelerators)
    services = (NODE_SERVICE, WORKERS_SERVICE)
    member = membership.member(name, "worker", services, hardware_of(gpus), NODE_PROTOCOL)
    logs.set_up("node")
    return asyncio.run(_run(name, member, address or heard_on, model_path, gpus))


async def _run(
    name: str, member: Member, address: str, model_path: Path | None, gpus: tuple[Device, ...]
) -> int:
    def on_workers(count: int) -> None:
        member.announce(load=min(count / len(hardware_of(gpus)), 1.0))

    agent = NodeAgent(name, member.peers, address, model_path, gpus, on_workers, report)
    member.table.subscribe(_namesake_reporter(name, member.peers.peer_id))
    member.peers.on_not_joined(report)
    member.peers.on_peer_joined(lambda peer_id: report(f"peer {peer_id} is connected"))
    member.peers.on_peer_lost(lambda peer_id: report(f"peer {peer_id} is gone"))
    stopping = stop_signals(agent.kill)
    agent.start()
    try:
        await member.start()
        for heard_on in member.peers.addresses:
            report(f"node {name} listening on {heard_on}")
        await stopping.wait()
        member.announce(status="draining")
    finally:
        await agent.stop()
        await member.stop()
    report("stopped")
    return 0


def _namesake_reporter(name: str, own_id: str) -> Callable[[str, NodeView | None], None]:
    """Tells the operator, once, that another node has the same name; a head accepts only one of them."""
    reported = False

    def changed(peer_id: str, view: NodeView | None) -> None:
        nonlocal reported
        if reported or view is None or peer_id == own_id or view.state in ("left", "lost"):
            return
        if (view.record.role, view.record.name) == ("worker", name):
            reported = True
            report(
                f"peer {peer_id} is also named {name}, and a head accepts only one; give each its own --name"
            )

    return changed

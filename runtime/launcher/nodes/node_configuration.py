"""A node as a machine of its own: whether it has the placement's hardware, and what its workers are told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE, GIB, find_accelerator
from hexgen2.devices import accelerators_of, is_cpu, split
from hexgen2.placement import Placement
from runtime.launcher.configure import shares_of
from runtime.launcher.nodes.agent_messages import Welcome
from runtime.p2p.membership.record import Device
from runtime.protocol.to_workers import Configure

ENOUGH = 0.9  # of a card's nominal memory: drivers report up to 6 % less


def device_on_node(device: str, worker: str) -> str:
    """The torch device of a worker whose node is a machine of its own: on each, GPUs are numbered from 0, as
    its processes see them."""
    return device if device == "cpu" else f"cuda:{split(worker)[1]}"


def on_node(told: Mapping[str, Configure], welcome: Welcome, checkpoint: str) -> dict[str, Configure]:
    """The configurations of all workers of a node, with what is so there: folder, address, devices and cores.

    Parameters
    ----------
    told : as for one machine, by worker
    checkpoint : folder, where the node has named none
    """
    cores = shares_of(welcome.cores, [worker for worker, each in told.items() if each.device == "cpu"])
    return {
        worker: msgspec.structs.replace(
            each,
            checkpoint=welcome.model_path or checkpoint,
            host=welcome.address,
            device=device_on_node(each.device, worker),
            threads=len(cores.get(worker, (0,))),
            cores=cores.get(worker, ()),
        )
        for worker, each in told.items()
    }


def check_hardware(placement: Placement, workers: Collection[str], welcome: Welcome) -> None:
    """Refuse a node that has not the GPUs on which a placement puts these workers of it.

    Raises
    ------
    InputError : there are fewer, others, or smaller ones
    """
    used = sorted(split(worker)[1] for worker in workers if not is_cpu(placement, worker))
    if not used:
        return
    card, _ = accelerators_of(placement, welcome.node)
    needed = placement.cluster.accelerators.get(card)
    nominal = CATALOGUE.get(card)
    memory_bytes = needed.memory_gib * GIB if needed else nominal.memory_bytes if nominal else 0.0
    if problem := _misfit(card, memory_bytes, used, welcome.gpus):
        remedy = "correct the cluster and search again, or give that node's true --accelerators"
        raise InputError("placement", f"node {welcome.node}", problem, remedy)


def _misfit(card: str, memory_bytes: float, used: Sequence[int], gpus: Sequence[Device]) -> str:
    if not gpus:
        return f"the placement uses {len(used)} {card} there, and the node has no GPU"
    if used[-1] >= len(gpus):
        return f"the placement uses {len(used)} {card} there, up to number {used[-1]}, and it has {len(gpus)}"
    for index in used:
        gpu = gpus[index]
        if (wanted := _card(card)) and (found := _card(gpu.name)) and found != wanted:
            return f"the placement has {card} as number {index}, and it is {gpu.name}"
        if 0 < gpu.memory_bytes < ENOUGH * memory_bytes:
            sizes = f"{gpu.memory_bytes / GIB:.3g} GiB, not {memory_bytes / GIB:.3g}"
            return f"the placement has {card} as number {index}, and it is {gpu.name} with {sizes}"
    return ""


def _card(name: str) -> str:
    """The catalogue's name of a card as its driver calls it; "" if it has none."""
    try:
        return find_accelerator(name).name
    except InputError:
        return ""

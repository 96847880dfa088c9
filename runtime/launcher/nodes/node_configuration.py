"""Checks that a node has the GPUs of a placement, and adapts its workers' configurations to the node."""

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

ENOUGH = 0.9  # share of a GPU's nominal memory that must be there; drivers report up to 6 % less


def device_on_node(device: str, worker: str) -> str:
    """The torch device of a worker on a machine of its own, where processes number the GPUs from 0."""
    return device if device == "cpu" else f"cuda:{split(worker)[1]}"


def on_node(
    configurations: Mapping[str, Configure], welcome: Welcome, checkpoint: str
) -> dict[str, Configure]:
    """The configurations of a node's workers with its own folder, address, devices and cores.

    Parameters
    ----------
    configurations : all of the node's workers, configured as if every node were this machine
    checkpoint : folder to use if the node named none
    """
    on_cpu = [worker for worker, each in configurations.items() if each.device == "cpu"]
    cores = shares_of(welcome.cores, on_cpu)
    return {
        worker: msgspec.structs.replace(
            each,
            checkpoint=welcome.model_path or checkpoint,
            host=welcome.address,
            device=device_on_node(each.device, worker),
            threads=len(cores.get(worker, (0,))),
            cores=cores.get(worker, ()),
        )
        for worker, each in configurations.items()
    }


def check_hardware(placement: Placement, workers: Collection[str], welcome: Welcome) -> None:
    """Check that a node has the GPUs that the placement assigns to these workers.

    Raises
    ------
    InputError : the node has fewer, different or smaller GPUs
    """
    used = sorted(split(worker)[1] for worker in workers if not is_cpu(placement, worker))
    if not used:
        return
    card, _ = accelerators_of(placement, welcome.node)
    needed = placement.cluster.accelerators.get(card)
    nominal = CATALOGUE.get(card)
    memory_bytes = needed.memory_gib * GIB if needed else nominal.memory_bytes if nominal else 0.0
    if problem := _misfit(card, memory_bytes, used, welcome.gpus):
        remedy = "correct the cluster and search again, or correct --accelerators on that node"
        raise InputError("placement", f"node {welcome.node}", problem, remedy)


def _misfit(card: str, memory_bytes: float, used: Sequence[int], gpus: Sequence[Device]) -> str:
    if not gpus:
        return f"the placement uses {len(used)} {card} there, but the node has no GPU"
    if used[-1] >= len(gpus):
        uses = f"{len(used)} {card} there, up to index {used[-1]}"
        return f"the placement uses {uses}, but it has {len(gpus)} GPUs"
    for index in used:
        gpu = gpus[index]
        if (wanted := _card(card)) and (found := _card(gpu.name)) and found != wanted:
            return f"GPU {index} is {card} in the placement, but the node has {gpu.name}"
        if 0 < gpu.memory_bytes < ENOUGH * memory_bytes:
            sizes = f"{gpu.memory_bytes / GIB:.3g} GiB, not {memory_bytes / GIB:.3g}"
            return f"GPU {index} is {card} in the placement, but the node has {gpu.name} with {sizes}"
    return ""


def _card(name: str) -> str:
    """The catalogue's name of a GPU, from the name that the driver reports; "" if it is unknown."""
    try:
        return find_accelerator(name).name
    except InputError:
        return ""

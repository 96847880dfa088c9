"""What a node has to compute with, for others to see: asked of the driver, with nothing loaded for it.

GPUs are numbered as a worker on the node will find them: those that CUDA_VISIBLE_DEVICES leaves, in its
order, or else all, in the order of their slots (the driver's tools know no other; ORDER makes it CUDA's).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_specs.loader import parse_accelerators
from cost_model.errors import InputError
from cost_model.hardware import find_accelerator
from runtime.p2p.membership.record import Device

QUERY = ("nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
TIMEOUT_S = 10.0
MEBIBYTE = 2**20
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
OPTION = "--accelerators"


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it."""

    uuid: str
    accelerator: Device


def local_gpus(declared: str | None = None) -> tuple[Device, ...]:
    """The GPUs of this machine that workers may use, by their index.

    Parameters
    ----------
    declared : what the operator says that there is, NAME:COUNT; None: what the driver says. A card that is a
        CPU means that there are none

    Raises
    ------
    InputError : what is declared is not NAME:COUNT, or more than the driver shows
    """
    os.environ.setdefault(*ORDER)  # for workers, which inherit it
    found = visible(_reported(), os.environ.get(VISIBLE))
    return found if declared is None else as_declared(declared, found)


def hardware_of(gpus: Sequence[Device]) -> tuple[Device, ...]:
    """For the node's record: its GPUs, or else its CPU with all of the machine's memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return tuple(gpus) or (Device("CPU", memory_bytes),)


def as_declared(declared: str, found: Sequence[Device]) -> tuple[Device, ...]:
    """GPUs as the operator declares them, beside those that the driver shows, if it shows any.

    Raises
    ------
    InputError : it is not NAME:COUNT, or more than the driver shows
    """
    name, count = parse_accelerators(declared, OPTION, "")
    memory_bytes = 0
    try:
        card = find_accelerator(name)
    except InputError:
        pass  # a card of the cluster's own: its memory is not known here
    else:
        if card.kind == "cpu":
            return ()
        name, memory_bytes = card.name, int(card.memory_bytes)
    if found and count > len(found):
        problem = f"the driver shows {len(found)} GPUs here ({VISIBLE} counts), not {count}"
        raise InputError(OPTION, declared, problem, "declare those that are there, or leave it out")
    return (Device(name, memory_bytes),) * count


def visible(gpus: Sequence[Gpu], variable: str | None) -> tuple[Device, ...]:
    """Those that CUDA shows a process with this CUDA_VISIBLE_DEVICES (None: not set), in its order.

    As in the CUDA programming guide: indices or beginnings of UUIDs; what follows one that is not there is
    not visible, and nothing is where one is named twice. A MIG instance is there, with nothing known of it.
    """
    if variable is None:
        return tuple(gpu.accelerator for gpu in gpus)
    chosen: list[str] = []
    shown: list[Device] = []
    for word in (word.strip() for word in variable.split(",")):
        if word.startswith("MIG-"):
            uuid, accelerator = word, Device("MIG", 0)
        else:
            matches = _named(gpus, word)
            if len(matches) != 1:
                break
            uuid, accelerator = matches[0].uuid, matches[0].accelerator
        if uuid in chosen:
            return ()
        chosen.append(uuid)
        shown.append(accelerator)
    return tuple(shown)


def _named(gpus: Sequence[Gpu], word: str) -> list[Gpu]:
    if word.isascii() and word.isdigit():
        return [gpu for index, gpu in enumerate(gpus) if index == int(word)]
    return [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]


def _reported() -> tuple[Gpu, ...]:
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return gpus_in(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def gpus_in(report: str) -> tuple[Gpu, ...]:
    """Of lines such as "GPU-5f0c..., NVIDIA H100 80GB HBM3, 81559", in MiB.

    Raises
    ------
    ValueError : it is something else
    """
    gpus = []
    for line in report.splitlines():
        if line.strip():
            uuid, name, mebibytes = (part.strip() for part in line.split(","))
            gpus.append(Gpu(uuid, Device(name, int(mebibytes) * MEBIBYTE)))
    return tuple(gpus)

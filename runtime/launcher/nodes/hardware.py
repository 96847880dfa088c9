"""The hardware that a node announces, as nvidia-smi reports it, so that neither CUDA nor torch is loaded.

GPUs are numbered as a worker on the node will see them: those in CUDA_VISIBLE_DEVICES, in its order, or else
all, in the order of their slots. nvidia-smi knows only this order; ORDER makes CUDA use it too.
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
    """The GPUs of this machine that workers may use, by index.

    Parameters
    ----------
    declared : the operator's word, NAME:COUNT, where NAME may be a CPU for "no GPUs"; None: ask the driver

    Raises
    ------
    InputError : `declared` is not NAME:COUNT, or is more than the driver reports
    """
    os.environ.setdefault(*ORDER)  # workers inherit it
    found = visible(_reported(), os.environ.get(VISIBLE))
    return found if declared is None else as_declared(declared, found)


def hardware_of(gpus: Sequence[Device]) -> tuple[Device, ...]:
    """What the node's record lists: its GPUs, or without any its CPU with the memory of the machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return tuple(gpus) or (Device("CPU", memory_bytes),)


def as_declared(declared: str, found: Sequence[Device]) -> tuple[Device, ...]:
    """The GPUs that the operator declares, checked against those that the driver reports, if any.

    Raises
    ------
    InputError : `declared` is not NAME:COUNT, or is more than the driver reports
    """
    name, count = parse_accelerators(declared, OPTION, "")
    memory_bytes = 0
    try:
        card = find_accelerator(name)
    except InputError:
        pass  # a GPU that the cluster file defines: its memory is not known here
    else:
        if card.kind == "cpu":
            return ()
        name, memory_bytes = card.name, int(card.memory_bytes)
    if found and count > len(found):
        problem = f"the driver reports {len(found)} GPUs here (after {VISIBLE}), not {count}"
        raise InputError(OPTION, declared, problem, f"declare at most that many, or leave out {OPTION}")
    return (Device(name, memory_bytes),) * count


def visible(gpus: Sequence[Gpu], variable: str | None) -> tuple[Device, ...]:
    """The GPUs that CUDA shows a process with this CUDA_VISIBLE_DEVICES (None: not set), in its order.

    Follows the CUDA programming guide: entries are indices or prefixes of UUIDs; the first invalid entry and
    all after it are ignored; if a GPU is listed twice, none is visible. A MIG instance is listed without its
    properties, which are not known here.
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
    """The GPUs in nvidia-smi's lines, such as "GPU-5f0c..., NVIDIA H100 80GB HBM3, 81559" (MiB).

    Raises
    ------
    ValueError : a line has another form
    """
    gpus = []
    for line in report.splitlines():
        if line.strip():
            uuid, name, mebibytes = (part.strip() for part in line.split(","))
            gpus.append(Gpu(uuid, Device(name, int(mebibytes) * MEBIBYTE)))
    return tuple(gpus)

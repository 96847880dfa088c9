"""Runs a probe of this machine: one process per device, and the topology that nvidia-smi reports."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from cost_model.errors import HexGen2Error, InputError
from hexgen2.probing.figures import Findings

MOST_CPU_DEVICES = 8
_TIMEOUT_S = 300.0
_TOPOLOGY_CLASSES = re.compile(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b")


def probe_machine(kind: str | None, count: int | None) -> Findings:
    """Measure this machine's CUDA devices, or CPU devices of one core each.

    Parameters
    ----------
    kind : "cuda" or "cpu"; None: CUDA if there are such devices, else CPU
    count : how many devices; None: all GPUs, or one CPU device per core up to MOST_CPU_DEVICES

    Raises
    ------
    InputError : there are fewer devices
    HexGen2Error : a probing process failed
    """
    import torch

    gpus = torch.cuda.device_count()
    kind = kind or ("cuda" if gpus else "cpu")
    there = gpus if kind == "cuda" else len(os.sched_getaffinity(0))
    count = count or (there if kind == "cuda" else min(there, MOST_CPU_DEVICES))
    if count > there:
        raise InputError(
            "--devices", "", f"asks for {count} {kind} devices, but there are {there}", "ask for fewer"
        )
    if count == 0:
        raise InputError("--kind", "", "there are no CUDA devices", "probe the CPU with --kind cpu")
    return _run(kind, count, _available_bytes() / count)


def topology(report: str) -> tuple[str, ...]:
    """The distinct link classes (NV4, PIX, PXB, PHB, NODE, SYS) in the matrix of `nvidia-smi topo -m`."""
    rows = [line for line in report.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    return tuple(sorted({found for row in rows for found in _TOPOLOGY_CLASSES.findall(row)}))


def _run(kind: str, count: int, memory_bytes: float) -> Findings:
    from hexgen2.probing.worker import probe_device

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        receivers, workers = [], []
        for rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, count, kind, memory_bytes, meeting, sender)
            worker = context.Process(target=probe_device, args=arguments, daemon=True)
            worker.start()
            sender.close()
            receivers.append(receiver)
            workers.append(worker)
        try:
            found = [_receive(receiver, rank) for rank, receiver in enumerate(receivers)]
        finally:
            for worker in workers:
                worker.join(1.0)
                worker.kill()
    devices = tuple(figures for figures, _, _ in found)
    _, links, reduces = found[0]
    return Findings(kind, devices, tuple(links), tuple(reduces), _nvidia_topology() if kind == "cuda" else ())


def _receive(receiver, rank: int):
    if not wait([receiver], _TIMEOUT_S):
        raise HexGen2Error(f"probing device {rank} took longer than {_TIMEOUT_S:g} s")
    try:
        return receiver.recv()
    except EOFError:
        raise HexGen2Error(f"the process that probed device {rank} died") from None


def _nvidia_topology() -> tuple[str, ...]:
    try:
        report = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return topology(report.stdout) if report.returncode == 0 else ()


def _available_bytes() -> float:
    """Free memory of this machine."""
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

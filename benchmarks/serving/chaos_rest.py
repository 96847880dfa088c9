"""What must be left of a fleet after chaos.py: free blocks while it runs, and nothing once it has ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from benchmarks.serving.chaos_fleet import Fleet
from benchmarks.serving.soak import verdict
from cost_model.lengths import BLOCK_TOKENS


def blocks_are_free(metrics: dict[str, dict[str, float]]) -> list[bool]:
    """Whether the blocks of every replica that has reported are free."""
    good = []
    for replica, budget in metrics["hexgen2_kv_tokens_budget"].items():
        free = metrics["hexgen2_kv_blocks_free"].get(replica)
        held = metrics["hexgen2_kv_tokens"][replica]
        what = f"{free} of {budget // BLOCK_TOKENS:.0f}, {held:.0f} tokens accounted for"
        good.append(verdict(f"free blocks of {replica}", what, free == budget // BLOCK_TOKENS and not held))
    return good


def nothing_is_left(fleet: Fleet, code: int, shared_before: set[str]) -> list[bool]:
    """Whether no process, port or shared memory is left."""
    left = [f"{each.pid} {each.status()}" for each in fleet.family()]
    with socket.socket() as probe:
        listening = probe.connect_ex(("127.0.0.1", fleet.port)) == 0
    shared = {each for each in shared_memory() - shared_before if not _in_use(each)}
    return [
        verdict("exit code", code, code == 0),
        verdict("processes that outlived their front end for 5 s", fleet.left_behind, not fleet.left_behind),
        verdict("processes left", left or "none", not left),
        verdict("port in use", listening, not listening),
        verdict("shared memory left", shared or "none", not shared),
    ]


def shared_memory() -> set[str]:
    """Shared memory segments, without semaphores: a fleet has none, so those belong to other programs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _in_use(name: str) -> bool:
    """Whether any process maps a shared memory segment, which may belong to another program."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return False

"""A launched fleet to break: its processes and replicas, and the ways to break them from outside."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hexgen2.placement import Placement, Replica

START_S, END_S = 240.0, 60.0
FOUND_S = 6.0
"""If a fault loses a replica, it does so within this time."""
MARK = "HEXGEN2_CHAOS"
_PIDFD_GETFD = 438  # the same number on every Linux architecture


@dataclass
class Fleet:
    """`hexgen2 launch` on one port, with restarts.

    Attributes
    ----------
    turns : deaths and restarts of the front end: it is dead while the number is odd
    struck : replicas that were hit and do not serve again yet, with the time (time.monotonic)
    recovered_s : seconds from a hit until the replica served again
    unprovoked : replicas that were lost without a fault, because they were busy and answered too late
    restarted_s : seconds from the death of the front end until the next one served
    """

    command: list[str]
    placement: Placement
    work: Path
    rng: random.Random
    port: int = 0
    turns: int = 0
    struck: dict[str, float] = field(default_factory=dict)
    recovered_s: list[float] = field(default_factory=list)
    restarted_s: list[float] = field(default_factory=list)
    left_behind: int = 0
    unprovoked: int = 0
    _read: int = 0
    _cut_s: float = 0.0

    def __post_init__(self) -> None:
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.replica_of = {gpu: each for each in self.placement.replicas for gpu in each.gpus}
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self.port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start, and wait until it serves."""
        self.log = self.work / f"launch-{self.turns}.log"
        self._read = 0
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                [*self.command, "--port", str(self.port)],
                stderr=log,
                start_new_session=True,
                env={**os.environ, MARK: self.mark},
            )
        deadline = time.monotonic() + START_S
        while not any(line.startswith("serving ") for line in self.log.read_text().splitlines()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the fleet did not start:\n{self.log.read_text()}")
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        """All running processes that any launch of this fleet started."""
        return [each for each in psutil.process_iter() if _mark(each) == self.mark]

    def workers(self) -> dict[str, psutil.Process]:
        """The running workers by GPU; a worker shows the end of its GPU's name as its process name."""
        names = {gpu[-15:]: gpu for gpu in self.replica_of}
        return {names[name]: each for each in self.family() if (name := _name(each)) in names}

    def watch(self) -> None:
        """Read what the front end has logged about its replicas since the last call."""
        text = self.log.read_text()
        end = text.rfind("\n") + 1
        now = time.monotonic()
        for line in text[self._read : end].splitlines():
            words = line.split()
            if " is lost (" in line and words[0] == "replica":
                if words[1] not in self.struck:
                    by_cut = now - self._cut_s < FOUND_S
                    self.unprovoked += not by_cut
                    self.struck[words[1]] = self._cut_s if by_cut else now
            elif line.endswith(" serves again") and (at := self.struck.pop(words[1], None)) is not None:
                self.recovered_s.append(now - at)
        self._read = end

    def may_strike(self, replica: Replica) -> bool:
        """Whether all that do what the replica does serve, and others could take its requests."""
        alike = [each for each in self.placement.replicas if self._phases(each) & self._phases(replica)]
        others = [self._phases(each) for each in alike if each is not replica]
        return not any(each.id in self.struck for each in alike) and self._phases(replica) <= set().union(
            *others
        )

    @staticmethod
    def _phases(replica: Replica) -> set[str]:
        return {"prefill", "decode"} if replica.role in ("mixed", "colocated") else {replica.role}

    def strike(self, how: signal.Signals) -> str:
        """Send a signal to a random rank; return what was done, or "" if no replica may be struck now."""
        workers = self.workers()
        fit = sorted(gpu for gpu in workers if self.may_strike(self.replica_of[gpu]))
        if not fit:
            return ""
        gpu = self.rng.choice(fit)
        self.struck[self.replica_of[gpu].id] = time.monotonic()
        workers[gpu].send_signal(how)
        return f"{how.name} to {gpu} of {self.replica_of[gpu].id}"

    def cut(self) -> str:
        """Break a random TCP connection between two workers, by shutting down the socket of one of them."""
        workers = self.workers()
        ends = {}
        for gpu, process in workers.items():
            for each in _connections(process):
                ends[each.laddr.port, each.raddr.port] = gpu, each.fd
        pairs = [
            (gpu, ends[there, here][0], fd)
            for (here, there), (gpu, fd) in ends.items()
            if (there, here) in ends
        ]
        fit = sorted(each for each in pairs if self._may_cut(*each[:2]))
        if not fit:
            return ""
        gpu, other, fd = self.rng.choice(fit)
        self._cut_s = time.monotonic()
        _shut_down(workers[gpu].pid, fd)
        return f"cut between {gpu} of {self.replica_of[gpu].id} and {other} of {self.replica_of[other].id}"

    def _may_cut(self, gpu: str, other: str) -> bool:
        one, two = self.replica_of[gpu], self.replica_of[other]
        return self.may_strike(one) if one is two else one.id not in self.struck and two.id not in self.struck

    def restart_front_end(self) -> None:
        """Kill the front end and launch it again on the same port; the old processes must all exit by
        themselves."""
        begun, old = time.monotonic(), self.family()
        self.turns += 1
        self.process.kill()
        self.process.wait()
        self.struck.clear()
        self.launch()
        self.turns += 1
        self.restarted_s.append(time.monotonic() - begun)
        self.left_behind += len(psutil.wait_procs(old, 5)[1])

    def stop(self) -> int:
        """Send Ctrl-C; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(END_S)

    def close(self) -> None:
        """Kill whatever is left."""
        for each in self.family():
            each.kill()


def _mark(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK, "")
    except psutil.Error:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().removesuffix("\n")
    except OSError:
        return ""


def _connections(process: psutil.Process) -> list:
    try:
        found = process.net_connections("tcp")
    except psutil.Error:
        return []
    return [each for each in found if each.status == psutil.CONN_ESTABLISHED and each.raddr and each.fd >= 0]


def _shut_down(pid: int, descriptor: int) -> None:
    """Shut down a socket of another process through a copy of its descriptor. The process need not cooperate;
    both ends see the end of the stream."""
    handle = os.pidfd_open(pid)
    try:
        copied = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, descriptor, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with socket.socket(fileno=copied) as stream:
            stream.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)

"""Connections between emulated pipeline stages: a small frame per step stands for the activations."""

from __future__ import annotations

import queue
import time

from runtime.engine.rank import Rank
from runtime.protocol.between_workers import Passed
from runtime.protocol.framing import Connection
from runtime.protocol.handshake import Credentials, connect
from runtime.protocol.to_workers import Configure, Connect

PURPOSE = "stage"
_CONNECT_S = 30.0


class Hops:
    """One worker's connections to the workers of the next stage that take its activations, and from a worker
    of the previous stage. Who is connected to whom is the same as with torch (`torch/collectives.py`)."""

    def __init__(self, config: Configure, rank: Rank) -> None:
        self._config, self._rank = config, rank
        self._next: list[Connection] = []
        self._arrived: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()

    def join(self, addresses: Connect) -> None:
        """Connect to the next stage."""
        rank = self._rank
        if rank.is_last:
            return
        targets = rank.stages[rank.stage_index + 1].workers[rank.tp_rank :: rank.tp]
        credentials = Credentials(self._config.worker, PURPOSE, self._config.secret)
        for target in targets:
            connection = connect(addresses.peers[target], credentials, _CONNECT_S)
            connection.stream.settimeout(None)
            self._next.append(connection)

    def serve(self, connection: Connection) -> None:
        """Receive the frames of the previous stage.

        Raises
        ------
        ConnectionError : that stage is gone, which ends the replica
        """
        while isinstance(message := connection.receive(), Passed):
            self._arrived.put((message.step, time.monotonic() - message.late_s))
        raise ConnectionError("the previous pipeline stage is gone")

    def wait(self, step: int) -> float:
        """Wait for a step's activations; returns when they came (time.monotonic), had they left in time."""
        found, arrived_s = self._arrived.get()
        if found != step:
            raise ConnectionError(f"the previous pipeline stage sent step {found}, not {step}")
        return arrived_s

    def pass_on(self, step: int, late_s: float) -> None:
        """Send a step's activations to the next stage, so much later than planned."""
        for connection in self._next:
            connection.send(Passed(step=step, late_s=late_s))

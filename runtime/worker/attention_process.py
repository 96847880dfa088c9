"""The process of an attention worker: a GPU without weights that keeps KV heads for a replica's stages."""

from __future__ import annotations

import threading
from typing import NoReturn

from runtime.protocol.between_workers import Hello
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import Ready
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure, Connect
from runtime.worker.base import WorkerProcess


class AttentionProcess(WorkerProcess):
    """Serves the workers of its replica's stages, each in the thread of its connection."""

    def __init__(self, config: Configure, control: Connection) -> None:
        from runtime.engine.torch.headwise.server import AttentionServer

        super().__init__(config, control)
        blocks = {
            lane.worker: device.blocks
            for lane in config.lanes
            for device in lane.devices
            if device.worker == config.worker
        }
        self._server = AttentionServer(blocks, config.block_tokens, config.device, config.threads)

    def run(self) -> NoReturn:
        """Listen until the process ends."""
        self.check()
        self.open()
        self.control.send(Ready(worker=self.config.worker, load_s=0.0, weight_bytes=0))
        while True:
            threading.Event().wait()

    def take(self, message: Message) -> None:
        if not isinstance(message, Connect):  # those who need other addresses connect by themselves
            super().take(message)

    def serves(self, connection: Connection, introduced: Hello) -> bool:
        if introduced.purpose != "heads":
            return False
        self._server.serve(connection, introduced.worker)
        return True

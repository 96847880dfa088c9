"""A peer in a separate process, for tests to kill or stop: it prints its address and echoes frames.

python p2p_peer.py IDENTITY_FILE NETWORK_KEY_HEX [BOOTSTRAP_ADDRESS]
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import load_identity
from runtime.p2p.transport.channel import Channel

LOCAL = "/ip4/127.0.0.1/tcp/0"


async def echo(channel: Channel) -> None:
    """Send back whatever arrives."""
    while (frame := await channel.receive()) is not None:
        channel.send(frame)


async def serve(identity: str, network_key: str, *bootstrap: str) -> None:
    peers = Peers(load_identity(identity), [LOCAL], bytes.fromhex(network_key), None, bootstrap)
    peers.serve("echo", echo)
    await peers.start()
    print(peers.addresses[0], flush=True)
    await asyncio.Event().wait()


@contextmanager
def peer_process(
    identity: Path, network_key: bytes, *bootstrap: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process and its address; the process is killed at the end."""
    command = [sys.executable, __file__, str(identity), network_key.hex(), *bootstrap]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

"""Links to workers: who reads one may change between any two bytes."""

import asyncio
import socket

import pytest

from cost_model.errors import HexGen2Error
from runtime.frames import HEAD_BYTES
from runtime.launcher.startup import until_ready
from runtime.launcher.worker_link import StreamLink
from runtime.protocol.codec import encode
from runtime.protocol.from_workers import Failed, Pong, Ready

READY = Ready(worker="n/0", load_s=0.0, weight_bytes=5)


async def a_link():
    ours, theirs = socket.socketpair()
    return await StreamLink.over(ours), theirs


@pytest.mark.parametrize("bytes_before", [0, 2, HEAD_BYTES, HEAD_BYTES + 3])
def test_a_cancelled_receive_loses_no_message(bytes_before):
    async def scenario():
        link, theirs = await a_link()
        frame = encode(READY)
        reading = asyncio.create_task(link.receive())
        theirs.sendall(frame[:bytes_before])
        await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        theirs.sendall(frame[bytes_before:] + encode(Pong(worker="n/0")))
        assert await link.receive() == READY
        assert await link.receive() == Pong(worker="n/0")
        assert link.heard == 2

    asyncio.run(scenario())


def test_an_answer_to_an_earlier_ping_is_not_what_a_turn_waits_for():
    async def scenario():
        link, theirs = await a_link()
        theirs.sendall(encode(Pong(worker="n/0")) + encode(READY))
        await until_ready({"n/0": link})
        theirs.sendall(encode(Failed(worker="n/0", kind="fault", text="no memory")))
        with pytest.raises(HexGen2Error, match="worker n/0 failed: no memory"):
            await until_ready({"n/0": link})

    asyncio.run(scenario())

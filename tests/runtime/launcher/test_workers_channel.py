"""One channel carries the messages of several workers; and how it can break."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cost_model.errors import HexGen2Error, InputError
from runtime.frames import HEAD_BYTES, BadFrame
from runtime.launcher.nodes.agent_messages import (
    AGENT_PROTOCOL,
    StartFailed,
    StopWorkers,
    Welcome,
    WorkerEnded,
    WorkerFrame,
    WorkersEnded,
    decode,
    encode,
)
from runtime.launcher.nodes.workers_channel import WorkersChannel
from runtime.p2p.transport.channel import Channel
from runtime.protocol.codec import decode as decode_message
from runtime.protocol.codec import encode as encode_message
from runtime.protocol.from_workers import Pong, Released
from runtime.protocol.to_workers import Ping, Shutdown

WORKERS = ("left/0", "left/1")


class Ends(Channel):
    """A channel whose other end is the test."""

    def __init__(self):
        self.peer_id = "a peer"
        self.sent, self.coming, self.closed = [], asyncio.Queue(), False

    def send(self, frame):
        if not self.closed:
            self.sent.append(frame)

    async def receive(self):
        return await self.coming.get()

    def close(self):
        self.closed = True


def from_worker(worker, message):
    return encode(WorkerFrame(worker=worker, body=encode_message(message)[HEAD_BYTES:]))


def with_channel(test):
    async def run():
        ends = Ends()
        await test(ends, WorkersChannel(ends, "left", WORKERS))

    asyncio.run(run())


def test_each_worker_gets_and_sends_its_own_messages_in_order():
    async def test(ends, channel):
        for worker, count in zip(WORKERS, (3, 1), strict=True):
            for _ in range(count):
                ends.coming.put_nowait(from_worker(worker, Pong(worker=worker)))
        first, second = (channel.links[worker] for worker in WORKERS)
        assert await second.receive() == Pong(worker=WORKERS[1])
        assert [await first.receive() for _ in range(3)] == [Pong(worker=WORKERS[0])] * 3
        assert (first.heard, second.heard) == (3, 1)
        second.send(Ping())
        first.send(Shutdown())
        sent = [decode(frame) for frame in ends.sent]
        assert sent == [decode(from_worker(WORKERS[1], Ping())), decode(from_worker(WORKERS[0], Shutdown()))]

    with_channel(test)


def test_a_worker_may_end_before_the_others_and_all_end_with_the_channel():
    async def test(ends, channel):
        first, second = (channel.links[worker] for worker in WORKERS)
        ends.coming.put_nowait(encode(WorkerEnded(worker=WORKERS[0])))
        assert await first.receive() is None and await first.receive() is None
        ends.coming.put_nowait(from_worker(WORKERS[1], Pong(worker=WORKERS[1])))
        ends.coming.put_nowait(None)
        assert await second.receive() == Pong(worker=WORKERS[1])
        assert await second.receive() is None
        assert ends.closed

    with_channel(test)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("input", InputError, "node left: a digest; give another"),
        ("busy", HexGen2Error, "node left: a digest"),
    ],
)
def test_a_problem_of_the_agent_is_every_link_s(kind, error, words):
    async def test(ends, channel):
        ends.coming.put_nowait(encode(StartFailed(kind=kind, text="a digest; give another")))
        for link in channel.links.values():
            with pytest.raises(error, match=words):
                await link.receive()

    with_channel(test)


@pytest.mark.parametrize("frame", [b"", b"nonsense", encode(StopWorkers())])
def test_a_frame_that_no_agent_sends_breaks_the_channel(frame):
    async def test(ends, channel):
        ends.coming.put_nowait(frame)
        with pytest.raises(HexGen2Error, match="node left broke the protocol"):
            await channel.links[WORKERS[0]].receive()
        assert ends.closed

    with_channel(test)


def test_stop_waits_for_the_agent_and_not_for_ever():
    async def test(ends, channel):
        stopping = asyncio.create_task(channel.stop(60))
        while not ends.sent:
            await asyncio.sleep(0)
        assert decode(ends.sent[0]) == StopWorkers() and not stopping.done()
        ends.coming.put_nowait(encode(WorkersEnded()))
        await stopping
        assert ends.closed and await channel.links[WORKERS[0]].receive() is None
        silent = Ends()
        await WorkersChannel(silent, "left", WORKERS).stop(0.01)
        assert silent.closed

    with_channel(test)


def check(frame):
    """Check that the bytes are a non-empty message, or refused as a bad frame."""
    for decode_any, encode_any in ((decode, encode), (decode_message, encode_message)):
        try:
            message = decode_any(frame)
        except BadFrame:
            continue
        assert encode_any(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_bad_frame(frame):
    check(frame)


WHOLE = (
    encode(
        Welcome(protocol=AGENT_PROTOCOL, node="left", address="10.0.0.4", model_path="/models", cores=(0, 1))
    ),
    from_worker("left/0", Pong(worker="left/0")),
    encode_message(Released(request_id="r1", replica="decode-0"))[HEAD_BYTES:],
)


@given(st.sampled_from(WHOLE), st.integers(0, 100), st.binary(max_size=8))
@example(WHOLE[0], 2, b"\x80")
@example(WHOLE[2], 2, b"\x80")
def test_a_damaged_message_is_another_one_or_a_bad_frame(whole, at, wrong):
    check(whole[:at] + wrong + whole[at + 1 :])

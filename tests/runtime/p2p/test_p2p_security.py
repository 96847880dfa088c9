"""Peers without access are refused, with one log line each, and the host keeps serving."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from p2p_peer import LOCAL, echo

from runtime.frames import MAX_FRAME_BYTES
from runtime.p2p.host import Peers
from runtime.p2p.membership.gossip import SERVICE, Digest, Gossip, RecordBatch
from runtime.p2p.membership.identity import new_identity, new_network_key
from runtime.p2p.membership.record import NodeRecord, sign
from runtime.p2p.membership.table import NodeTable

PLAINTEXT_CLIENT = """
import sys, trio
from libp2p import new_host
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from multiaddr import Multiaddr

async def main():
    keys = create_new_key_pair()
    key = sys.argv[2] if len(sys.argv) > 2 else None
    host = new_host(keys, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)}, psk=key)
    async with host.run([]):
        with trio.fail_after(30):
            await host.connect(info_from_p2p_addr(Multiaddr(sys.argv[1])))
            stream = await host.new_stream(host.get_connected_peers()[0], ["/hexgen2/echo/1"])
            await stream.write(b"let me in")
    print("I am in")

try:
    trio.run(main)
except* Exception as errors:
    print("refused", errors.exceptions)
"""


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 90))


@asynccontextmanager
async def server(key, allowed=None):
    """A peer that echoes, and whose log a test reads."""
    peers = Peers(new_identity(), [LOCAL], key, allowed, [])
    peers.serve("echo", echo)
    await peers.start()
    try:
        yield peers
    finally:
        await peers.stop()


async def is_served(peers, identity, key):
    """Whether a peer with this identity and key gets an answer."""
    client = Peers(identity, [], key, [peers.peer_id], [])
    await client.start()
    try:
        channel = await client.open(peers.addresses[0], "echo")
        channel.send(b"hello")
        return await channel.receive() == b"hello"
    except ConnectionError:
        return False
    finally:
        await client.stop()


def refusals(caplog):
    """The logged lines, each a single line without a traceback."""
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in lines if record.exc_info or "\n" in record.getMessage()]
    return [record.getMessage() for record in lines if record.name.startswith("runtime.p2p")]


@pytest.mark.parametrize("with_key", [False, True])
def test_a_plaintext_client_is_refused(with_key, caplog):
    async def check():
        key = new_network_key() if with_key else None
        friend = new_identity()
        async with server(key, [friend.peer_id]) as peers:
            arguments = [peers.addresses[0], *([key.hex()] if key else [])]
            command = [sys.executable, "-c", PLAINTEXT_CLIENT, *arguments]
            client = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert "refused" in client.stdout and "I am in" not in client.stdout
            assert not peers.connected
            assert await is_served(peers, friend, key)

    run(check())
    assert len([line for line in refusals(caplog) if "refused a connection" in line]) == 1


@pytest.mark.parametrize("wrong", [None, bytes(32)], ids=["none", "another"])
def test_a_wrong_network_key_is_refused(wrong, caplog):
    async def check():
        key = new_network_key()
        friend = new_identity()
        async with server(key, [friend.peer_id]) as peers:
            outside = Peers(friend, [], wrong, [peers.peer_id], [])
            await outside.start()
            with pytest.raises(ConnectionError, match=peers.peer_id):
                await outside.open(peers.addresses[0], "echo")
            await outside.stop()
            assert not peers.connected
            assert await is_served(peers, friend, key)

    run(check())
    assert "refused a connection" in "".join(refusals(caplog))


def test_an_unknown_peer_with_the_right_key_is_refused_and_logged_once(caplog):
    async def check():
        key = new_network_key()
        friend, stranger = new_identity(), new_identity()
        async with server(key, [friend.peer_id]) as peers:
            for times in range(1, 4):
                assert not await is_served(peers, stranger, key)
                while sum(peers.refused.values()) < times:  # a stranger learns first that it is refused
                    await asyncio.sleep(0.02)
            assert peers.refused == {stranger.peer_id: 3}
            assert await is_served(peers, friend, key)
        return stranger.peer_id

    stranger = run(check())
    assert len([line for line in refusals(caplog) if stranger in line]) == 1


def test_a_peer_that_is_not_who_it_should_be_is_not_talked_to():
    async def check():
        key = new_network_key()
        async with server(key) as peers:
            client = Peers(new_identity(), [], key, None, [])
            await client.start()
            address = peers.addresses[0].split("/p2p/")[0]
            with pytest.raises(ConnectionError):
                await client.open(f"{address}/p2p/{new_identity().peer_id}", "echo")
            await client.stop()

    run(check())


def test_raw_garbage_is_refused_and_the_host_serves_on(caplog):
    async def check():
        key = new_network_key()
        async with server(key) as peers:
            port = int(peers.addresses[0].split("/")[4])
            for garbage in (b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100), os.urandom(100_000)):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(garbage)
                    connection.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(0.1)
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            assert await is_served(peers, new_identity(), key)
            for connection in idle:
                connection.close()

    run(check())
    assert refusals(caplog)


@asynccontextmanager
async def raw_channel():
    """A channel, and a way to write bytes outside its frames; another channel must still work at the end."""
    key = new_network_key()
    async with server(key) as peers:
        client = Peers(new_identity(), [], key, None, [])
        await client.start()
        channel = await client.open(peers.addresses[0], "echo")
        thread, stream = client._thread, channel._stream
        yield channel, lambda data: thread.bridge.to_trio(lambda: thread._spawn(stream.write, data))
        other = await client.open(peers.addresses[0], "echo")
        other.send(b"still")
        assert await other.receive() == b"still"
        await client.stop()


def test_a_frame_that_claims_too_much_closes_the_channel_not_the_host(caplog):
    async def check():
        async with raw_channel() as (channel, write):
            write((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
            assert await channel.receive() is None

    run(check())
    assert len([line for line in refusals(caplog) if "over the limit" in line]) == 1


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_on_a_channel_do_no_harm(pieces):
    async def check():
        async with raw_channel() as (_, write):
            for piece in pieces:
                write(piece)

    run(check())


def test_bad_table_frames_and_records_change_nothing(caplog):
    async def check():
        key = new_network_key()
        honest, liar, server_identity = new_identity(), new_identity(), new_identity()
        peers = Peers(server_identity, [LOCAL], key, None, [])
        table = NodeTable()
        gossip = Gossip(peers, server_identity, table, NodeRecord(peer_id=server_identity.peer_id, name="a"))
        await peers.start()
        await gossip.start()
        client = Peers(liar, [], key, None, [])
        await client.start()

        def record(sequence, **facts):
            return NodeRecord(
                peer_id=honest.peer_id, name="h", sequence=sequence, issued_at=table.now(), **facts
            )

        channel = await client.open(peers.addresses[0], SERVICE)
        new, old = sign(record(5, status="ready"), honest), sign(record(4, status="draining"), honest)
        forged = sign(record(9, status="left"), liar)
        lie = sign(record(10, load=7.0), honest)
        own = sign(msgspec.structs.replace(record(2**61), peer_id=peers.peer_id), liar)
        channel.send(msgspec.msgpack.encode(RecordBatch((new, old, forged, lie, own, new))))
        channel.send(msgspec.msgpack.encode(Digest({"nobody": 3})))
        while sum(table.rejected.values()) < 4:
            await asyncio.sleep(0.02)
        assert table.get(honest.peer_id).record.status == "ready"
        assert table.get(peers.peer_id).record.name == "a"
        assert table.rejected == {"older": 1, "signature": 2, "malformed": 1}
        for frame in (b"", b"\xc1", os.urandom(1000), msgspec.msgpack.encode({"type": "RecordBatch"})):
            channel = await client.open(peers.addresses[0], SERVICE)
            channel.send(frame)
            while await channel.receive() is not None:
                pass
        assert table.get(honest.peer_id).record.status == "ready"
        await client.stop()
        await gossip.stop()
        await peers.stop()

    run(check())
    lines = refusals(caplog)
    assert len([line for line in lines if "table frame" in line]) == 4
    assert len([line for line in lines if "node record" in line]) == 2


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_any_table_frames_do_no_harm(frames):
    async def check():
        key, identity = new_network_key(), new_identity()
        peers = Peers(identity, [LOCAL], key, None, [])
        gossip = Gossip(peers, identity, NodeTable(), NodeRecord(peer_id=identity.peer_id, name="a"))
        await peers.start()
        await gossip.start()
        client = Peers(new_identity(), [], key, None, [])
        await client.start()
        for frame in frames:
            channel = await client.open(peers.addresses[0], SERVICE)
            assert await channel.receive()  # its own record comes first
            channel.send(frame)
        assert [view.record.name for view in gossip.table.snapshot()] == ["a"]
        await client.stop()
        await gossip.stop()
        await peers.stop()

    run(check())

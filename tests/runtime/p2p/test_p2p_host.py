"""Peers and channels over real sockets: order, sizes, losses, reconnection, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import asynccontextmanager

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from p2p_peer import LOCAL, echo, peer_process

from cost_model.errors import InputError
from runtime.frames import MAX_FRAME_BYTES
from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import load_identity, load_network_key, new_identity, new_network_key

PATIENCE_S = 60  # generous for busy machines; tests check the order of events, not the clock


@asynccontextmanager
async def network(*bootstrap_of_second, key=None, service=echo):
    """Two peers of one network; the first serves, and the second knows its address."""
    key = key or new_network_key()
    first = Peers(new_identity(), [LOCAL], key, None, [])
    first.serve("echo", service)
    await first.start()
    second = Peers(new_identity(), [LOCAL], key, None, bootstrap_of_second)
    await second.start()
    try:
        yield first, second
    finally:
        await second.stop()
        await first.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.binary(max_size=3000), max_size=30), max_size=5))
def test_any_frames_come_back_in_order(bursts):
    async def check():
        async with network() as (first, second):
            channel = await second.open(first.addresses[0], "echo")
            for burst in bursts:
                for frame in burst:
                    channel.send(frame)
                assert [await channel.receive() for _ in burst] == burst

    run(check())


def test_large_frames_cross_both_ways_at_once():
    async def check():
        frames = [os.urandom(1024 * 1024) for _ in range(12)]
        async with network() as (first, second):
            channel = await second.open(first.addresses[0], "echo")
            for frame in frames:
                channel.send(frame)
            for frame in frames:
                assert await channel.receive() == frame

    run(check())


def test_a_slow_reader_makes_the_sender_wait_not_its_own_memory_fill():
    async def check():
        arrived = asyncio.Event()

        async def read_late(channel):
            await arrived.wait()
            count = 0
            while await channel.receive() is not None:
                count += 1
                if count == 40:
                    channel.send(b"all")

        async with network(service=read_late) as (first, second):
            channel = await second.open(first.addresses[0], "echo")
            before = psutil.Process().memory_info().rss
            for _ in range(40):
                channel.send(bytes(1024 * 1024))
            await asyncio.sleep(1)
            (accepted,) = first._channels
            assert len(accepted._inbox) < 20  # MAX_UNREAD_BYTES, plus one read
            arrived.set()
            assert await channel.receive() == b"all"
            assert psutil.Process().memory_info().rss - before < 300 * 1024 * 1024

    run(check())


def test_what_was_sent_before_a_close_is_delivered():
    async def check():
        received = []

        async def keep(channel):
            while (frame := await channel.receive()) is not None:
                received.append(frame)
            received.append(None)

        async with network(service=keep) as (first, second):
            channel = await second.open(first.addresses[0], "echo")
            for number in range(500):
                channel.send(b"%d" % number)
            channel.close()
            assert await channel.receive() is None
            channel.send(b"too late")
            await until(lambda: received and received[-1] is None)
            assert received[:-1] == [b"%d" % number for number in range(500)]

    run(check())


def test_an_oversized_frame_closes_the_channel_at_the_sender(caplog):
    async def check():
        async with network() as (first, second):
            channel = await second.open(first.addresses[0], "echo")
            channel.send(bytes(MAX_FRAME_BYTES + 1))
            assert await channel.receive() is None
            other = await second.open(first.addresses[0], "echo")
            other.send(b"still")
            assert await other.receive() == b"still"

    run(check())
    assert "over the limit" in caplog.text


def test_channels_that_end_at_any_moment_leave_their_connection_whole():
    async def check():
        lost = []
        async with network() as (first, second):
            second.on_peer_lost(lost.append)
            kept = await second.open(first.addresses[0], "echo")
            for number in range(40):
                channel = await second.open(first.peer_id, "echo")
                channel.send(bytes(number * 4001))
                await asyncio.sleep(0.001 * (number % 5))
                if number % 2:
                    channel.send(bytes(MAX_FRAME_BYTES + 1))
                else:
                    channel.close()
                kept.send(b"%d" % number)
                assert await kept.receive() == b"%d" % number
            assert not lost

    run(check())


def test_opening_what_is_not_there_names_the_peer():
    async def check():
        async with network() as (first, second):
            with pytest.raises(ConnectionError, match=first.peer_id):
                await second.open(first.addresses[0], "nothing")
            stranger = new_identity().peer_id
            with pytest.raises(ConnectionError, match=f"{stranger}.*no address"):
                await second.open(stranger, "echo")
            with pytest.raises(ConnectionError, match=stranger):
                await second.open(f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}", "echo")
            with pytest.raises(InputError, match="peer id"):
                await second.open("/ip4/127.0.0.1/tcp/1", "echo")

    run(check())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_freezes_is_found_and_its_channels_end(how, tmp_path):
    async def check():
        key = new_network_key()
        with peer_process(tmp_path / "other", key) as (process, address):
            peers = Peers(new_identity(), [LOCAL], key, None, [])
            lost = asyncio.Event()
            peers.on_peer_lost(lambda peer_id: lost.set())
            await peers.start()
            channel = await peers.open(address, "echo")
            channel.send(b"alive")
            assert await channel.receive() == b"alive"
            assert address.endswith(next(iter(peers.connected)))
            process.send_signal(how)
            await lost.wait()
            assert await channel.receive() is None
            assert not peers.connected
            await peers.stop()

    run(check())


def test_a_peer_that_returns_with_its_identity_is_reached_again(tmp_path):
    async def check():
        key = new_network_key()
        first = Peers(new_identity(), [LOCAL], key, None, [])
        joined, lost = [], []
        first.on_peer_joined(joined.append)
        first.on_peer_lost(lost.append)
        await first.start()
        for times in (1, 2):
            with peer_process(tmp_path / "other", key, first.addresses[0]) as (process, _address):
                await until(lambda: len(joined) == times)  # noqa: B023
                channel = await first.open(joined[-1], "echo")
                channel.send(b"again")
                assert await channel.receive() == b"again"
                process.kill()
                await until(lambda: len(lost) == times)  # noqa: B023
        assert len(set(joined)) == 1
        await first.stop()

    run(check())


def test_a_bootstrap_peer_is_dialled_until_it_is_there_and_after_it_was_lost(tmp_path):
    async def check():
        key = new_network_key()
        identity = new_identity()
        port = psutil.Process().pid % 20000 + 20000
        address = f"/ip4/127.0.0.1/tcp/{port}"
        second = Peers(new_identity(), [LOCAL], key, None, [f"{address}/p2p/{identity.peer_id}"])
        await second.start()
        for _ in range(2):
            first = Peers(identity, [address], key, None, [])
            await first.start()
            await until(lambda: second.connected == {identity.peer_id})
            await first.stop()
            await until(lambda: not second.connected)
        await second.stop()

    run(check())


def test_stopping_leaves_no_thread_and_no_socket():
    async def check():
        before = {connection.fd for connection in psutil.Process().net_connections()}
        async with network() as (first, second):
            await second.open(first.addresses[0], "echo")
        await second.stop()
        assert {connection.fd for connection in psutil.Process().net_connections()} <= before

    run(check())
    assert not [thread for thread in threading.enumerate() if thread.name == "libp2p"]


def test_a_taken_port_is_an_input_error():
    async def check():
        async with network() as (first, _second):
            taken = first.addresses[0].split("/p2p/")[0]
            with pytest.raises(InputError, match="cannot listen"):
                await Peers(new_identity(), [taken], new_network_key(), None, []).start()

    run(check())


def test_an_identity_is_made_once_and_kept_private(tmp_path):
    made = load_identity(tmp_path)
    assert load_identity(tmp_path).peer_id == load_identity(tmp_path / "identity.key").peer_id == made.peer_id
    assert (tmp_path / "identity.key").stat().st_mode & 0o777 == 0o600
    assert new_identity().peer_id != made.peer_id


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"12", b"g" * 64, b"0" * 66])
def test_bad_key_files_are_input_errors(tmp_path, content):
    path = tmp_path / "bad"
    path.write_bytes(content)
    for load in (load_identity, load_network_key):
        with pytest.raises(InputError, match="bad"):
            load(path)


def test_a_network_key_is_written_once(tmp_path):
    key = new_network_key(tmp_path / "key")
    assert load_network_key(tmp_path / "key") == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError):
        new_network_key(tmp_path / "key")
    with pytest.raises(InputError):
        load_network_key(tmp_path / "none")


def test_an_open_network_is_refused():
    with pytest.raises(InputError, match="anybody"):
        Peers(new_identity(), [LOCAL], None, None, [])

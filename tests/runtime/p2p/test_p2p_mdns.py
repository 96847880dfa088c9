"""Nodes find each other by multicast DNS, on the loopback interface and between two machines (network
namespaces on a bridge)."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import subprocess
import uuid
from contextlib import ExitStack, contextmanager

import pytest
from p2p_fleet import MAIN
from p2p_peer import LOCAL, echo
from served import Process

from cost_model.errors import InputError
from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import new_identity, new_network_key
from runtime.p2p.membership.mdns import MAX_ADDRESSES, Neighbours, announcement, understood

PATIENCE_S = 90
GROUP = "224.0.0.251"
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
PEER = new_identity().peer_id
ADDRESSES = [f"/ip4/10.0.0.4/tcp/7400/p2p/{PEER}", f"/ip4/10.1.0.4/tcp/7400/p2p/{PEER}"]


def multicast_problem():
    """Why multicast does not work on this machine's loopback interface, or ""."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.settimeout(2)
        try:
            receiver.bind(("", 0))
            membership = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton("127.0.0.1"))
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            sender.sendto(b"x", (GROUP, receiver.getsockname()[1]))
            receiver.recv(1)
        except OSError as error:
            return f"no multicast on loopback: {error}"
    return ""


def namespace_problem():
    """Why network namespaces cannot be created, or ""."""
    if os.geteuid() or not shutil.which("ip"):
        return "namespaces need root and ip"
    name = f"mdns-{uuid.uuid4().hex[:8]}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return done.stderr.strip() if done.returncode else ""


needs_multicast = pytest.mark.skipif(bool(multicast_problem()), reason=multicast_problem() or "-")
needs_namespaces = pytest.mark.skipif(bool(namespace_problem()), reason=namespace_problem() or "-")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


def as_told(said):
    return {key.encode(): value.encode() for key, value in said.items()}


def test_an_announcement_is_understood_by_who_has_the_key():
    said = as_told(announcement(PEER, ADDRESSES, KEY))
    assert understood(said, KEY) == (PEER, ADDRESSES)
    assert understood(said, OTHER_KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        {b"peer": new_identity().peer_id.encode()},
        {b"peer": b"\xff"},
        {b"peer": None},
        {b"address0": b"/ip4/192.0.2.1/tcp/1"},
        {b"address2": b"/ip4/192.0.2.1/tcp/1"},
        {b"address1": b"/ip4/10.0.0.4/tcp/7400", b"address0": b"/ip4/10.1.0.4/tcp/7400"},
        {b"proof": b""},
        {b"proof": b"\xc3\xa9" * 32},
        {b"else": b"1"},
    ],
    ids=str,
)
def test_an_announcement_that_was_changed_is_not(change):
    assert understood(as_told(announcement(PEER, ADDRESSES, KEY)) | change, KEY) is None


def test_what_is_no_announcement_is_not():
    for said in ({}, {b"peer": PEER.encode()}, {b"proof": b"0" * 64}, {b"path": b"/"}):
        assert understood(said, KEY) is None
    many = announcement(PEER, ADDRESSES * MAX_ADDRESSES, KEY)
    assert len(understood(as_told(many), KEY)[1]) == MAX_ADDRESSES


def strangers(caplog):
    return [line for line in caplog.messages if "does not prove" in line]


@needs_multicast
def test_peers_of_one_network_find_each_other_and_no_others(caplog):
    async def check():
        key = new_network_key()
        ours = [Peers(new_identity(), [LOCAL], key, None, [], mdns=True) for _ in range(3)]
        stranger = Peers(new_identity(), [LOCAL], new_network_key(), None, [], mdns=True)
        for peers in (stranger, *ours):
            peers.serve("echo", echo)
            await peers.start()
        try:
            ids = {peers.peer_id for peers in ours}
            await until(lambda: all(peers.connected == ids - {peers.peer_id} for peers in ours))
            channel = await ours[0].open(ours[1].peer_id, "echo")
            channel.send(b"found")
            assert await channel.receive() == b"found"
            assert not stranger.connected
            await until(lambda: len(strangers(caplog)) == 4)  # once by each
            assert not any(peers.refused for peers in (stranger, *ours))  # no dial was even attempted
        finally:
            for peers in (stranger, *ours):
                await peers.stop()

    run(check())
    assert len(strangers(caplog)) == 4


@needs_multicast
def test_a_peer_that_was_lost_is_found_again_and_one_that_left_is_forgotten():
    async def check():
        key, identity = new_network_key(), new_identity()
        first = Peers(new_identity(), [LOCAL], key, None, [], mdns=True)
        await first.start()
        try:
            for _ in range(2):
                second = Peers(identity, [LOCAL], key, None, [], mdns=True)
                await second.start()
                await until(lambda: first.connected == {identity.peer_id})
                await second.stop()
                await until(lambda: not first.connected and not first._neighbours.known)
        finally:
            await first.stop()

    run(check())


@needs_multicast
def test_a_stranger_makes_nobody_dial():
    """It announces its own listener's address under a peer's id, without the key and with another one."""

    async def check():
        called = asyncio.Event()

        async def trap(reader, writer):
            called.set()
            writer.close()

        server = await asyncio.start_server(trap, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        key, victim = new_network_key(), new_identity()
        bait = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{victim.peer_id}"]
        stranger = Neighbours(victim.peer_id, bait, OTHER_KEY, lambda *_: None)
        await stranger.start()
        peers = Peers(new_identity(), [LOCAL], key, None, [], mdns=True)
        friend = Peers(new_identity(), [LOCAL], key, None, [], mdns=True)
        await peers.start()
        await friend.start()
        await until(lambda: peers.connected and friend.connected and peers._neighbours._refused)
        assert victim.peer_id not in peers._neighbours.known and not called.is_set()
        for each in (friend, peers, stranger):
            await each.stop()
        server.close()

    run(check())


def test_where_there_is_no_multicast_one_line_says_so(monkeypatch):
    async def nowhere(self):
        raise OSError(19, "No such device")

    monkeypatch.setattr(Neighbours, "start", nowhere)

    async def check():
        peers = Peers(new_identity(), [LOCAL], new_network_key(), None, [], mdns=True)
        with pytest.raises(InputError, match=r"--mdns: .* has no multicast: .*No such device; .*--join"):
            await peers.start()

    run(check())


@contextmanager
def machines(count):
    """Namespaces on one bridge: their names and addresses."""
    tag = uuid.uuid4().hex[:6]
    switch = f"mdns-{tag}-s"
    names = [f"mdns-{tag}-{number}" for number in range(count)]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield [(name, f"10.78.0.{number + 1}") for number, name in enumerate(names)]
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@needs_namespaces
def test_nodes_on_two_machines_find_each_other_without_an_address(tmp_path):
    """`hexgen2 node --mdns` without any address; each node connects to the other across the bridge."""
    key = tmp_path / "network.key"
    subprocess.run([*MAIN, "node", "--new-network-key", str(key)], check=True)
    with ExitStack() as stack:
        nodes = []
        for number, (machine, address) in enumerate(stack.enter_context(machines(2))):
            options = ["--name", f"node-{number}", "--listen", f"/ip4/{address}/tcp/7400", "--mdns"]
            options += ["--network-key", str(key), "--identity", str(tmp_path / f"{number}.key")]
            command = ["ip", "netns", "exec", machine, *MAIN, "node", *options]
            node = Process(command, tmp_path / f"{number}.log")
            stack.callback(node.close)
            nodes.append(node)
        ids = [node.wait_for(r"listening on \S+/p2p/(\S+)")[1] for node in nodes]
        for node, other in zip(nodes, reversed(ids), strict=True):
            node.wait_for(f"peer {other} is connected")
        assert [node.interrupt() for node in nodes] == [0, 0]

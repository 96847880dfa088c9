"""Peers that cannot connect: both ends state the reason and the remedy; a head exits, and a node keeps
trying."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import threading
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest
import trio
from commands import hexgen2
from Crypto.Cipher import Salsa20
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.utils import encode_delim
from p2p_fleet import MAIN, fleet_placement
from p2p_peer import LOCAL, echo
from served import Process

from cost_model.errors import InputError
from runtime.frames import BadFrame
from runtime.launcher.nodes.agent_messages import (
    AGENT_PROTOCOL,
    StartFailed,
    StartWorkers,
    Welcome,
    decode,
    encode,
)
from runtime.launcher.nodes.node import run_node
from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import load_identity, new_identity, new_network_key
from runtime.p2p.membership.membership import Membership
from runtime.p2p.membership.record import BadRecord, NodeRecord, is_node_name, sign, verify
from runtime.p2p.transport import greeting, network
from runtime.p2p.transport.gate import (
    LINES_A_PERIOD,
    LOG_EVERY_S,
    MAX_STRANGERS,
    Cause,
    Gate,
    Notices,
    Refused,
)
from runtime.p2p.transport.greeting import Greeting, greet
from runtime.p2p.transport.opening import HEADER, MemberConnection

KEY, OTHER_KEY = "5a" * 32, "a5" * 32
NEWER = [
    sys.executable,
    "-c",
    "from runtime.protocol import message; message.PROTOCOL_VERSION += 1; "
    "from hexgen2.cli import main; main()",
]
RENAMED = [
    sys.executable,
    "-c",
    "from runtime.p2p.transport import greeting; greeting.version = lambda: '0.0.9'; "
    "from hexgen2.cli import main; main()",
]
NAMES = ["a b", "a/b", "", "\x1b[2J", "a\nb", "a\x9bb", "a\u202eb", "a\u200bb", "a\u2028b", "x" * 129]


class Network:
    """Processes in a folder with network keys and identities."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        for name, key in (("key", KEY), ("other", OTHER_KEY)):
            (folder / name).write_text(key)
        self.ids = {
            name: load_identity(folder / f"{name}.identity").peer_id
            for name in ["listener", "joiner", "nobody"]
        }

    def options(self, *words):
        """Options of a process: KEY, OTHER, or the name of an allowed identity."""
        keys = {"KEY": ("--network-key", str(self.folder / "key"))}
        keys["OTHER"] = ("--network-key", str(self.folder / "other"))
        return [each for word in words for each in keys.get(word) or ("--allow", self.ids[word])]

    def start(self, name, *words, main=MAIN):
        log = self.folder / f"{name}-{len(self.started)}.log"
        identity = ["--identity", str(self.folder / f"{name}.identity")]
        self.started.append(Process([*main, *words, *identity], log))
        return self.started[-1]

    def listener(self, *words):
        """A node, and its address."""
        node = self.start("listener", "node", "--name", "left", *self.options(*words))
        return node, node.wait_for(r"listening on (\S+)")[1]

    def close(self):
        for process in self.started:
            process.close()


@pytest.fixture
def net(tmp_path):
    network = Network(tmp_path)
    yield network
    network.close()


@pytest.fixture(scope="module")
def placement(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("placement") / "placement.json"
    fleet_placement(model_folder).save(path)
    return path


CASES = {
    "another key": (
        (["KEY"], ["OTHER"], MAIN, ""),
        "its network key probably differs from this node's .*--network-key",
        "refused a connection from 127.0.0.1: its network key probably differs .*--network-key",
    ),
    "no key at the joiner": (
        (["KEY"], ["listener"], MAIN, ""),
        "it probably has a network key, and this node has none .*--network-key",
        "refused a connection from 127.0.0.1: it has no network key, and this node has one.*--network-key",
    ),
    "no key at the listener": (
        (["joiner"], ["KEY"], MAIN, ""),
        "it has no network key, and this node has one.*--network-key",
        "refused a connection from 127.0.0.1: it probably has a network key, and this node has none",
    ),
    "a joiner that is not allowed": (
        (["KEY", "nobody"], ["KEY"], MAIN, ""),
        r"this node \({joiner}\) is not on its --allow list; .* start that one with --allow {joiner}",
        "refused peer {joiner} at 127.0.0.1: it is not on this node's --allow list; .*--allow {joiner}",
    ),
    "a listener that is not allowed": (
        (["KEY"], ["KEY", "nobody"], MAIN, ""),
        "it is not on this node's --allow list; .*--allow {listener}",
        r"no connection with peer {joiner} at 127.0.0.1: this node \({listener}\) is not on its --allow list",
    ),
    "another peer id": (
        (["KEY"], ["KEY"], MAIN, "nobody"),
        "/p2p/{nobody}: the peer at this address is {listener}; .*/p2p/{listener} at the end of --join",
        "refused a connection from 127.0.0.1: it ended the handshake on seeing who .*/p2p/{listener}",
    ),
    "another protocol": (
        (["KEY"], ["KEY"], NEWER, ""),
        r"its version differs: it speaks protocol [\d.]+ \(hexgen2 .*install the same version",
        r"refused peer {joiner} at 127.0.0.1: its version differs: it speaks protocol [\d.]+ \(hexgen2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ends_say_why_and_a_head_ends(case, net, placement):
    (listening, joining, main, other), said, heard = CASES[case]
    said, heard = (text.format(**net.ids) for text in (said, heard))
    listener, address = net.listener(*listening)
    if other:
        address = f"{address.partition('/p2p/')[0]}/p2p/{net.ids[other]}"
    options = ["--join", address, *net.options(*joining)]
    node = net.start("joiner", "node", "--name", "right", *options, main=main)
    node.wait_for(f"not joined yet, still trying: {address}: {said}" if not other else said)
    listener.wait_for(heard)
    assert node.interrupt() == 0  # it has kept trying until then
    if main is MAIN:
        where = ("--launcher", "p2p", "--engine", "emulated", "--port", "0")
        identity = ("--identity", net.folder / "joiner.identity")
        ended = hexgen2("launch", placement, *where, *options, *identity)
        assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("hexgen2: --join: /ip4/127.0.0.1/") and "; " in last
        assert re.search(said, last), last
    assert "Traceback" not in listener.log.read_text() + node.log.read_text()


def test_a_node_joins_once_the_other_side_is_mended(net):
    listener, address = net.listener("KEY", "nobody")
    node = net.start("joiner", "node", "--name", "right", "--join", address, *net.options("KEY"))
    node.wait_for("is not on its --allow list")
    assert listener.interrupt() == 0
    again = ["node", "--name", "left", "--listen", address.partition("/p2p/")[0], *net.options("KEY")]
    mended = net.start("listener", *again)
    mended.wait_for(f"peer {net.ids['joiner']} is connected")
    node.wait_for(f"peer {net.ids['listener']} is connected")


def test_releases_of_one_protocol_connect_and_say_that_they_differ(net):
    listener, address = net.listener("KEY")
    options = ["--join", address, *net.options("KEY")]
    node = net.start("joiner", "node", "--name", "right", *options, main=RENAMED)
    node.wait_for(
        f"peer {net.ids['listener']} runs hexgen2 .* and this node runs 0.0.9; their protocol is the same"
    )
    listener.wait_for(f"peer {net.ids['joiner']} runs hexgen2 0.0.9 and this node")
    node.wait_for(f"peer {net.ids['listener']} is connected")


def test_two_nodes_of_one_name_say_so(net):
    listener, address = net.listener("KEY")
    node = net.start("joiner", "node", "--name", "left", "--join", address, *net.options("KEY"))
    node.wait_for(f"peer {net.ids['listener']} is also named left, .*--name")
    listener.wait_for(f"peer {net.ids['joiner']} is also named left, .*--name")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 90))


@asynccontextmanager
async def peers_of(key, *bootstrap, allowed=None, identity=None):
    peers = Peers(identity or new_identity(), [LOCAL], key, allowed, bootstrap)
    peers.serve("echo", echo)
    await peers.start()
    try:
        yield peers
    finally:
        await peers.stop()


async def echoes(channel):
    channel.send(b"still here")
    return await channel.receive() == b"still here"


def test_not_all_of_several_refuse():
    """A member gives up only when every peer that it should join refuses it."""

    async def check():
        key = new_network_key()
        async with peers_of(new_network_key()) as stranger, peers_of(key) as friend:
            lines = []
            member = Peers(new_identity(), [LOCAL], key, None, [stranger.addresses[0], friend.addresses[0]])
            member.on_not_joined(lines.append)
            await member.start()
            while not lines or friend.peer_id not in member.connected:
                await asyncio.sleep(0.02)
            assert stranger.addresses[0] in lines[0] and not member.refused_by_all
            await member.stop()
            lost = Peers(new_identity(), [LOCAL], new_network_key(), None, [stranger.addresses[0]])
            await lost.start()
            (reason,) = await lost.until_refused_by_all()
            assert "network key" in reason
            await lost.stop()

    run(check())


def test_a_refused_stranger_learns_no_version():
    async def check():
        key, heard = new_network_key(), []
        original = greeting._heard

        async def listening(secured):
            heard.append(await original(secured))
            return heard[-1]

        greeting._heard = listening
        try:
            async with peers_of(key, allowed=[new_identity().peer_id]) as closed:
                client = Peers(new_identity(), [], key, None, [])
                await client.start()
                with pytest.raises(ConnectionError, match="not on its --allow list"):
                    await client.open(closed.addresses[0], "echo")
                await client.stop()
        finally:
            greeting._heard = original
        assert Greeting(allowed=False) in heard

    run(check())


class Told:
    """A secured connection whose other end sends these bytes."""

    def __init__(self, said):
        self.said, self.written, self.peer_id = said, b"", new_identity().peer_id

    def get_remote_peer(self):
        return self.peer_id

    async def write(self, data):
        self.written += data

    async def read(self, n=None):
        taken, self.said = self.said[:n], self.said[n:]
        return taken


def refusal(said):
    with pytest.raises(Refused) as caught:
        trio.run(greet, Told(said), "own", Gate(None))
    return caught.value


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (HEADER, Cause.VERSION),
        (encode_delim(b"hello"), Cause.VERSION),
        (encode_delim(greeting.PREFIX + b"{"), Cause.VERSION),
        (encode_delim(greeting.PREFIX + b'{"protocol":"\\u001b[2J"}'), Cause.VERSION),
        (encode_delim(greeting.PREFIX + b'{"protocol":"99.0","version":"9","more":[1]}'), Cause.VERSION),
        (encode_delim(greeting.PREFIX + b'{"allowed":false}'), Cause.NOT_ALLOWED),
        (b"\xff" * 12, Cause.VERSION),
        (b"\xff\xff\xff\x7f" + bytes(100), Cause.VERSION),
        (b"", Cause.UNCLEAR),
        (HEADER[:5], Cause.UNCLEAR),
    ],
)
def test_what_else_may_come_for_a_greeting(said, cause):
    refused = refusal(said)
    assert refused.cause == cause and str(refused).isprintable()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_for_a_greeting_are_refused_in_a_printable_line(said, prefixed):
    said = encode_delim(greeting.PREFIX + said) if prefixed else said
    assert str(refusal(said)).isprintable()


class Wire:
    """A stream that yields these pieces, then ends."""

    def __init__(self, pieces):
        self.pieces, self.given = list(pieces), 0

    async def read(self, n=None):
        piece = self.pieces.pop(0) if self.pieces else b""
        self.given += len(piece)
        return piece

    async def write(self, data):
        self.pieces.append(data)


def opened(key, pieces, size=4):
    wire = Wire(pieces)
    connection = MemberConnection(wire, False, key)
    try:
        return trio.run(connection.read, size), wire
    except Refused as refused:
        assert str(refused).isprintable()
        return refused, wire


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=5), st.booleans())
def test_no_garbage_opens_a_connection(pieces, with_key):
    refused, _ = opened(bytes(32) if with_key else None, pieces)
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("key", [None, bytes(range(32))])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_header_in_any_pieces_opens_it(key, piece):
    wire = Wire([])
    trio.run(MemberConnection(wire, True, key).write, HEADER + b"more")
    said = b"".join(wire.pieces)
    data, _ = opened(key, [said[start : start + piece] for start in range(0, len(said), piece)], 1)
    assert data == HEADER[:1]
    other, _ = opened(bytes(32), [said])
    assert other.cause == Cause.NETWORK_KEY


def test_a_stranger_is_read_no_further_than_a_handshake_takes():
    wire = Wire([HEADER] + [bytes(4096)] * 1000)
    connection = MemberConnection(wire, False, None)

    async def read_on():
        while await connection.read(4096):
            pass

    with pytest.raises(Refused, match="before it proved who it is"):
        trio.run(read_on)
    assert wire.given < 64 * 1024


def garbage(port):
    """Unwanted bytes that reach an open port: each on its own connection, some of which stay open."""
    nonce, key = os.urandom(8), KEY

    def sealed(data):
        return nonce + Salsa20.new(key=bytes.fromhex(key), nonce=nonce).encrypt(data)

    pieces = [
        b"",
        b"\x00",
        os.urandom(7),
        os.urandom(28),
        os.urandom(200_000),
        nonce + os.urandom(1000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(506),
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
        HEADER,
        sealed(HEADER),
        sealed(HEADER + b"\xff\xff\xff\xff\x7f" + os.urandom(100_000)),
        sealed(HEADER + encode_delim(b"/noise") + b"\xff\xff" + os.urandom(200_000)),
        sealed(HEADER + encode_delim(b"\x1b[2J\xff")),
        sealed(HEADER + encode_delim(b"ls") * 10_000),
    ]
    connections = []
    for number in range(200):
        connection = socket.create_connection(("127.0.0.1", port))
        connections.append(connection)
        try:
            connection.setblocking(False)
            connection.send(pieces[number % len(pieces)] or b"x")
            if number % 3 == 0:
                connection.close()
        except OSError:
            pass
    return connections


def test_two_hundred_strangers_at_once_disturb_no_member(caplog, monkeypatch):
    monkeypatch.setattr(network, "UPGRADE_S", 2.0)

    async def check():
        key = bytes.fromhex(KEY)
        async with peers_of(key) as listener, peers_of(key) as member:
            lost = []
            member.on_peer_lost(lost.append)
            channel = await member.open(listener.addresses[0], "echo")
            assert await echoes(channel)
            port = int(listener.addresses[0].split("/")[4])
            await flood(port, channel)
            before = psutil.Process().memory_info().rss
            for _ in range(3):
                await flood(port, channel)
            assert psutil.Process().memory_info().rss - before < 50 * 1024 * 1024
            assert not lost and listener.connected == {member.peer_id}
            async with peers_of(key, listener.addresses[0]) as late:
                assert await echoes(await late.open(listener.addresses[0], "echo"))

    async def flood(port, channel):
        connections = await asyncio.to_thread(garbage, port)
        assert await echoes(channel)
        await asyncio.sleep(network.UPGRADE_S + 0.5)
        for connection in connections:
            connection.close()
        assert await echoes(channel)

    run(check())
    lines = [record for record in caplog.records if record.name.startswith("runtime.p2p")]
    assert len(lines) <= LINES_A_PERIOD * len(Cause)
    assert all(record.getMessage().isprintable() for record in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "libp2p"]


def test_notices_are_few_and_forget_nobody_that_is_new():
    now = 0.0
    notices = Notices(now=lambda: now)
    assert [notices.times("a", "key") for _ in range(3)] == [1, 0, 0]
    assert notices.times("a", "version") == 1
    now = 20.0
    assert notices.times("a", "key") == 4  # one more attempt
    lines = 0
    for _ in range(3 * int(LOG_EVERY_S) // 15):
        now += 15.0
        lines += notices.times("a", "key") > 0
    assert lines <= 4 * LINES_A_PERIOD
    for number in range(3 * MAX_STRANGERS):
        notices.times(f"stranger {number}", "key")
    assert len(notices._subjects) <= MAX_STRANGERS + len(Cause)


# names of nodes


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_does_not_print_is_refused_at_every_door(name, tmp_path):
    assert not is_node_name(name)
    with pytest.raises(InputError, match=r"--name.*is not a valid node name") as caught:
        run_node(name, Membership(tmp_path / "key"), None, None)
    assert str(caught.value).isprintable()
    identity = new_identity()
    signed = sign(NodeRecord(peer_id=identity.peer_id, name=name, issued_at=5.0), identity)
    with pytest.raises(BadRecord, match="malformed"):
        verify(signed, 5.0)
    welcome = Welcome(protocol=AGENT_PROTOCOL, node=name, address="", model_path="", cores=())
    with pytest.raises(BadFrame):
        decode(encode(welcome))


@pytest.mark.parametrize("name", ["pod-a", "h100_1.rack-2", "Knoten-ä", "節点1", "x" * 128])
def test_a_name_that_prints_is_a_name(name):
    identity = new_identity()
    signed = sign(NodeRecord(peer_id=identity.peer_id, name=name, issued_at=5.0), identity)
    assert is_node_name(name) and verify(signed, 5.0).name == name


def test_other_texts_of_members_that_do_not_print_are_refused_too():
    identity = new_identity()
    record = NodeRecord(peer_id=identity.peer_id, name="a", issued_at=5.0)
    for facts in ({"addresses": ("\x1b[2J",)}, {"services": ("a\nb",)}, {"latency_ms": {"\u202e": 1.0}}):
        with pytest.raises(BadRecord, match="malformed"):
            verify(sign(msgspec.structs.replace(record, **facts), identity), 5.0)
    request = StartWorkers(
        protocol=AGENT_PROTOCOL, replica="\x1b[2J", workers=("a/0",), engine="torch", checkpoint="", digest=""
    )
    with pytest.raises(BadFrame):
        decode(encode(request))
    assert decode(encode(StartFailed(kind="fault", text="a\n\x1bb"))).text == "a \\x1bb"

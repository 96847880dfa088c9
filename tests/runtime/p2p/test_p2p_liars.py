"""Members that have the key and lie: they cannot change a route, and what they send is limited.

Here a member is a peer of the test that speaks the table's protocol by hand.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2p_fleet import Head, Node, fleet_placement, network_key
from p2p_peer import LOCAL
from served import SECONDS

from runtime.launcher.nodes.agent_messages import (
    AGENT_PROTOCOL,
    NODE_PROTOCOL,
    NODE_SERVICE,
    Welcome,
    encode,
)
from runtime.p2p.host import Peers
from runtime.p2p.membership import gossip as gossiping
from runtime.p2p.membership.gossip import (
    CHANNELS_A_PEER,
    RECORDS_A_FRAME,
    SERVICE,
    Digest,
    Gossip,
    RecordBatch,
)
from runtime.p2p.membership.identity import load_network_key, new_identity, new_network_key
from runtime.p2p.membership.record import Device, NodeRecord, sign
from runtime.p2p.membership.table import MAX_NODES, NodeTable
from runtime.p2p.transport.allowance import Allowance

PATIENCE_S = 120
TOKENS = 24
LIES = [
    {"load": 0.0},
    {"load": 1.0, "status": "draining"},
    {"hardware": (Device("NVIDIA H200", 2**62),) * 64, "services": ("node", "workers", "api")},
    {"role": "head", "name": "head"},
    {"role": "worker", "name": "left", "status": "left"},
    {"addresses": ("/ip4/192.0.2.1/tcp/1", "nonsense")},
]
NONSENSE = [
    {"load": load} for load in (-1.0, 1.5, 1e308, -1e308, math.inf, -math.inf, math.nan, 5e-324 - 1.0)
]
NONSENSE += [{"latency_ms": {"x": math.nan}}, {"name": "a b"}, {"name": "\x1b[2J"}, {"name": ""}]
NONSENSE += [{"hardware": (Device("GPU", -1),)}, {"hardware": (Device("a\nb", 1),)}]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


class Liar:
    """A peer that says what it likes to the table's service."""

    def __init__(self, key):
        self.identity, self.sequence = new_identity(), 0
        self.peers = Peers(self.identity, [LOCAL], key, None, [], protocol=NODE_PROTOCOL)
        self.heard = {}

    def record(self, identity=None, **facts):
        """A record in its own name or another's, signed with its own key or that other's."""
        self.sequence += 1
        peer_id = (identity or self.identity).peer_id
        about = {"peer_id": peer_id, "name": "liar", "sequence": self.sequence}
        return NodeRecord(**about | {"issued_at": NodeTable().now()} | facts)

    async def listen(self, channel):
        """Keep the records of others as they arrive."""
        while (frame := await channel.receive()) is not None:
            said = msgspec.msgpack.decode(frame, type=RecordBatch | Digest)
            for signed in said.records if isinstance(said, RecordBatch) else ():
                self.heard.setdefault(msgspec.msgpack.decode(signed.content)[0], []).append(signed)

    @staticmethod
    def say(channel, records):
        for start in range(0, len(records), RECORDS_A_FRAME):
            channel.send(msgspec.msgpack.encode(RecordBatch(tuple(records[start : start + RECORDS_A_FRAME]))))


@asynccontextmanager
async def member(key, bootstrap=()):
    """An honest member with a table."""
    identity = new_identity()
    peers = Peers(identity, [LOCAL], key, None, bootstrap, protocol=NODE_PROTOCOL)
    gossip = Gossip(peers, identity, NodeTable(), NodeRecord(peer_id=identity.peer_id, name="honest"))
    await peers.start()
    await gossip.start()
    try:
        yield gossip, peers
    finally:
        await gossip.stop()
        await peers.stop()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 50), st.floats(0, 3)), max_size=40))
def test_an_allowance_is_never_exceeded_over_any_time(steps):
    """A sender that waits as told gets at most `burst` plus `rate` per second, whatever other senders do."""
    now_s = 0.0
    allowance, alone = Allowance(10.0, 100.0, lambda: now_s), Allowance(10.0, 100.0, lambda: now_s)
    free_at, done = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    for who, amount, pause_s in steps:
        now_s += pause_s
        if now_s < free_at[who]:
            continue
        wait_s = allowance.take(who, amount)
        if who == "a":
            assert alone.take(who, amount) == pytest.approx(wait_s)
        done[who] += amount
        free_at[who] = now_s + wait_s
        assert done[who] <= 100.0 + 10.0 * free_at[who] + 1e-6
        allowance.forget()
    now_s += 1e6
    allowance.forget()
    assert len(allowance) == 0


def test_a_table_has_an_end_and_room_for_who_tells_itself(caplog):
    """A member makes up more nodes than the table holds; a node that announces itself later is accepted all
    the same."""

    async def check():
        key = new_network_key()
        async with member(key) as (gossip, peers):
            liar = Liar(key)
            await liar.peers.start()
            channel = await liar.peers.open(peers.addresses[0], SERVICE)
            made_up = [new_identity() for _ in range(MAX_NODES + 50)]
            liar.say(channel, [sign(liar.record(each), each) for each in made_up])
            await until(lambda: gossip.table.rejected["full"] >= 50)
            assert len(gossip.table.snapshot()) == MAX_NODES
            async with member(key, peers.addresses[:1]) as (other, others_peers):
                await until(lambda: gossip.table.get(others_peers.peer_id) is not None)
                await until(lambda: other.table.get(peers.peer_id) is not None)
                assert len(gossip.table.snapshot()) <= MAX_NODES
                assert gossip.table.get(peers.peer_id) is not None
                assert len(peers._known) <= MAX_NODES
            await liar.peers.stop()

    run(check())
    assert len([line for line in caplog.messages if "full" in line]) <= 2  # once per table


def test_who_floods_is_slowed_down_and_others_are_not(caplog, monkeypatch):
    """Of a flood, only the allowance is read; meanwhile a change of an honest member arrives."""
    monkeypatch.setattr(gossiping, "WORK_AT_ONCE", 300)
    monkeypatch.setattr(gossiping, "WORK_A_S", 5)

    async def check():
        key = new_network_key()
        async with member(key) as (gossip, peers), member(key, peers.addresses[:1]) as (other, _):
            liar = Liar(key)
            await liar.peers.start()
            channel = await liar.peers.open(peers.addresses[0], SERVICE)
            forged = [sign(liar.record(other._identity, status="left"), liar.identity)] * RECORDS_A_FRAME
            for _ in range(100):
                liar.say(channel, forged)
                channel.send(msgspec.msgpack.encode(Digest({})))
            await until(lambda: "floods the node table" in caplog.text)
            refused = gossip.table.rejected["signature"]
            other.announce(status="ready", load=0.5)
            about_other = lambda: gossip.table.get(other._identity.peer_id)  # noqa: E731
            await until(lambda: about_other() and about_other().record.load == 0.5)
            assert refused <= gossip.table.rejected["signature"] < 50 * RECORDS_A_FRAME
            assert about_other().state == "ready"
            await liar.peers.stop()

    run(check())
    assert len([line for line in caplog.messages if "floods the node table" in line]) == 1
    assert len([line for line in caplog.messages if "node record" in line]) == 1


def test_frames_with_too_much_in_them_and_too_many_channels_are_refused(caplog):
    async def check():
        key = new_network_key()
        async with member(key) as (gossip, peers):
            liar = Liar(key)
            await liar.peers.start()
            signed = sign(liar.record(), liar.identity)
            channel = await liar.peers.open(peers.addresses[0], SERVICE)
            channel.send(msgspec.msgpack.encode(["RecordBatch", [signed] * (RECORDS_A_FRAME + 1)]))
            while await channel.receive() is not None:
                pass
            assert gossip.table.get(liar.identity.peer_id) is None
            channels = [await liar.peers.open(peers.addresses[0], SERVICE) for _ in range(CHANNELS_A_PEER)]
            for each in channels:
                assert await each.receive()
            one_more = await liar.peers.open(peers.addresses[0], SERVICE)
            assert await one_more.receive() is None
            await liar.peers.stop()

    run(check())
    assert "refused a table frame" in caplog.text and "a table channel" in caplog.text


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory):
    """A folder, and a head that serves a placement on two nodes."""
    work = tmp_path_factory.mktemp("liars")
    fleet_placement(model_folder).save(work / "placement.json")
    processes = [Node("left", work, model_folder, [])]
    try:
        processes.append(Node("right", work, model_folder, [processes[0]]))
        head = Head(work, work / "placement.json", model_folder, processes[0], patient=True)
        processes.append(head)
        yield work, head.until_serving(), processes[0]
    finally:
        for process in reversed(processes):
            process.close()


async def answers(http, count):
    """The texts and routes of requests, one after the other."""
    body = {
        "model": "tiny-llama",
        "prompt": "the",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    found = []
    for _ in range(count):
        answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        ends = [answer.headers[f"x-hexgen2-{role}-replica"] for role in ("prefill", "decode")]
        found.append((answer.json()["choices"][0]["text"], *ends))
    return found


async def tell_lies(liar, channels, stop):
    """Send every lie to everybody again and again, with outdated records of others, and forgeries."""
    old = {peer_id: list(records) for peer_id, records in liar.heard.items()}
    others = [peer_id for peer_id in old if peer_id != liar.identity.peer_id]
    while not stop.is_set():
        true = [sign(liar.record(**facts), liar.identity) for facts in LIES]
        nonsense = [sign(liar.record(**facts), liar.identity) for facts in NONSENSE]
        forged = [
            sign(liar.record(peer_id=peer_id, sequence=2**61, status="left"), liar.identity)
            for peer_id in others
        ]
        replayed = [signed for peer_id in others for signed in old[peer_id]]
        for channel in channels:
            liar.say(channel, nonsense + forged + replayed + true)
            channel.send(msgspec.msgpack.encode(Digest({})))
        await asyncio.sleep(0.05)


async def pose_as_left(channel):
    """Answer a head as the node `left` would."""
    welcome = Welcome(protocol=AGENT_PROTOCOL, node="left", address="192.0.2.1", model_path="", cores=(0,))
    channel.send(encode(welcome))
    while await channel.receive() is not None:
        pass


def test_a_member_that_lies_changes_no_route_of_a_fleet_that_serves(fleet, caplog):
    caplog.set_level(logging.CRITICAL)
    run(lie_to(*fleet))


async def lie_to(work, head, left):
    async with httpx.AsyncClient(base_url=head.url, timeout=SECONDS) as http:
        before = await answers(http, 8)
        routes = {answer[1:] for answer in before}
        assert len(routes) == 4
        liar = Liar(load_network_key(network_key(work)))
        liar.peers.serve(NODE_SERVICE, pose_as_left)
        await liar.peers.start()
        channels = [await liar.peers.open(left.address, SERVICE)]
        listening = [asyncio.create_task(liar.listen(channels[0]))]
        names = lambda: {msgspec.msgpack.decode(each[-1].content)[1] for each in liar.heard.values()}  # noqa: E731
        await until(lambda: names() >= {"left", "right", "head"})
        for records in list(liar.heard.values()):
            record = msgspec.msgpack.decode(records[-1].content, type=NodeRecord)
            if record.name in ("right", "head"):
                liar.peers.learn(record.peer_id, record.addresses)
                channels.append(await liar.peers.open(record.peer_id, SERVICE))
                listening.append(asyncio.create_task(liar.listen(channels[-1])))
        assert len(channels) == 3
        stop = asyncio.Event()
        lying = asyncio.create_task(tell_lies(liar, channels, stop))

        async def seen():
            return (await http.get("/nodes")).json()

        while not {"malformed", "signature", "older"} <= (await seen())["rejected_records"].keys():
            assert not lying.done()
            await asyncio.sleep(0.1)
        during = await answers(http, 8)
        assert during == before, head.log.read_text()
        await asyncio.to_thread(head.wait_for, r"calls itself node left, which is peer")
        nodes = (await seen())["nodes"]
        state = {node["name"]: node["state"] for node in nodes if node["peer_id"] != liar.identity.peer_id}
        assert state == {"left": "ready", "right": "ready", "head": "ready"}
        (own,) = [node for node in nodes if node["peer_id"] == liar.identity.peer_id]
        assert 0 <= own["load"] <= 1 and own["name"] in {facts.get("name", "liar") for facts in LIES}
        assert set((await http.get("/health")).json()["replicas"].values()) == {"up"}
        stop.set()
        await lying
        await liar.peers.stop()
        for task in listening:
            task.cancel()
        assert await answers(http, 8) == before, head.log.read_text()
    for line in head.log.read_text().splitlines():
        assert "Traceback" not in line
    assert (
        len(head.log.read_text().splitlines()) < 100
    )  # each kind of lie is logged once, however often it was told

"""Node records and the table: which records are accepted, that order never matters, and how they spread."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2p_peer import LOCAL

from runtime.p2p.host import Peers
from runtime.p2p.membership.gossip import Gossip
from runtime.p2p.membership.identity import new_identity, new_network_key
from runtime.p2p.membership.record import (
    CLOCK_BOUND_S,
    MAX_RECORD_BYTES,
    BadRecord,
    Device,
    NodeRecord,
    SignedRecord,
    sign,
    verify,
)
from runtime.p2p.membership.table import KEEP_S, SILENT_S, NodeTable

NOW = 1_000_000.0
NODES = [new_identity() for _ in range(3)]
PRINTABLE = st.characters(categories=("L", "N", "P"))
STATUSES = ("joining", "ready", "draining", "left")


def record_of(identity, sequence=1, issued_at=NOW, **facts):
    return NodeRecord(peer_id=identity.peer_id, name="node", sequence=sequence, issued_at=issued_at, **facts)


def table_of(records, clock=None):
    table = NodeTable(now=lambda: NOW, monotonic=clock or (lambda: 0.0))
    for record in records:
        table.merge(record)
    return table


def content(table):
    return {view.record.peer_id: (view.record, view.state) for view in table.snapshot()}


@st.composite
def signed_records(draw):
    identity = draw(st.sampled_from(NODES))
    facts = {
        "status": draw(st.sampled_from(STATUSES)),
        "load": draw(st.floats(0, 1)),
        "services": tuple(draw(st.lists(st.text(PRINTABLE, max_size=5), max_size=3))),
        "hardware": tuple(Device("gpu", size) for size in draw(st.lists(st.integers(0, 9), max_size=2))),
    }
    return sign(record_of(identity, draw(st.integers(0, 5)), **facts), identity)


record_lists = st.lists(signed_records(), max_size=12)


@settings(deadline=None)
@given(record_lists, st.randoms(use_true_random=False))
def test_the_order_and_number_of_merges_never_matters(records, chance):
    expected = content(table_of(records))
    again = records + chance.sample(records, len(records) // 2)
    chance.shuffle(again)
    assert content(table_of(again)) == expected


@settings(deadline=None)
@given(record_lists, record_lists, record_lists)
def test_merging_whole_tables_is_associative_and_commutative(one, two, three):
    def joined(*tables):
        return table_of([signed for table in tables for signed in table.signed()])

    a, b, c = table_of(one), table_of(two), table_of(three)
    assert content(joined(joined(a, b), c)) == content(joined(a, joined(b, c))) == content(joined(c, b, a))
    assert content(joined(a, a)) == content(a)


@settings(deadline=None)
@given(record_lists)
def test_the_highest_sequence_wins_and_a_tombstone_stays(records):
    table = table_of(records)
    for view in table.snapshot():
        peer_id = view.record.peer_id
        said = [verify(signed, NOW) for signed in records]
        assert view.record.sequence == max(one.sequence for one in said if one.peer_id == peer_id)
    left = [sign(record_of(node, 10, status="left"), node) for node in NODES]
    assert {state for _, state in content(table_of(left + records)).values()} == {"left"}


@given(st.binary(max_size=400), st.binary(max_size=80))
def test_noise_is_no_record(body, signature):
    table = NodeTable(now=lambda: NOW)
    assert table.merge(SignedRecord(body, signature)) is None
    assert sum(table.rejected.values()) == 1


@given(st.data())
def test_no_byte_of_a_record_can_be_changed(data):
    signed = sign(record_of(NODES[0], load=0.5, services=("a",)), NODES[0])
    whole = bytearray(signed.content + signed.signature)
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    changed = SignedRecord(bytes(whole[: len(signed.content)]), bytes(whole[len(signed.content) :]))
    with pytest.raises(BadRecord):
        verify(changed, NOW)


def test_what_is_refused_is_counted_by_reason():
    honest, liar = NODES[0], NODES[1]
    table = table_of([sign(record_of(honest, 5), honest)])
    before = content(table)
    about_another = sign(record_of(honest, 9), liar)
    long_ago = sign(record_of(honest, 9, issued_at=NOW - CLOCK_BOUND_S - 1), honest)
    to_come = sign(record_of(honest, 9, issued_at=NOW + CLOCK_BOUND_S + 1), honest)
    replayed = sign(record_of(honest, 4), honest)
    too_busy = sign(record_of(honest, 9, load=1.5), honest)
    not_a_load = sign(record_of(honest, 9, load=float("nan")), honest)
    no_time = sign(record_of(honest, 9, issued_at=float("nan")), honest)
    huge = SignedRecord(bytes(MAX_RECORD_BYTES + 1), bytes(64))
    no_peer = sign(msgspec.structs.replace(record_of(honest, 9), peer_id="nobody"), honest)
    bad = [about_another, long_ago, to_come, replayed, too_busy, not_a_load, no_time, huge, no_peer]
    assert [table.merge(signed) for signed in bad] == [None] * len(bad)
    assert content(table) == before
    assert dict(table.rejected) == {"signature": 2, "clock": 2, "older": 1, "malformed": 3, "size": 1}


def test_a_record_too_large_to_be_taken_is_not_issued():
    with pytest.raises(BadRecord, match="size"):
        sign(record_of(NODES[0], addresses=("x" * 250,) * 100), NODES[0])


def test_only_nodes_on_the_list_are_taken():
    table = NodeTable(allowed=[NODES[0].peer_id], now=lambda: NOW)
    assert table.merge(sign(record_of(NODES[0]), NODES[0])) is not None
    assert table.merge(sign(record_of(NODES[1]), NODES[1])) is None
    assert table.rejected == {"stranger": 1}


def test_dead_nodes_are_marked_then_forgotten_and_return_by_a_newer_record_alone():
    time = [0.0]
    heard = []
    node = NODES[0]
    table = NodeTable(now=lambda: NOW + time[0], monotonic=lambda: time[0])
    table.subscribe(lambda peer_id, view: heard.append(view and view.state))
    table.merge(sign(record_of(node, 1, status="ready"), node))
    table.lost(node.peer_id)
    table.merge(sign(record_of(node, 1, status="ready"), node))
    assert table.get(node.peer_id).state == "lost"
    table.merge(sign(record_of(node, 2, status="ready"), node))
    time[0] = SILENT_S + 1
    table.expire()
    assert table.get(node.peer_id).state == "lost"
    time[0] = KEEP_S + 1
    table.expire()
    assert table.get(node.peer_id) is None
    assert heard == ["ready", "lost", "ready", "lost", None]
    assert table.merge(sign(record_of(node, 2, status="ready"), node)) is None
    assert table.rejected == {"clock": 1}


def test_a_tombstone_outlives_every_record_that_could_undo_it():
    time = [0.0]
    node = NODES[0]
    table = NodeTable(now=lambda: NOW + time[0], monotonic=lambda: time[0])
    skewed = sign(record_of(node, 1, issued_at=NOW + CLOCK_BOUND_S, status="ready"), node)
    table.merge(sign(record_of(node, 2, issued_at=NOW + CLOCK_BOUND_S, status="left"), node))
    for time[0] in range(0, int(3 * KEEP_S), 10):
        table.expire()
        assert table.merge(skewed) is None


@asynccontextmanager
async def fleet(count):
    """Nodes that know only the first one's address, with their tables."""
    key = new_network_key()
    nodes = []
    try:
        for number in range(count):
            identity = new_identity()
            bootstrap = nodes[0][0].addresses[:1] if nodes else []
            peers = Peers(identity, [LOCAL], key, None, bootstrap)
            about = NodeRecord(peer_id=identity.peer_id, name=f"node-{number}", services=(f"s{number}",))
            gossip = Gossip(peers, identity, NodeTable(), about)
            await peers.start()
            await gossip.start()
            nodes.append((peers, gossip))
        yield nodes
    finally:
        for peers, gossip in nodes:
            await gossip.stop()
            await peers.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 90))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


def states(gossip):
    return {view.record.name: view.state for view in gossip.table.snapshot()}


def test_every_table_learns_all_nodes_their_changes_and_their_leave():
    async def check():
        async with fleet(5) as nodes:
            everybody = {f"node-{number}": "joining" for number in range(5)}
            await until(lambda: all(states(gossip) == everybody for _, gossip in nodes))
            await until(lambda: all(len(peers.connected) == 4 for peers, _ in nodes))
            nodes[3][1].announce(status="ready", load=0.25)
            await until(lambda: all(states(gossip)["node-3"] == "ready" for _, gossip in nodes))
            await nodes[4][1].stop()
            await nodes[4][0].stop()
            await until(lambda: all(states(gossip)["node-4"] == "left" for _, gossip in nodes[:4]))
            seen = nodes[0][1].table.get(nodes[3][0].peer_id)
            assert seen.measured_latency_ms > 0
            assert seen.record.services == ("s3",)

    run(check())


def test_a_node_that_stops_without_a_word_is_lost_everywhere():
    async def check():
        async with fleet(3) as nodes:
            await until(lambda: all(len(peers.connected) == 2 for peers, _ in nodes))
            for task in nodes[2][1]._tasks:
                task.cancel()
            await nodes[2][0].stop()
            await until(lambda: all(states(gossip).get("node-2") == "lost" for _, gossip in nodes[:2]))

    run(check())

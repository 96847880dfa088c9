"""User errors with nodes: one line that states the place and the remedy, and nothing starts."""

import asyncio
import json
import shutil

import pytest
from p2p_fleet import fleet_placement

from cost_model.errors import InputError
from hexgen2.cli import cli
from runtime.launcher.configure import configurations
from runtime.launcher.nodes.agent_messages import AGENT_PROTOCOL, NODE_SERVICE, Welcome, encode
from runtime.launcher.nodes.digest import checkpoint_digest
from runtime.launcher.nodes.roster import Roster
from runtime.launcher.p2p import P2pLauncher
from runtime.p2p.membership.membership import Membership

FAR = "/ip4/192.0.2.1/tcp/7400"
PEER = "12D3KooWQTotdVb7vGw7EsEv6oyB6M89XXDHvSr33HiNuCgZAaA7"


def refusal(*arguments):
    """The one line that the command prints before it starts anything."""
    with pytest.raises(InputError) as caught:
        cli.main([str(argument) for argument in arguments], standalone_mode=False)
    line = str(caught.value)
    assert "\n" not in line and "; " in line
    return line


@pytest.fixture
def key(tmp_path):
    """A network key, made by the command."""
    path = tmp_path / "network.key"
    cli.main(["node", "--new-network-key", str(path)], standalone_mode=False)
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", FAR], ["--listen", FAR, "no network key", "--new-network-key"]),
        (["--join", f"{FAR}/p2p/{PEER}"], ["--join", FAR, "no network key"]),
        ([], ["anybody could connect", "network key"]),
        (["--join", "somewhere"], ["--join", "'somewhere' is not the address of a node"]),
        (["--join", "/ip4/127.0.0.1/tcp/7400"], ["--join", "with /p2p/PEERID"]),
        (["--listen", "/ip4/127.0.0.1/tcp/70000"], ["--listen", "/tcp/PORT"]),
        (["--listen", "/ip4/0.0.0.0/tcp/0"], ["0.0.0.0", "--address"]),
        (["--name", "a/b"], ["--name", "'a/b'"]),
        (["--model-path", "nowhere"], ["--model-path", "nowhere is not a folder"]),
        (["--accelerators", "H100:x"], ["--accelerators", "'H100:x' is not NAME:COUNT"]),
        (["--allow", "me"], ["--allow", "'me' is not a peer id"]),
        (["--network-key", "nowhere"], ["nowhere", "network key"]),
    ],
)
def test_a_node_with_wrong_options(tmp_path, options, words):
    line = refusal("node", "--identity", tmp_path / "node.key", *options)
    assert all(word in line for word in words), line


def test_a_network_key_is_made_once(key):
    made = key.read_text()
    assert len(bytes.fromhex(made.strip())) == 32 and key.stat().st_mode & 0o777 == 0o600
    assert str(key) in refusal("node", "--new-network-key", key)
    assert key.read_text() == made


def test_options_of_nodes_are_for_the_launcher_of_nodes(model_folder, tmp_path, key):
    path = tmp_path / "placement.json"
    fleet_placement(model_folder).save(path)
    for option, value in [("--join", FAR), ("--network-key", key), ("--allow", PEER), ("--identity", key)]:
        line = refusal("launch", path, "--model-path", model_folder, option, value)
        assert option in line and "--launcher p2p" in line
    line = refusal("launch", path, "--model-path", model_folder, "--launcher", "p2p", "--join", FAR)
    assert "--join" in line


def member(folder, name, key, role="worker"):
    """A member that listens on loopback."""
    return Membership(identity=folder / f"{name}.key", network_key=key).member(name, role)


def test_a_node_that_does_not_come_is_named(model_folder, tmp_path, key):
    asyncio.run(_launch_without_nodes(model_folder, tmp_path, key))


async def _launch_without_nodes(model_folder, tmp_path, key):
    placement = fleet_placement(model_folder)
    launcher = P2pLauncher(Membership(tmp_path / "head.key", network_key=key), join_timeout_s=0.5)
    lines = []
    with pytest.raises(InputError, match=r"left, right did not join .*hexgen2 node --name left"):
        await launcher.start(configurations(placement, model_folder, "bfloat16"), lines.append)
    assert lines == ["waiting for nodes: left, right"]
    await launcher.stop()


def test_a_name_stays_with_the_peer_that_had_it_first(tmp_path, key):
    """Another member with a node's name does not replace it, even after the node is gone."""
    asyncio.run(_claim_a_name(tmp_path, key))


async def _claim_a_name(tmp_path, key):
    head = member(tmp_path, "head", key, "head")
    nodes = {number: member(tmp_path, f"peer-{number}", key) for number in (1, 2)}

    async def welcome(channel):
        message = Welcome(protocol=AGENT_PROTOCOL, node="left", address="", model_path="", cores=())
        channel.send(encode(message))
        await channel.receive()

    for node in nodes.values():
        node.peers.serve(NODE_SERVICE, welcome)
        await node.start()
    await head.start()
    first = Roster(head.peers, nodes[1].peers.addresses, lambda _: None)
    try:
        first.start()
        async with asyncio.timeout(60):
            await first.wait(["left"])
            assert first.nodes["left"].peer_id == nodes[1].peers.peer_id
            await nodes[1].stop()
            while not first.missing(["left"]):
                await asyncio.sleep(0.05)
            await head.peers.open(nodes[2].peers.addresses[0], NODE_SERVICE)
            await asyncio.sleep(1.5)
            assert nodes[2].peers.peer_id in head.peers.connected
            assert first.missing(["left"]) == ["left"]
    finally:
        await first.stop()
        for each in (head, *nodes.values()):
            await each.stop()


def test_a_digest_is_that_of_the_model_wherever_it_lies(model_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    digest = checkpoint_digest(model_folder)
    assert checkpoint_digest(copy) == digest
    for name in ("config.json", "tokenizer.json"):
        whole = (copy / name).read_text()
        (copy / name).write_text(json.dumps(json.loads(whole) | {"another": 1}))
        assert checkpoint_digest(copy) != digest
        (copy / name).write_text(whole)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert checkpoint_digest(copy) != digest
    weights.write_bytes(whole.replace(b'"F32"', b'"I32"', 1))
    assert checkpoint_digest(copy) != digest
    weights.write_bytes(whole)
    assert checkpoint_digest(copy) == digest
    with pytest.raises(InputError, match="nowhere"):
        checkpoint_digest(tmp_path / "nowhere")

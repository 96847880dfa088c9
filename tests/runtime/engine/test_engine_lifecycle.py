"""Faults around an engine stay where they occur."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
from checkpoints import LAYERS, VOCAB, greedy, write_gemma3, write_llama
from engine_harness import TIMEOUT_S, Cluster, Shape
from stage_shapes import replica_cells

from runtime.frames import MAX_FRAME_BYTES
from runtime.protocol.between_workers import NONCE_BYTES, Hello
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import Failed
from runtime.protocol.handshake import Credentials, connect
from runtime.protocol.message import PROTOCOL_VERSION, Sampling
from runtime.protocol.to_workers import Connect, Decode, WindowedLayers

ONE: Shape = [(1, 0, LAYERS)]
SPLIT: Shape = [(2, 0, 2), (1, 2, LAYERS)]
PROMPT = [5, 9, 200, 31, 8, 77, 120]
BUDGET = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("lifecycle") / "llama")


@pytest.fixture(scope="module")
def answer(folder: Path) -> list[int]:
    return greedy(folder, [PROMPT], 32)[0]


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder, {"p": SPLIT, "d": SPLIT, "c": ONE}, kv_budget_tokens=BUDGET) as running:
        yield running


def serves(cluster: Cluster, name: str, prefill: str, decode: str, answer: list[int]) -> None:
    cluster.submit(name, PROMPT, Sampling(max_tokens=32, ignore_eos=True), prefill, decode)
    assert cluster.finish(name).tokens == answer


def long_request(cluster: Cluster, name: str, prefill: str, decode: str, tokens: int = 300) -> None:
    """A request that still runs when a test cancels it."""
    cluster.submit(name, PROMPT, Sampling(max_tokens=tokens, ignore_eos=True), prefill, decode)


@pytest.mark.parametrize("prefill", ["p", "d"])
def test_cancel_while_decoding_frees_the_room(cluster: Cluster, answer: list[int], prefill: str) -> None:
    name = f"cancelled {prefill}"
    long_request(cluster, name, prefill, "d", tokens=BUDGET - len(PROMPT))
    cluster.wait(name, lambda o: len(o.tokens) >= 3)
    cluster.cancel(name, "d")
    outcome = cluster.wait(name, lambda o: "d" in o.released)
    assert outcome.finish_reason == ""
    assert len(outcome.tokens) < BUDGET - len(PROMPT)
    serves(cluster, f"after {name}", "p", "d", answer)


def test_no_room_is_an_answer_not_an_error(cluster: Cluster, answer: list[int]) -> None:
    long_request(cluster, "big", "p", "d", tokens=BUDGET + 1)
    assert cluster.wait("big", lambda o: o.reserved is not None).reserved is False
    serves(cluster, "after big", "p", "d", answer)


def test_cancel_before_the_kv_cache_arrives(cluster: Cluster, answer: list[int]) -> None:
    for number in range(20):
        name = f"early {number}"
        long_request(cluster, name, "p", "d", tokens=32)
        cluster.wait(name, lambda o: o.reserved is not None)
        cluster.cancel(name, "d")
        cluster.wait(name, lambda o: o.released == {"p", "d"})
    serves(cluster, "after early", "p", "d", answer)


def test_a_prompt_that_never_fits_fails_alone(cluster: Cluster, answer: list[int]) -> None:
    for name, prompt in (("too long", [7] * (BUDGET + 1)), ("no token", [VOCAB]), ("empty", [])):
        cluster.submit(name, prompt, Sampling(max_tokens=1), "c", "c")
        outcome = cluster.wait(name, lambda o: o.released == {"c"})
        assert len(outcome.failures) == 1 and not outcome.tokens
    serves(cluster, "after too long", "c", "c", answer)


def test_a_target_that_nobody_knows_fails_the_request(cluster: Cluster) -> None:
    cluster.stages["ghost"] = cluster.stages["d"]
    cluster.submit("to a ghost", PROMPT, Sampling(max_tokens=9), "p", "ghost")
    outcome = cluster.wait("to a ghost", lambda o: "p" in o.released)
    assert "ghost" in outcome.failures[0].text
    cluster.cancel("to a ghost", "d")
    del cluster.stages["ghost"]


@pytest.mark.parametrize("purpose", ["kv", "control"])
def test_who_does_not_know_the_secret_is_refused(cluster: Cluster, answer: list[int], purpose: str) -> None:
    for worker in ("p/0", "p/2", "d/0"):
        with pytest.raises(ConnectionError):
            credentials = Credentials("p/1", purpose, "wrong")
            connect(("127.0.0.1", cluster.ports[worker]), credentials, TIMEOUT_S)
    serves(cluster, f"after {purpose}", "p", "d", answer)


def test_another_protocol_is_refused(cluster: Cluster) -> None:
    hello = Hello(protocol=PROTOCOL_VERSION - 1, worker="p/1", purpose="kv", nonce=bytes(NONCE_BYTES))
    stranger = Connection(socket.create_connection(("127.0.0.1", cluster.ports["d/0"]), TIMEOUT_S))
    stranger.send(hello)
    assert stranger.receive() is None
    stranger.close()


def test_garbage_is_refused_and_silence_costs_nobody(cluster: Cluster, answer: list[int]) -> None:
    noise = [b"\xff\xff\xff\x7f", (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), b"\x03\x00\x00\x00abc"]
    for data in noise:
        stranger = Connection(socket.create_connection(("127.0.0.1", cluster.ports["d/0"]), TIMEOUT_S))
        stranger.stream.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.receive() is None
        stranger.close()
    silent = [socket.create_connection(("127.0.0.1", cluster.ports["d/0"])) for _ in range(5)]
    serves(cluster, "beside silence", "p", "d", answer)
    for stream in silent:
        stream.close()


def in_groups(folder: Path, windowed: bool) -> tuple[Path, dict[str, object]]:
    """A model and settings of its workers: KV caches move in one group of layers, or in two."""
    if not windowed:
        return folder, {}
    apart = WindowedLayers(layers=(0, 1, 3, 4), window=9, kv_budget_tokens=BUDGET)
    return write_gemma3(folder.parent / "gemma3"), {"windowed": apart}


@pytest.mark.parametrize("windowed", [False, True])
def test_a_lost_decode_replica_fails_only_its_requests(folder: Path, windowed: bool) -> None:
    """Each once, however many workers send its KV cache, and in however many groups of layers."""
    folder, settings = in_groups(folder, windowed)
    answer = greedy(folder, [PROMPT], 32)[0]
    with Cluster(folder, {"p": SPLIT, "d": ONE, "e": ONE}, **settings) as cluster:
        serves(cluster, "before", "p", "d", answer)
        rule = Sampling(max_tokens=32, ignore_eos=True)
        cluster.submit("to the dead", PROMPT, rule, "p", "d", hold=True)
        cluster.wait("to the dead", lambda o: o.reserved is True)
        cluster.lose("d/0")
        cluster.prefill("to the dead")
        cluster.submit("beside", PROMPT, rule, "p", "e")
        outcome = cluster.wait("to the dead", lambda o: o.released == {"p"})
        assert cluster.finish("beside").tokens == answer
        serves(cluster, "after", "p", "e", answer)
        assert len(outcome.failures) == 1


def test_a_new_replica_takes_the_place_of_a_lost_one(folder: Path, answer: list[int]) -> None:
    with Cluster(folder, {"p": SPLIT, "d": ONE}) as cluster:
        serves(cluster, "before", "p", "d", answer)
        cluster.lose("d/0")
        cluster.start({"d": ONE, "e": SPLIT})
        serves(cluster, "moved", "p", "d", answer)
        serves(cluster, "new", "p", "e", answer)
        serves(cluster, "back", "d", "e", answer)


@pytest.mark.parametrize("windowed", [False, True])
def test_a_follower_that_has_lost_sight_of_the_target_fails_the_request(folder: Path, windowed: bool) -> None:
    folder, settings = in_groups(folder, windowed)
    with Cluster(folder, {"p": SPLIT, "d": ONE}, **settings) as cluster:
        cluster.controls["p/1"].send(Connect(peers={}, replicas={}, store_port=0))
        time.sleep(0.2)
        cluster.submit("blind", PROMPT, Sampling(max_tokens=9), "p", "d")
        outcome = cluster.wait("blind", lambda o: "p" in o.released)
        (failure,) = outcome.failures
        assert "can't go to replica d" in failure.text
        cluster.connect()
        time.sleep(0.2)
        cluster.submit("seeing", PROMPT, Sampling(max_tokens=9, ignore_eos=True), "p", "d")
        assert len(cluster.finish("seeing").tokens) == 9


def test_decode_beyond_its_room_fails_alone(cluster: Cluster, answer: list[int]) -> None:
    for name, token, limit in (("outgrows", 5, BUDGET + 1), ("no such token", VOCAB, 4)):
        rule = Sampling(max_tokens=20)
        cluster.submit(name, PROMPT, rule, "p", "d", hold=True)
        cluster.wait(name, lambda o: o.reserved is True)
        cluster.send(
            "d", Decode(request_id=name, last_token=token, index=1, sampling=Sampling(max_tokens=limit))
        )
        assert len(cluster.wait(name, lambda o: o.released == {"d"}).failures) == 1
    serves(cluster, "after outgrowth", "p", "d", answer)


def test_a_lost_prefill_replica_leaves_the_decode_replica_alone(folder: Path, answer: list[int]) -> None:
    with Cluster(folder, {"p": ONE, "q": ONE, "d": SPLIT}) as cluster:
        long_request(cluster, "running", "p", "d")
        cluster.wait("running", lambda o: len(o.tokens) > 2)
        cluster.lose("p/0")
        assert len(cluster.wait("running", lambda o: bool(o.finish_reason)).tokens) == 300
        serves(cluster, "after", "q", "d", answer)


def test_a_lost_follower_fails_its_replica(folder: Path) -> None:
    with Cluster(folder, {"c": SPLIT}) as cluster:
        long_request(cluster, "running", "c", "c", tokens=2000)
        cluster.wait("running", lambda o: len(o.tokens) > 2)
        cluster.lose("c/1")
        failed = cluster.failed.get(timeout=TIMEOUT_S)
        assert (failed.worker, failed.kind) == ("c/0", "fault")
        for worker in ("c/0", "c/2"):
            cluster.processes[worker].join(10)
        assert cluster.lose("c/0", "c/2") == [1, 1]


def test_workers_end_with_their_parent(folder: Path) -> None:
    with Cluster(folder, {"c": SPLIT}) as cluster:
        long_request(cluster, "running", "c", "c", tokens=2000)
        cluster.wait("running", lambda o: len(o.tokens) > 2)
        for control in cluster.controls.values():
            control.close()
        for process in cluster.processes.values():
            process.join(3)
        assert cluster.lose(*cluster.processes) == [1, 1, 1]


def damage(folder: Path, copy: Path, how: str) -> Path:
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    weights, config = copy / "model.safetensors", copy / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "missing":
        weights.unlink()
    elif how == "misshapen":
        config.write_text(config.read_text().replace('"intermediate_size": 128', '"intermediate_size": 130'))
    elif how == "unknown":
        config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "lama"'))
    elif how == "deeper":
        config.write_text(config.read_text().replace('"num_hidden_layers": 5', '"num_hidden_layers": 6'))
    return copy


@pytest.mark.parametrize("how", ["truncated", "missing", "misshapen", "unknown", "deeper"])
def test_a_bad_checkpoint_is_the_users_error(folder: Path, tmp_path: Path, how: str) -> None:
    copy = damage(folder, tmp_path / how, how)
    cluster = Cluster(copy, {})
    try:
        cluster.spawn({"c": [(2, 0, LAYERS)]})
        cluster.connect()
        for control in cluster.controls.values():
            message = control.receive()
            assert isinstance(message, Failed), message
            assert message.kind == "input", message
            assert str(copy) in message.text and "\n" not in message.text and "; " in message.text
        for process in cluster.processes.values():
            process.join(10)
            assert process.exitcode == 1
    finally:
        cluster.kill()


def test_replicated_heads_travel_once_to_each_holder(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "few heads", kv_heads=2)
    reference = greedy(folder, [PROMPT], 32)[0]
    wide: Shape = [(4, 0, LAYERS)]
    widening: Shape = [(1, 0, 1), (2, 1, 3), (4, 3, LAYERS)]
    with Cluster(folder, {"w": wide, "g": widening, "s": SPLIT}) as cluster:
        replicas = {"w": LAYERS * 4, "g": 1 * 2 + 2 * 2 + 2 * 4, "s": LAYERS * 2}
        for prefill, decode in permutations(replicas, 2):
            name = f"{prefill}>{decode}"
            serves(cluster, name, prefill, decode, reference)
            cells = replica_cells(cluster.stages[decode], 2)
            assert cells == replicas[decode]
            assert cluster.outcomes[name].moved.bytes_received == cells * 2 * 8 * 4 * len(PROMPT)


def test_shutdown_before_the_workers_are_connected(folder: Path) -> None:
    cluster = Cluster(folder, {})
    cluster.spawn({"c": SPLIT})
    cluster.stop()


def test_shutdown_under_load(folder: Path) -> None:
    with Cluster(folder, {"p": SPLIT, "d": SPLIT}) as cluster:
        for number in range(8):
            long_request(cluster, f"running {number}", "p", "d")
        cluster.wait("running 0", lambda o: len(o.tokens) > 2)


def test_no_child_is_left(cluster: Cluster) -> None:
    mine = {process.pid for process in cluster.processes.values()}
    assert {child.pid for child in multiprocessing.active_children()} == mine

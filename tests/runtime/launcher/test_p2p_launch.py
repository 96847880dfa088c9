"""A placement on two nodes and a head: processes that join, freeze, die and come back."""

import json
import shutil
import signal

import httpx
import psutil
import pytest
from instructions import kernels, needs_avx512
from p2p_fleet import LONG, TOKENS, Head, Node, fleet_placement, stream_through, until, workers
from served import SECONDS, alive, gauge, until_idle


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory):
    """A folder with a placement on two nodes, and these nodes."""
    work = tmp_path_factory.mktemp("fleet")
    fleet_placement(model_folder).save(work / "placement.json")
    nodes = {"left": Node("left", work, model_folder, [])}
    try:
        limited = ("--cpu-instructions", "avx2")
        nodes["right"] = Node("right", work, model_folder, [nodes["left"]], options=limited)
        yield work, nodes
    finally:
        for node in nodes.values():
            node.close()


@pytest.fixture(scope="module")
def head(fleet, model_folder):
    work, nodes = fleet
    head = Head(work, work / "placement.json", model_folder, nodes["left"], "--restarts", "9")
    try:
        yield head.until_serving()
    finally:
        head.close()


@pytest.fixture(scope="module")
def http(head):
    with httpx.Client(base_url=head.url, timeout=SECONDS) as http:
        yield http


def states(http):
    return http.get("/health").json()["replicas"]


def all_up(http):
    return set(states(http).values()) == {"up"}


def lost(http):
    return {name for name, state in states(http).items() if state == "lost"}


def test_another_checkpoint_than_the_nodes_is_refused_in_one_line(fleet, model_folder, tmp_path):
    work, nodes = fleet
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    head = Head(work, work / "placement.json", other, nodes["left"])
    try:
        assert head.process.wait(SECONDS) == 2, head.log.read_text()
        line = head.log.read_text().splitlines()[-1]
        assert line.startswith("hexgen2: node ") and "digest" in line and "--model-path" in line, line
        assert not any(workers(node) for node in nodes.values())
    finally:
        head.close()


def test_tokens_are_those_of_the_model_wherever_they_are_made(fleet, http, reference):
    expected = reference.text("the", TOKENS)
    routes = set()
    for _ in range(4):
        answer = http.post("/v1/completions", json=LONG)
        assert answer.json()["choices"][0]["text"] == expected
        routes.add((answer.headers["x-hexgen2-prefill-replica"], answer.headers["x-hexgen2-decode-replica"]))
    assert {prefill for prefill, _ in routes} == {"prefill-left", "prefill-right"}
    assert {decode for _, decode in routes} == {"decode-left", "decode-right"}
    assert gauge(http, "hexgen2_route_kv_bytes_total") > 0
    assert {peer["name"] for peer in http.get("/peers").json()["peers"]} == set(fleet[1])
    nodes = {node["name"]: node for node in http.get("/nodes").json()["nodes"]}
    assert {name: (node["role"], node["state"]) for name, node in nodes.items()} == {
        "head": ("head", "ready"),
        "left": ("worker", "ready"),
        "right": ("worker", "ready"),
    }
    assert all(node["hardware"][0]["memory_bytes"] > 0 for name, node in nodes.items() if name != "head")


@needs_avx512
def test_a_node_limits_the_instructions_of_its_workers(fleet, http):
    _, nodes = fleet
    found = {
        name: {kernel for each in workers(node) for kernel in kernels(each)} for name, node in nodes.items()
    }
    assert found == {"left": {"avx512"}, "right": {"avx2"}}


def test_a_node_is_killed_and_comes_back(fleet, head, http, reference):
    """Streams continue elsewhere; the node's workers end with it, and its replicas return with it."""
    _, nodes = fleet
    victim = nodes["left"]
    family = victim.family()
    texts = stream_through(http, lambda: victim.process.send_signal(signal.SIGKILL))
    assert texts == [reference.text("the", TOKENS)] * 6
    until(lambda: not alive(family), victim)
    assert victim.process.wait() == -signal.SIGKILL
    until(lambda: lost(http) == {"prefill-left", "decode-left"}, head)
    nodes["left"] = victim.again()
    until(lambda: all_up(http), head, nodes["left"])
    until_idle(http)
    assert stream_through(http, lambda: None) == [reference.text("the", TOKENS)] * 6


def test_a_node_freezes_and_thaws(fleet, head, http, reference):
    _, nodes = fleet
    before = workers(nodes["right"])
    frozen = psutil.Process(nodes["right"].process.pid)
    texts = stream_through(http, frozen.suspend)
    assert texts == [reference.text("the", TOKENS)] * 6
    until(lambda: lost(http) == {"prefill-right", "decode-right"}, head)
    frozen.resume()
    until(lambda: all_up(http), head, nodes["right"])
    until(lambda: not alive(before), nodes["right"])
    until_idle(http)
    assert len(workers(nodes["right"])) == 2


def test_without_their_head_nodes_end_its_workers_and_serve_the_next(fleet, head, http, model_folder):
    work, nodes = fleet
    before = [each for node in nodes.values() for each in workers(node)]
    assert len(before) == 4
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
        head.process.kill()
        until(lambda: not alive(before), *nodes.values())
    second = Head(work, work / "placement.json", model_folder, nodes["left"])
    try:
        second.until_serving()
        assert httpx.post(second.url + "/v1/completions", json=LONG, timeout=SECONDS).status_code == 200
        assert second.interrupt() == 0
        until(lambda: not any(workers(node) for node in nodes.values()), *nodes.values())
    finally:
        second.close()
    families = [each for node in nodes.values() for each in node.family()]
    assert [node.interrupt() for node in nodes.values()] == [0, 0]
    assert alive(families) == []

"""A node is gone for good: the rest serves a new placement without it, and another one once it is back."""

import httpx
import pytest
from p2p_fleet import LONG, Head, Node, network_key, stream_through, until, workers
from served import KEY, SECONDS, alive, gauge, make_placement, small, until_idle

from cluster_specs.schema import NodeSpec
from hexgen2.checks import verify
from hexgen2.placement import Placement, Route, Stage

TOKENS = 120
NODES = ("left", "middle", "right")
SHAPES = {
    "prefill-0": ["left/0"],
    "prefill-1": ["middle/0"],
    "decode-0": ["left/1", "right/0"],  # two stages, on a node that is lost and one that stays
    "decode-1": ["middle/1"],
    "decode-2": ["right/1"],
}


def three_nodes(folder):
    """Five replicas on three nodes of two workers; one replica has a stage on each of two nodes."""
    placement = small(make_placement(folder))
    cuts = {1: [(0, 4)], 2: [(0, 2), (2, 4)]}
    replicas = [
        placement.replicas[0].model_copy(
            update={
                "id": name,
                "role": name.partition("-")[0],
                "stages": [
                    Stage(gpus=[gpu], layers=layers)
                    for gpu, layers in zip(gpus, cuts[len(gpus)], strict=True)
                ],
                "utilisation": 0.5,
            }
        )
        for name, gpus in SHAPES.items()
    ]
    pairs = [("prefill-0", "decode-0", 1), ("prefill-0", "decode-1", 1), ("prefill-1", "decode-1", 1)]
    pairs += [("prefill-1", "decode-0", 1), ("prefill-1", "decode-2", 2)]
    bytes_each = placement.routes[0].kv_bytes_per_req
    routes = [
        Route(from_=p, to=d, flow_req_s=flow, capacity_req_s=4.0, kv_bytes_per_req=bytes_each)
        for p, d, flow in pairs
    ]
    used = {name: sum(flow for *ends, flow in pairs if name in ends) / 4 for name in SHAPES}
    replicas = [each.model_copy(update={"utilisation": used[each.id]}) for each in replicas]
    nodes = [NodeSpec(name=name, accelerators="Core:2", interconnect="shared-memory") for name in NODES]
    cluster = placement.cluster.model_copy(update={"name": "three-nodes", "nodes": nodes})
    served = sum(flow for *_, flow in pairs)
    throughput = placement.throughput.model_copy(update={"req_s": served, "output_tok_s": served * 16.0})
    changed = {"cluster": cluster, "replicas": replicas, "routes": routes, "throughput": throughput}
    bound = placement.bound.model_copy(update={"req_s": float(served)})
    return placement.model_copy(update=changed | {"bound": bound})


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory):
    work = tmp_path_factory.mktemp("three")
    placement = three_nodes(model_folder)
    verify(placement)
    placement.save(work / "placement.json")
    network_key(work)
    first = Node("left", work, model_folder, [])
    nodes = {"left": first} | {name: Node(name, work, model_folder, [first]) for name in NODES[1:]}
    options = ["--restarts", "9", "--replan", "--replan-after-s", "1", "--api-key", KEY]
    head = Head(work, work / "placement.json", model_folder, nodes["middle"], *options)
    try:
        yield nodes, head.until_serving()
    finally:
        for each in (head, *nodes.values()):
            each.close()


def live(http):
    return Placement.model_validate_json(http.get("/placement").text)


def used(placement):
    return {gpu for replica in placement.replicas for gpu in replica.gpus}


def answer(http):
    completion = http.post("/v1/completions", json=LONG | {"max_tokens": TOKENS})
    assert completion.status_code == 200, completion.text
    return completion.json()["choices"][0]["text"]


def stages(placement):
    """The stages with which the workers of each replica were started, by replica."""
    return {each.id: (each.role, each.max_batch, each.stages) for each in placement.replicas}


def test_without_a_node_that_is_gone_and_with_it_once_it_is_back(fleet, reference):
    nodes, head = fleet
    expected = reference.text("the", TOKENS)
    with httpx.Client(base_url=head.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS) as http:

        def replans():
            return gauge(http, "hexgen2_replans_total")

        def all_up():
            return http.get("/health").status_code == 200

        def as_many_as_planned():
            found = {name: len(workers(nodes[name])) for name in NODES if nodes[name].process.poll() is None}
            planned = used(live(http))
            return found == {name: sum(gpu.startswith(name + "/") for gpu in planned) for name in found}

        def pids():
            return {each.name(): each.pid for node in nodes.values() for each in workers(node)}

        before = workers(nodes["left"])
        assert stream_through(http, nodes["left"].process.kill, TOKENS) == [expected] * 6
        head.wait_for(r"replica decode-0 waits for left/1")
        until(lambda: replans() >= 1, head)
        head.wait_for(r"re-planning without left/0, left/1\n")
        assert not alive(before)
        until(all_up, head)
        placement = live(http)
        verify(placement)
        assert set(placement.lost) == {"left/0", "left/1"}
        assert "right/0" in used(placement)  # its replica was lost, but not this GPU
        assert [answer(http) for _ in range(4)] == [expected] * 4
        until(as_many_as_planned, head, *nodes.values())

        # The node comes back, but nothing starts there until another placement is requested.
        assert http.post("/replan").status_code == 409
        nodes["left"] = nodes["left"].again()
        count = head.log.read_text().count("node left joined")
        until(lambda: head.log.read_text().count("node left joined") > count, head)
        assert answer(http) == expected
        assert live(http).lost == placement.lost and not workers(nodes["left"])
        assert replans() == 1

        def ask():
            assert http.post("/replan").status_code == 202

        shapes, running = stages(placement), pids()
        assert stream_through(http, ask, TOKENS) == [expected] * 6
        until(lambda: replans() == 2, head)
        head.wait_for(r"re-planning with left/0, left/1\n")
        until(all_up, head)
        placement = live(http)
        verify(placement)
        assert not placement.lost and {"left/0", "left/1"} <= used(placement)
        assert [answer(http) for _ in range(4)] == [expected] * 4
        until(as_many_as_planned, head, *nodes.values())
        stay = [each for each in placement.replicas if shapes.get(each.id) == stages(placement)[each.id]]
        now = pids()
        assert stay and all(now[gpu] == running[gpu] for each in stay for gpu in each.gpus)
        until_idle(http)
    families = [each for node in nodes.values() for each in node.family()]
    assert head.interrupt() == 0
    assert [node.interrupt() for node in nodes.values()] == [0, 0, 0]
    assert alive(families) == []

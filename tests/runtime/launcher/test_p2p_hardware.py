"""The hardware that a node announces, how its GPUs are numbered, and that a head refuses missing GPUs."""

from __future__ import annotations

import pytest
from p2p_fleet import Head, Node, fleet_placement
from served import SECONDS

from cost_model.errors import InputError
from hexgen2.placement import Stage
from runtime.launcher.configure import configurations
from runtime.launcher.nodes.agent_messages import AGENT_PROTOCOL, Welcome
from runtime.launcher.nodes.hardware import Gpu, as_declared, gpus_in, hardware_of, visible
from runtime.launcher.nodes.node_configuration import check_hardware, on_node
from runtime.p2p.membership.record import Device

REPORT = """GPU-aaaa1111-0, NVIDIA H100 80GB HBM3, 81559
GPU-aaaa2222-0, NVIDIA H100 80GB HBM3, 81559
GPU-bbbb3333-0, NVIDIA A100-SXM4-40GB, 40960
"""
H100 = Device("NVIDIA H100 80GB HBM3", 81559 * 2**20)
A100 = Device("NVIDIA A100-SXM4-40GB", 40 * 2**30)


def test_gpus_are_read_from_the_report_of_the_driver():
    assert gpus_in(REPORT) == (
        Gpu("GPU-aaaa1111-0", H100),
        Gpu("GPU-aaaa2222-0", H100),
        Gpu("GPU-bbbb3333-0", A100),
    )
    assert gpus_in("") == ()
    for report in ("No devices were found\n", "GPU-1, H100\n", "GPU-1, H100, much\n"):
        with pytest.raises(ValueError):
            gpus_in(report)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, (H100, H100, A100)),
        ("2,0", (A100, H100)),
        (" 1 , 2 ", (H100, A100)),
        ("GPU-bbbb,GPU-aaaa1", (A100, H100)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (H100,)),
        ("0,7,1", (H100,)),
        ("GPU-aaaa", ()),
        ("GPU-cccc,0", ()),
        ("0,0", ()),
        ("0,GPU-aaaa1", ()),
        ("none", ()),
        ("MIG-12ab,MIG-34cd", (Device("MIG", 0),) * 2),
    ],
)
def test_gpus_are_those_that_cuda_shows_in_its_order(variable, expected):
    assert visible(gpus_in(REPORT), variable) == expected


def test_without_gpus_a_node_has_a_cpu():
    ((cpu,), gpus) = hardware_of(()), hardware_of([H100])
    assert cpu.name == "CPU" and cpu.memory_bytes > 0 and gpus == (H100,)


def test_declared_gpus_are_named_as_the_catalogue_does():
    assert as_declared("h100:2", ()) == (Device("H100", 80 * 2**30),) * 2
    assert as_declared("Homemade:3", ()) == (Device("Homemade", 0),) * 3
    assert as_declared("CPU:8", [H100]) == ()
    assert len(as_declared("H100:1", [H100, H100])) == 1
    with pytest.raises(InputError, match=r"--accelerators: H100:3: the driver reports 2 GPUs here .*; "):
        as_declared("H100:3", [H100, H100])


def on_gpus(folder, card, indices):
    """A placement with a prefill and a decode replica of two GPUs each, on these GPUs of node `left`."""
    placement = fleet_placement(folder)
    pairs = [indices[at : at + 2] for at in range(0, len(indices), 2)]
    layers = (0, placement.model.layers)
    replicas = [
        replica.model_copy(
            update={"stages": [Stage(gpus=[f"left/{i}" for i in pair], layers=layers)], "utilisation": 1.0}
        )
        for replica, pair in zip(placement.replicas, pairs, strict=False)
    ]
    left = placement.cluster.nodes[0].model_copy(
        update={"accelerators": f"{card}:8", "interconnect": "pcie4"}
    )
    cluster = placement.cluster.model_copy(update={"nodes": [left], "accelerators": {}})
    names = {replica.id for replica in replicas}
    routes = [route for route in placement.routes if {route.from_, route.to} <= names]
    routes = [route.model_copy(update={"flow_req_s": 4.0}) for route in routes]
    return placement.model_copy(update={"cluster": cluster, "replicas": replicas, "routes": routes})


def welcome(*gpus, **facts):
    return Welcome(
        protocol=AGENT_PROTOCOL,
        node="left",
        address="10.0.0.4",
        model_path=facts.get("model_path", ""),
        cores=facts.get("cores", (0, 1, 2, 3)),
        gpus=gpus,
    )


def test_each_node_numbers_its_gpus_from_nought_whatever_the_replica(model_folder):
    """The local launcher numbers the GPUs of `right` after those of `left`, because they share a machine."""
    placement = fleet_placement(model_folder)
    nodes = [node.model_copy(update={"accelerators": "H100:2"}) for node in placement.cluster.nodes]
    cluster = placement.cluster.model_copy(update={"nodes": nodes, "accelerators": {}})
    configured = configurations(placement.model_copy(update={"cluster": cluster}), model_folder, "bfloat16")
    assert {worker: each.device for worker, each in configured.items()} == {
        "left/0": "cuda:0",
        "left/1": "cuda:1",
        "right/0": "cuda:2",
        "right/1": "cuda:3",
    }
    right = {worker: each for worker, each in configured.items() if worker.startswith("right/")}
    here = on_node(right, welcome(H100, H100, model_path="/models/m"), "/elsewhere")
    assert {worker: each.device for worker, each in here.items()} == {
        "right/0": "cuda:0",
        "right/1": "cuda:1",
    }
    assert {each.checkpoint for each in here.values()} == {"/models/m"}
    assert {each.host for each in here.values()} == {"10.0.0.4"}
    assert {each.checkpoint for each in on_node(right, welcome(), "/elsewhere").values()} == {"/elsewhere"}


def test_workers_on_cpus_share_the_cores_of_their_node(model_folder):
    configured = configurations(fleet_placement(model_folder), model_folder, "float32")
    left = {worker: each for worker, each in configured.items() if worker.startswith("left/")}
    here = on_node(left, welcome(cores=(4, 5, 6, 7)), "/m")
    assert [(each.device, each.cores, each.threads) for each in here.values()] == [
        ("cpu", (4, 5), 2),
        ("cpu", (6, 7), 2),
    ]


@pytest.mark.parametrize(
    ("card", "indices", "gpus"),
    [
        ("H100", [0, 1], [H100, H100]),
        ("H100", [0, 1, 2, 3], [H100] * 4),
        ("H100", [2, 3], [A100, A100, H100, H100]),
        ("H100", [0, 1], [Device("Some new card", 80 * 2**30)] * 2),
        ("H100", [0, 1], [Device("MIG", 0)] * 2),
        ("h100", [0, 1], [H100, H100]),
        ("A100-40GB", [0, 1], [A100, A100]),
    ],
)
def test_a_node_that_has_what_the_placement_says_is_taken(model_folder, card, indices, gpus):
    workers = [f"left/{index}" for index in indices]
    check_hardware(on_gpus(model_folder, card, indices), workers, welcome(*gpus))


@pytest.mark.parametrize(
    ("card", "indices", "gpus", "words"),
    [
        ("H100", [0, 1, 2, 3], [H100, H100], "uses 4 H100 there, up to index 3, but it has 2 GPUs"),
        ("H100", [2, 3], [H100, H100], "uses 2 H100 there, up to index 3, but it has 2 GPUs"),
        ("H100", [0, 1], [], "uses 2 H100 there, but the node has no GPU"),
        (
            "H100",
            [0, 1],
            [H100, A100],
            "GPU 1 is H100 in the placement, but the node has NVIDIA A100-SXM4-40GB",
        ),
        (
            "A100-80GB",
            [0, 1],
            [A100, A100],
            "GPU 0 is A100-80GB in the placement, but the node has NVIDIA A100-SXM4-40GB",
        ),
        ("H100", [0, 1], [Device("New", 8 * 2**30)] * 2, "the node has New with 8 GiB, not 80"),
    ],
)
def test_a_node_that_has_not_is_refused_in_one_line(model_folder, card, indices, gpus, words):
    workers = [f"left/{index}" for index in indices]
    with pytest.raises(InputError) as caught:
        check_hardware(on_gpus(model_folder, card, indices), workers, welcome(*gpus))
    line = str(caught.value)
    assert line.startswith("placement: node left: ") and words in line and "; " in line, line


def test_a_placement_on_cpus_runs_on_any_node(model_folder):
    placement = fleet_placement(model_folder)
    check_hardware(placement, ["left/0", "left/1"], welcome())
    check_hardware(placement, ["left/0", "left/1"], welcome(H100))


def test_a_launch_refuses_a_node_with_fewer_gpus_than_the_placement_uses(model_folder, tmp_path):
    """On the command line, with a node that announces two GPUs, and a placement that uses four."""
    on_gpus(model_folder, "H100", [0, 1, 2, 3]).save(tmp_path / "placement.json")
    node = Node("left", tmp_path, model_folder, [], options=("--accelerators", "H100:2"))
    head = None
    try:
        head = Head(tmp_path, tmp_path / "placement.json", model_folder, node)
        assert head.process.wait(3 * SECONDS) == 2, head.log.read_text()
        line = head.log.read_text().splitlines()[-1]
        assert "node left: the placement uses 4 H100 there, up to index 3, but it has 2 GPUs; " in line, line
        assert "starting" not in node.log.read_text()
    finally:
        for process in (head, node):
            if process is not None:
                process.close()

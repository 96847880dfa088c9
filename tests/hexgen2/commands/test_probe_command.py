"""`hexgen2 probe` on this machine's CPU, and with made-up figures of GPUs."""

from __future__ import annotations

import datetime

import pytest
import yaml
from commands import hexgen2, installed, refused

from cluster_specs.loader import load_cluster
from cost_model.hardware import GIB
from hexgen2.cluster import Cluster
from hexgen2.probing.figures import AllReduceFigures, DeviceFigures, Findings, LinkFigures
from hexgen2.probing.machine import topology
from hexgen2.probing.spec import cluster_yaml

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\tPXB\t0-31\t0
GPU2\tSYS\tSYS\t X \tNODE\t32-63\t1

Legend:
  PIX  = Connection traversing at most a single PCIe bridge
"""


def gpus(name: str, pair_bytes_s: float = 2e10, bus_bytes_s: float = 5e9) -> Findings:
    """Three cards with this name; an all-reduce is slower over all three than over a pair."""
    devices = [DeviceFigures(name, 80 * GIB, (6 + k) * 1e14, 2.5e12, "bfloat16") for k in range(3)]
    pairs = [LinkFigures(a, b, pair_bytes_s, 1e-5) for a, b in ((0, 1), (0, 2), (1, 2))]
    size = 16 << 20
    reduces = [AllReduceFigures(3, size, 4 / 3 * size / bus_bytes_s), AllReduceFigures(2, size, 1e-3)]
    return Findings("cuda", tuple(devices), tuple(pairs), tuple(reduces), ("NV12",))


def test_this_machine(tmp_path):
    path = tmp_path / "here.yaml"
    result = installed("probe", "--kind", "cpu", "--devices", "2", "-o", str(path))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    today = datetime.date.today().isoformat()
    assert path.read_text().startswith(f"# Measured on {today} by hexgen2 probe.\n# device 0 (CPU): ")
    cluster = Cluster.from_spec(load_cluster(str(path)))
    assert len(cluster) == 2 and cluster.types[0].kind == "cpu"
    assert 1e8 < cluster.types[0].flops_s < 1e13
    assert 1e8 < cluster.types[0].memory_bandwidth_bytes_s < 1e12
    link = cluster.link(0, 1)
    assert 1e6 < link.bandwidth_bytes_s < 1e12 and 1e-7 < link.latency_s < 1


def test_one_device_needs_no_link():
    result = installed("probe", "--kind", "cpu", "--devices", "1")
    assert result.returncode == 0, result.stderr
    (node,) = yaml.safe_load(result.stdout)["nodes"]
    assert "interconnect" not in node and node["accelerators"].endswith(":1")


def test_more_devices_than_there_are():
    assert "--devices: asks for 64 cpu devices" in refused(
        hexgen2("probe", "--kind", "cpu", "--devices", "64")
    )


def test_a_card_of_the_catalogue_keeps_its_data_sheet(tmp_path):
    path = tmp_path / "pod.yaml"
    path.write_text(cluster_yaml(gpus("NVIDIA H100 80GB HBM3"), "pod_1", "2026-01-02"))
    spec = load_cluster(str(path))
    assert spec.nodes[0].accelerators == "H100:3" and "2026-01-02" in spec.description
    cluster = Cluster.from_spec(spec)
    assert cluster.types[0].flops_s == pytest.approx(989.4e12)
    assert cluster.link(0, 1).bandwidth_bytes_s == pytest.approx(5e9), "the all-reduce's, which is less"
    assert cluster.link(0, 1).latency_s == pytest.approx(1e-5)
    found = hexgen2("search", "--cluster", str(path), "--model", "opt-13b", "--isl", "512", "--osl", "64")
    assert found.returncode == 0, found.stderr


def test_an_unknown_card_gets_what_was_measured(tmp_path):
    path = tmp_path / "pod.yaml"
    path.write_text(cluster_yaml(gpus("Wonder X900", pair_bytes_s=1e9), "pod", "2026-01-02"))
    cluster = Cluster.from_spec(load_cluster(str(path)))
    (card,) = cluster.types
    assert (card.name, card.flops_s, card.memory_bytes) == ("Wonder-X900", 6e14, 80 * GIB)
    assert cluster.link(0, 1).bandwidth_bytes_s == pytest.approx(1e9), "the slowest pair's"


def test_classes_of_links_in_nvidia_smis_matrix():
    assert topology(TOPOLOGY) == ("NODE", "NV12", "PXB", "SYS")
    assert topology("") == ()

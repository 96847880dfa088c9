"""Time `hexgen2 search` on large synthetic clusters, beside Table 5 of the HexGen-2 paper.

    python -m benchmarks.search.scale [--gpus 64,128,192,256,320,1024] [--model llama-2-70b] [--runs 3]

A cluster has equally many GPUs of four types. A node has 8 H100 or 8 A100 on NVLink, or 4 L40 or 4 A6000 on
PCIe; a rack has eight nodes, with 100 Gbit/s inside a rack and 25 between racks. Measures whole processes,
start-up included. Prints median seconds, peak memory, requests/s, and the largest gap to the bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

COMMAND = str(Path(sys.executable).with_name("hexgen2"))
RACK = 8
NODES = (("H100:8", "nvlink"), ("A100-80GB:8", "nvlink"), ("L40:4", "pcie4"), ("A6000:4", "pcie4"))
PAPER_MINUTES = {64: 4.03, 128: 7.93, 192: 21.66, 256: 28.44, 320: 47.77}
"""Table 5 of HexGen-2: search minutes by number of GPUs."""


def synthetic(gpus: int) -> dict:
    """A cluster with that many GPUs (a multiple of 32): a quarter of each type."""
    nodes = []
    for accelerators, interconnect in NODES:
        size = int(accelerators.split(":")[1])
        nodes += [
            {"accelerators": accelerators, "interconnect": interconnect} for _ in range(gpus // 4 // size)
        ]
    # Round robin, so that every rack holds some of each type.
    racks = -(-len(nodes) // RACK)
    dealt = sorted((k % racks, k) for k in range(len(nodes)))
    named = [{"name": f"r{rack}-n{place}", **nodes[k]} for place, (rack, k) in enumerate(dealt)]
    rack_of = {node["name"]: rack for node, (rack, _) in zip(named, dealt, strict=True)}
    links = [
        {"from": a, "to": b, "bandwidth_gbit_s": 100, "latency_us": 20}
        for a, b in itertools.combinations(rack_of, 2)
        if rack_of[a] == rack_of[b]
    ]
    default = {"bandwidth_gbit_s": 25, "latency_us": 50}
    return {"name": f"synthetic-{gpus}", "nodes": named, "network": {"default": default, "links": links}}


def measure(cluster: Path, model: str, workload: str, runs: int) -> tuple[float, dict]:
    """Median seconds of whole processes, and the placement."""
    command = [
        COMMAND,
        "search",
        *("--cost-model", "calibrated"),
        "--cluster",
        str(cluster),
        "--model",
        model,
        "--workload",
        workload,
        "--json",
    ]
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), json.loads(done.stdout)


def main() -> None:
    """Print one line per size and workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", default="64,128,192,256,320,1024")
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--workloads", default="HPHD,LPLD")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print("GPUs\tworkload\tseconds\tpaper_s\treq_s\tbound\tgap\tkv_free_bound\tcut\tpeak_GB_so_far")
    with tempfile.TemporaryDirectory() as folder:
        for gpus in map(int, arguments.gpus.split(",")):
            cluster = Path(folder) / f"{gpus}.yaml"
            cluster.write_text(yaml.safe_dump(synthetic(gpus)))
            for workload in arguments.workloads.split(","):
                seconds, found = measure(cluster, arguments.model, workload, arguments.runs)
                paper = f"{PAPER_MINUTES[gpus] * 60:.0f}" if gpus in PAPER_MINUTES else "-"
                peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
                bound = found["bound"]
                print(
                    gpus,
                    workload,
                    f"{seconds:.2f}",
                    paper,
                    f"{found['throughput']['req_s']:.1f}",
                    f"{bound['req_s']:.1f}",
                    f"{bound['gap']:.2%}",
                    f"{bound['kv_free_req_s'] or 0:.1f}",
                    found["search"]["cut"],
                    f"{peak:.2f}",
                    sep="\t",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""`hexgen2 search` on ordinary clusters of many kinds: how late it is after its time limit, and its gap.

    python -m benchmarks.search.ordinary [--families racks,boxes] [--sizes 64,320] [--seeds 3]
           [--first-seed S] [--time-limit T] [--models A,B] [--workloads A,B] [--options "..."] [--longer N]

The families, each drawn at random by a seed:

    racks    nodes of 2, 4 and 8 GPUs of several types, in racks whose uplinks are shared
    sites    two to four data centres of such racks, 1 to 10 Gbit/s between them
    boxes    machines with 1 or 2 GPUs each over the internet; every link is different
    mostly   90 % of all nodes alike, the rest of other types
    patchy   racks where some links are slow, and some nodes hardly reach each other
    zoo      a different type of GPU in almost every node

Each row is a whole process with start-up and output: GPUs, model, workload, time limit, the seconds it took,
by how much that is over the limit, requests/s, the bound, and the gap between both. A time limit grows with
the cluster unless one is given. Prints the latest and the largest gap of each family and size. With --longer,
each case is searched again with so many times the limit: rows end with the share of those requests/s that the
limit left, and the gap that they have to the bound found then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

COMMAND = str(Path(sys.executable).with_name("hexgen2"))
GPUS = ("H100", "A100-80GB", "A100-40GB", "L40S", "L40", "A6000", "A10G", "RTX4090", "V100-32GB", "T4")
FAST = {"H100", "A100-80GB", "A100-40GB", "V100-32GB"}
DESKTOP = ("RTX4090", "RTX3090", "A6000", "L40", "A10G")
MOST_BOXES = 128
"""A cluster file with a link for every pair of more boxes would be too large."""
RACK = 8
"""Nodes of a rack."""
Nodes = list[dict[str, Any]]


def racks(rng: random.Random, gpus: int) -> dict[str, Any]:
    """Nodes of 2, 4 and 8 GPUs of three to five types, in racks of eight nodes."""
    types = rng.sample(GPUS[:8], rng.randint(3, 5))
    return _in_racks(rng, _nodes(rng, gpus, lambda: rng.choice(types)), rng.choice((100, 200)), 25)


def sites(rng: random.Random, gpus: int) -> dict[str, Any]:
    """Racks in two to four places."""
    spec = racks(rng, gpus)
    names = [node["name"] for node in spec["nodes"]]
    count = rng.randint(2, 4)
    cuts = sorted(rng.sample(range(1, len(names)), min(count, len(names)) - 1))
    parts = [names[a:b] for a, b in itertools.pairwise([0, *cuts, len(names)])]
    site_of = {name: k for k, part in enumerate(parts) for name in part}
    network = spec["network"]
    network["links"] = [link for link in network["links"] if site_of[link["from"]] == site_of[link["to"]]]
    inside = {(link["from"], link["to"]) for link in network["links"]}
    network["links"] += [
        {"from": a, "to": b, "bandwidth_gbit_s": 25, "latency_us": 50}
        for a, b in itertools.combinations(names, 2)
        if site_of[a] == site_of[b] and (a, b) not in inside
    ]
    network["default"] = {"bandwidth_gbit_s": rng.choice((1, 2, 5, 10)), "latency_us": 10_000}
    network["uplinks"] = [
        {"name": f"site-{k}", "nodes": part, "bandwidth_gbit_s": rng.choice((5, 10, 40))}
        for k, part in enumerate(parts)
    ]
    return spec


def boxes(rng: random.Random, gpus: int) -> dict[str, Any]:
    """Machines of one or two GPUs, each with an up- and downlink of its own."""
    nodes: Nodes = []
    left = gpus
    while left > 0:
        size = min(left, rng.choice((1, 1, 2)))
        left -= size
        nodes.append({"name": f"box-{len(nodes)}", "accelerators": f"{rng.choice(DESKTOP)}:{size}"})
    links = [
        {
            "from": a["name"],
            "to": b["name"],
            "bandwidth_gbit_s": round(10 ** rng.uniform(-0.7, 1.0), 3),
            "latency_us": rng.randint(500, 40_000),
        }
        for a, b in itertools.combinations(nodes, 2)
    ]
    return {"nodes": nodes, "network": {"links": links}}


def mostly(rng: random.Random, gpus: int) -> dict[str, Any]:
    """Nine of ten nodes are alike."""
    usual, *others = rng.sample(GPUS[:8], 4)
    nodes = _nodes(rng, gpus, lambda: usual if rng.random() < 0.9 else rng.choice(others), sizes=(8,))
    return _in_racks(rng, nodes, 100, 25)


def patchy(rng: random.Random, gpus: int) -> dict[str, Any]:
    """Racks with some slow links, and some pairs that hardly reach each other."""
    spec = racks(rng, gpus)
    names = [node["name"] for node in spec["nodes"]]
    network = spec["network"]
    known = {(link["from"], link["to"]) for link in network["links"]}
    for link in network["links"]:
        if rng.random() < 0.1:
            link["bandwidth_gbit_s"] = rng.choice((1, 5, 10))
    network["links"] += [
        {"from": a, "to": b, "bandwidth_gbit_s": rng.choice((0.01, 1)), "latency_us": 1000}
        for a, b in itertools.combinations(names, 2)
        if (a, b) not in known and rng.random() < 0.05
    ]
    return spec


def zoo(rng: random.Random, gpus: int) -> dict[str, Any]:
    """Ten types of GPU, in nodes of every size."""
    types = itertools.cycle(rng.sample(GPUS, len(GPUS)))
    return _in_racks(rng, _nodes(rng, gpus, lambda: next(types), sizes=(1, 2, 4, 8)), 50, 10)


FAMILIES: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    each.__name__: each for each in (racks, sites, boxes, mostly, patchy, zoo)
}


def drawn(family: str, gpus: int, seed: int) -> dict[str, Any]:
    """A cluster file of a family with so many GPUs."""
    spec = FAMILIES[family](random.Random(f"{family} {gpus} {seed}"), gpus)
    return {"name": f"{family}-{gpus}-{seed}", **spec}


def _nodes(
    rng: random.Random, gpus: int, draw: Callable[[], str], sizes: tuple[int, ...] = (2, 4, 8)
) -> Nodes:
    """Nodes with so many GPUs together."""
    nodes: Nodes = []
    left = gpus
    while left > 0:
        size, gpu = min(left, rng.choice(sizes)), draw()
        left -= size
        interconnect = "nvlink" if gpu in FAST and size > 1 else "pcie4"
        nodes.append(
            {"name": f"n{len(nodes)}", "accelerators": f"{gpu}:{size}", "interconnect": interconnect}
        )
    return nodes


def _in_racks(rng: random.Random, nodes: Nodes, inside: float, between: float) -> dict[str, Any]:
    """A network of racks, each with an uplink that its nodes share (Gbit/s)."""
    rng.shuffle(nodes)
    parts = [[node["name"] for node in nodes[k : k + RACK]] for k in range(0, len(nodes), RACK)]
    links = [
        {"from": a, "to": b, "bandwidth_gbit_s": inside, "latency_us": 20}
        for part in parts
        for a, b in itertools.combinations(part, 2)
    ]
    uplinks = [
        {"name": f"rack-{k}", "nodes": part, "bandwidth_gbit_s": 4 * between} for k, part in enumerate(parts)
    ]
    default = {"bandwidth_gbit_s": between, "latency_us": 50}
    network = {"default": default, "links": links, "uplinks": uplinks if len(parts) > 1 else []}
    return {"nodes": nodes, "network": network}


def time_limit_s(family: str, gpus: int) -> float:
    """Seconds within which the answer should be good."""
    if family == "boxes":
        return 10.0
    return next(
        (limit for most, limit in ((64, 2.0), (192, 3.0), (320, 4.0), (1024, 8.0)) if gpus <= most), 30.0
    )


def measure(cluster: Path, model: str, workload: str, limit_s: float, options: list[str]) -> dict[str, Any]:
    """Seconds of the process, and its placement; or why there is none."""
    command = [
        COMMAND,
        "search",
        "--cluster",
        str(cluster),
        "--model",
        model,
        "--workload",
        workload,
        "--json",
    ]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--time-limit", f"{limit_s:g}", *options], capture_output=True, text=True, timeout=600
    )
    took = time.perf_counter() - began
    if done.returncode:
        return {"seconds": took, "why": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(done.stdout)
    return {"seconds": took, **{key: found[key] for key in ("throughput", "bound", "search", "replicas")}}


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, int, str, str]]:
    """Family, GPUs, seed, model and workload of each row."""
    for family, size in itertools.product(options.families.split(","), map(int, options.sizes.split(","))):
        for k in range(options.seeds if family != "boxes" or size <= MOST_BOXES else 0):
            seed = options.first_seed + k
            rng = random.Random(f"case {seed}")
            model, workload = rng.choice(options.models.split(",")), rng.choice(options.workloads.split(","))
            yield family, size, seed, model, workload


def main() -> None:
    """Print a row for each case, and the worst of each family and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--sizes", default="16,64,128,320,1024", help="numbers of GPUs")
    parser.add_argument("--seeds", type=int, default=1, help="clusters of each family and size")
    parser.add_argument("--first-seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--time-limit", type=float, default=None)
    parser.add_argument("--models", default="llama-2-70b,opt-30b,llama-3-8b")
    parser.add_argument("--workloads", default="HPLD,HPHD,LPHD,LPLD,online")
    parser.add_argument("--longer", type=float, default=None, metavar="N", help="N times the time limit, too")
    parser.add_argument("--options", type=shlex.split, default=[], help="further ones of `hexgen2 search`")
    options = parser.parse_args()
    print(f"seed {options.first_seed}")
    print(
        f"{'cluster':18}{'model':>14}{'workload':>9}{'limit':>7}{'took':>7}{'late':>7}{'req/s':>10}"
        f"{'bound':>10}{'gap':>8}  replicas",
        flush=True,
    )
    worst: dict[tuple[str, int], tuple[float, float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, size, seed, model, workload in cases(options):
            spec = drawn(family, size, seed)
            path = Path(folder) / f"{spec['name']}.yaml"
            path.write_text(yaml.safe_dump(spec))
            limit_s = options.time_limit or time_limit_s(family, size)
            found = measure(path, model, workload, limit_s, options.options)
            late = max(0.0, found["seconds"] / limit_s - 1)
            head = f"{spec['name']:18}{model:>14}{workload:>9}{limit_s:>7.1f}"
            head += f"{found['seconds']:>7.2f}{late:>7.0%}"
            if "why" in found:
                print(head, *found["why"], flush=True)
                continue
            bound = found["bound"]
            roles = "".join(sorted(replica["role"][0] for replica in found["replicas"]))
            counts = "".join(f" {len(list(run))}{role}" for role, run in itertools.groupby(roles))
            req_s = found["throughput"]["req_s"]
            ends, share = "", 1.0
            if options.longer:
                more = measure(path, model, workload, limit_s * options.longer, options.options)
                share, least = req_s / more["throughput"]["req_s"], more["bound"]["req_s"]
                ends = f"  {share:.3f} of {options.longer:g} times as long, gap then {1 - req_s / least:.1%}"
            print(
                f"{head}{req_s:>10.3f}{bound['req_s']:>10.3f}{bound['gap']:>8.1%} {counts}{ends}", flush=True
            )
            known = worst.get((family, size), (0.0, 0.0, 1.0))
            worst[family, size] = max(known[0], late), max(known[1], bound["gap"]), min(known[2], share)
    for (family, size), (late, gap, share) in worst.items():
        beside = f", {share:.3f} of {options.longer:g} times as long" if options.longer else ""
        print(f"worst of {family}-{size}: {late:.0%} late, gap {gap:.1%}{beside}")


if __name__ == "__main__":
    main()

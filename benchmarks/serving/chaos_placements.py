"""The placements that chaos.py breaks, and how to launch each."""

from __future__ import annotations

import itertools
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.chaos_models import PLAIN, Model
from benchmarks.serving.fleet import CLUSTER, COMMAND
from cluster_specs.schema import InterconnectSpec
from cost_model.config import architecture_from_folder
from hexgen2.placement import Placement, Replica, Route, RouteLink, Stage
from hexgen2.replica import EngineSettings
from runtime.kv_cache.layout import transfers
from runtime.launcher.configure import stage_shapes

Shapes = dict[str, list[tuple[int, int]]]
"""Stages of each replica, as GPUs and layers."""
TORCH: Shapes = {
    "prefill-0": [(1, 4)],
    "prefill-1": [(1, 1), (1, 3)],
    "decode-0": [(2, 4)],
    "decode-1": [(1, 4)],
}
UNLIKE: Shapes = {
    "prefill-0": [(2, 4)],
    "prefill-1": [(1, 1), (1, 3)],
    "decode-0": [(1, 3), (1, 1)],
    "decode-1": [(2, 2), (1, 2)],
}
MIXED: Shapes = {
    "mixed-0": [(2, 4)],
    "mixed-1": [(1, 1), (1, 3)],
    "mixed-2": [(1, 4)],
    "prefill-0": [(1, 4)],
    "decode-0": [(1, 4)],
}
SLOW = InterconnectSpec(bandwidth_gbyte_s=0.004, latency_us=5000)
MIXED_KV_TOKENS, USABLE = 3885, 0.9
"""Room for KV caches beside the weights of a rank that has all layers, in the usable part of its memory."""


def make_emulated(work: Path) -> tuple[Placement, list[str]]:
    """The 20 GPUs of the paper's setting 1, and how to launch them."""
    path = work / "placement.json"
    search(path, "--cluster", "hexgen2-setting-1", "--model", "llama-2-70b", "--workload", "HPHD")
    return Placement.load(path), [COMMAND, "launch", str(path), "--engine", "emulated"]


def make_torch(work: Path, model: Model) -> tuple[Placement, list[str]]:
    """A small model on six workers in four replicas of three shapes."""
    return _make_pairs(work, model, TORCH)


def make_unlike(work: Path, model: Model) -> tuple[Placement, list[str]]:
    """A small model on nine workers: replicas that prefill have other shapes than those that decode."""
    return _make_pairs(work, model, UNLIKE)


def _make_pairs(work: Path, model: Model, shapes: Shapes) -> tuple[Placement, list[str]]:
    """Two prefill and two decode replicas of these shapes, with all four routes."""
    cluster, path = work / "cluster.yaml", work / "placement.json"
    cluster.write_text(CLUSTER.format(cores=4, memory_gib=1))
    _search_for(path, cluster, model)
    found = Placement.load(path)
    stages = _stages(shapes)
    count = sum(len(stage.gpus) for each in stages.values() for stage in each)
    node = found.cluster.nodes[0].model_copy(update={"accelerators": f"Core:{count}"})
    wider = found.cluster.model_copy(update={"nodes": [node]})
    replicas = [
        each.model_copy(update={"stages": stages[each.id], "max_batch": 16}) for each in found.replicas
    ]
    placement = found.model_copy(update={"cluster": wider, "replicas": replicas})
    routes = [each.model_copy(update={"links": kv_links(placement, each)}) for each in found.routes]
    placement.model_copy(update={"routes": routes}).save(path)
    return Placement.load(path), [COMMAND, "launch", str(path), "--model-path", str(model.folder)]


def make_mixed(work: Path, model: Model) -> tuple[Placement, list[str]]:
    """A small model on seven workers in five replicas, three of them mixed."""
    cluster, path = work / "cluster.yaml", work / "placement.json"
    sizes = architecture_from_folder(model.folder)
    needed = sizes.total_bytes + MIXED_KV_TOKENS * sizes.kv_bytes_per_token
    cluster.write_text(CLUSTER.format(cores=2, memory_gib=round(needed / USABLE / 2**30, 6)))
    _search_for(path, cluster, model)
    found, replicas = Placement.load(path), list[Replica]()
    rates = {str(each.role): each.capacity_req_s for each in found.replicas}
    for name, stages in _stages(MIXED).items():
        role = name.partition("-")[0]
        replicas.append(
            Replica(
                id=name,
                role=role,  # type: ignore[arg-type]
                stages=stages,
                max_batch=4,
                capacity_req_s=rates.get(role, min(rates.values())),
                utilisation=0.5,
                engine=EngineSettings(step_tokens=128, chunk_tokens=32),
                region=[(0.0, rates["decode"]), (rates["prefill"], 0.0)] if role == "mixed" else None,
            )
        )
    core = f"Core:{sum(len(each.gpus) for each in replicas)}"
    node = found.cluster.nodes[0].model_copy(update={"accelerators": core, "interconnect": SLOW})
    whole = found.cluster.model_copy(update={"nodes": [node]})
    placement = found.model_copy(update={"cluster": whole, "replicas": replicas})
    flow, routes = min(rates.values()) / (12 * len(replicas)), list[Route]()
    for a, b in itertools.product(replicas, repeat=2):
        if a.prefills_for_others and b.decodes_for_others:
            route = found.routes[0].model_copy(update={"from_": a.id, "to": b.id, "flow_req_s": flow})
            if a is b:
                routes.append(route.model_copy(update={"kv_bytes_per_req": 0.0, "links": []}))
            else:
                routes.append(route.model_copy(update={"links": kv_links(placement, route)}))
    total = flow * len(routes)
    changed = {
        "routes": routes,
        "replicas": [each.model_copy(update={"utilisation": _use(each, routes)}) for each in replicas],
        "throughput": found.throughput.model_copy(
            update={"req_s": total, "output_tok_s": total * found.workload.osl}
        ),
        "bound": found.bound.model_copy(update={"req_s": total * len(replicas)}) if found.bound else None,
    }
    placement.model_copy(update=changed).save(path)
    command = [COMMAND, "launch", str(path), "--model-path", str(model.folder), "--emulate-links"]
    return Placement.load(path), command


def _stages(shapes: Shapes) -> dict[str, list[Stage]]:
    """The stages of each replica, on one GPU after the other."""
    found, gpu = dict[str, list[Stage]](), 0
    for name, shape in shapes.items():
        found[name], layer = [], 0
        for degree, layers in shape:
            gpus = [f"box/{gpu + rank}" for rank in range(degree)]
            found[name].append(Stage(gpus=gpus, layers=(layer, layer + layers)))
            gpu, layer = gpu + degree, layer + layers
    return found


def _use(replica: Replica, routes: Sequence[Route]) -> float:
    """The share of a replica that routes use."""
    prompts = sum(each.flow_req_s for each in routes if each.from_ == replica.id)
    answers = sum(each.flow_req_s for each in routes if each.to == replica.id)
    return replica.busy(prompts, answers) if replica.region else (prompts + answers) / replica.capacity_req_s


def kv_links(placement: Placement, route: Route) -> list[RouteLink]:
    """Which pairs of devices share a route's KV cache, and how."""
    source, target = (stage_shapes(placement.replica(each)) for each in (route.from_, route.to))
    moved: Counter[tuple[str, str]] = Counter()
    for part in transfers(source, target, placement.model.kv_heads):
        moved[part.source, part.destination] += part.part.cells
    whole = route.kv_bytes_per_req / moved.total()
    links = [{"from": a, "to": b, "bytes_per_req": cells * whole} for (a, b), cells in moved.items()]
    return [RouteLink.model_validate(link) for link in links]


def _search_for(path: Path, cluster: Path, model: Model) -> None:
    kv = [] if model.kv == PLAIN else ["--kv", model.kv]
    asked = ["--cluster", str(cluster), "--model", str(model.folder), "--isl", "100", "--osl", "60"]
    search(path, *asked, *kv)


def search(path: Path, *options: str) -> None:
    asked = ["--phases", "disaggregated", *options]
    subprocess.run([COMMAND, "search", *asked, "-o", str(path)], check=True, capture_output=True)


MAKERS = {"torch": make_torch, "unlike": make_unlike, "mixed": make_mixed}
"""The fleets that serve a small model."""

"""A case as a problem: its tables as they are, and a cluster and a model for all that they do not say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cluster_specs.loader import resolve
from cluster_specs.schema import (
    LARGEST,
    SMALLEST,
    AcceleratorSpec,
    ClusterSpec,
    NetworkLink,
    NetworkSpec,
    NodeSpec,
)
from cost_model.architecture import ModelArchitecture
from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE, GIB, Accelerator
from cost_model.models import SHIPPED, find_model
from cost_model.registry import find_cost_model
from hexgen2.cluster import Cluster
from hexgen2.search.layer_ranges.case import Case, NamedCase, NodeType, plain_type
from hexgen2.search.layer_ranges.instance import Instance, Range
from hexgen2.search.layer_ranges.nodes import RangeNodes
from hexgen2.search.problem import Problem
from hexgen2.workload.classes import load_workload
from hexgen2.workload.lengths import Workload

HEAD_DIM = 128
UTILISATION = 0.5
BYTES_PER_FLOP = 0.005
"""Of a card that the catalogue lacks: how much of its peak its table for one layer shows, and bytes/s of
memory per FLOP/s (an A100's). Times rest on them, tokens/s do not."""
BLOCK_TOKENS = 16
GBIT_S = 1e9 / 8


def problem_of_case(
    named: NamedCase,
    partial: bool,
    workload: str | Path | Workload | None = None,
    isl: float | None = None,
    osl: float | None = None,
    cost_model: str | Path | None = None,
) -> Problem:
    """The problem of a case; without a workload, its requests are those of "online", as in the paper.

    Raises
    ------
    InputError : a wrong workload or cost model, or a figure beyond what a cluster may have
    """
    case = named.case
    load = load_workload(
        "online" if workload is None and (isl is None or osl is None) else workload, isl, osl
    )
    model = _model(case)
    spec = resolve(_spec(case, named.source), named.source, Path())
    costs = find_cost_model(cost_model).costs(model, load.lengths)
    return Problem(
        spec,
        Cluster.from_spec(spec),
        model,
        load,
        costs,
        links="pairwise",
        range_nodes=_nodes(case, partial, load),
    )


def _nodes(case: Case, partial: bool, load: Workload) -> RangeNodes:
    """The tables, cut at what the network cards pass."""
    names = list(case.gpu)
    tables = {name: _table(case, case.gpu[name]) for name in names}
    between, source, sink = case.bandwidths()
    instance = Instance(
        case.layers,
        tuple(names.index(type_) for type_ in case.types),
        tuple(np.array([[0.0, *tables[name]]] * 4) for name in names),
        between / case.activation_bytes,
        source / case.token_bytes,
        sink / case.token_bytes,
        partial,
    )
    blocks = [case.gpu[type_].kv_blocks16 or [] for type_ in case.types]
    tokens = load.isl + load.osl

    def most_requests(node: int, held: Range) -> int:
        count = held[1] - held[0]
        if count > len(blocks[node]):
            return 256
        return max(1, int(blocks[node][count - 1] * BLOCK_TOKENS / tokens))

    ids = tuple(f"n{v}" for v in range(case.nodes))
    return RangeNodes(instance, tuple((v,) for v in range(case.nodes)), ids, most_requests, tables)


def _table(case: Case, node: NodeType) -> list[float]:
    return [min(tok_s, node.nic_Bps / case.activation_bytes) for tok_s in node.table][: case.layers]


def _spec(case: Case, source: str) -> ClusterSpec:
    """A cluster of one device per node."""
    between, _, _ = case.bandwidths()
    latencies = case.latencies_s()
    nodes, links = [], []
    for v, type_ in enumerate(case.types):
        card = _in_range(case.gpu[type_].nic_Bps / GBIT_S, source, f"gpu.{type_}.nic_Bps")
        nodes.append(NodeSpec(name=f"n{v}", accelerators=f"{type_}:1", network_gbit_s=card))
        for u in range(v + 1, case.nodes):
            links.append(
                NetworkLink(
                    **{"from": f"n{v}", "to": f"n{u}"},
                    bandwidth_gbit_s=_in_range(float(between[v, u]) / GBIT_S, source, "links"),
                    latency_us=min(LARGEST, float(latencies[v, u]) * 1e6),
                )
            )
    assumed = [name for name in case.gpu if _known_card(name, case.gpu[name]) is None]
    return ClusterSpec(
        name=case.name,
        description=f"nodes of a case with measured tables, {case.model}",
        assumptions=[
            "tokens/s are the case's; times to first token and per token are those of data sheets",
            *(f"{name}: peak and memory bandwidth from its table for one layer" for name in assumed),
        ],
        nodes=nodes,
        network=NetworkSpec(links=links),
        accelerators={name: _card(case, name, source) for name in case.gpu},
    )


def _in_range(value: float, source: str, key: str) -> float:
    if not SMALLEST <= value <= LARGEST:
        raise InputError(
            source, key, f"gives {value:.3g}", f"use figures that give {SMALLEST:g} to {LARGEST:g}"
        )
    return value


def _known_card(name: str, node: NodeType) -> Accelerator | None:
    """The catalogue's card of a type, of several the one nearest in memory."""
    plain, count = plain_type(name)
    known = [card for card in CATALOGUE.values() if card.name == plain or card.name.startswith(f"{plain}-")]
    return min(known, key=lambda card: abs(card.memory_bytes * count - node.vram_bytes), default=None)


def _card(case: Case, name: str, source: str) -> AcceleratorSpec:
    """A node's cards as one device."""
    node, count = case.gpu[name], plain_type(name)[1]
    known = _known_card(name, node)
    if known is not None:
        peak, bandwidth = known.flops_s * count, known.memory_bandwidth_bytes_s * count
    else:
        peak = max(node.T_tokens_per_s[0], 1.0) * case.layer_param_bytes / UTILISATION
        bandwidth = peak * BYTES_PER_FLOP
    key = f"gpu.{name}"
    return AcceleratorSpec(
        memory_gib=_in_range(node.vram_bytes / GIB, source, f"{key}.vram_bytes"),
        bf16_dense_tflops=_in_range(peak / 1e12, source, f"{key}.T_tokens_per_s"),
        memory_bandwidth_gbyte_s=_in_range(bandwidth / 1e9, source, f"{key}.T_tokens_per_s"),
        price_per_gpu_hour=0.0,
    )


def _model(case: Case) -> ModelArchitecture:
    """The shipped Llama of these sizes, or one of them by its figures."""
    hidden = max(1, round(case.activation_bytes / 2))
    for name in SHIPPED:
        known = find_model(name)
        if known.family == "llama" and (known.layers, known.hidden) == (case.layers, hidden):
            return known
    heads = hidden // HEAD_DIM if hidden % HEAD_DIM == 0 else 1
    params = case.layer_param_bytes / 2
    return ModelArchitecture(
        name=case.model,
        family="llama",
        layers=case.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=min(10**8, max(1, round((params - 4 * hidden**2) / (3 * hidden)))),
        vocab=32000,
        max_position=4096,
    )

"""The `vllm serve` commands that run a placement, and the checks for what vLLM cannot run.

Everything about vLLM was read in the source of version 0.32 and tried with it on CPUs. A replica has one
tensor-parallel degree, VLLM_PP_LAYER_PARTITION divides its pipeline, and KV caches are moved by
NixlConnector, which supports one pipeline stage on either side. Attention groups are data-parallel ranks of
one server (read, but not tried): of a mixture of experts they share every layer's experts, of other models
they would be whole copies. Each rank takes devices of its own in order, and the next port of the side
channel. Expert parallelism is over all ranks, or off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_specs.loader import resolve
from cost_model.architecture import WeightType
from cost_model.base import Phase
from cost_model.dtypes import SIXTEEN_BIT
from cost_model.errors import InputError
from hexgen2.cluster import Cluster
from hexgen2.devices import gpus_by_node, is_cpu, node_of, split
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.kv_capacity import kv_capacity_tokens

API_PORT, SIDE_CHANNEL_PORT, MASTER_PORT = 8100, 5600, 29500
"""The ports of the first replica; further replicas use the following ones."""
MOST_MEMORY = 0.95
"""vLLM needs the rest for graphs and workspace, even if the cost model counts on all memory."""
KV_LEASE_S = 300
"""Seconds for which a prefill replica keeps a KV cache that is not fetched. The decode replica renews the
lease every sixth of this, to two thirds. A decode replica that hangs for more than half of it could read
blocks that by then belong to another request; `hexgen2 launch` stops it sooner (see
runtime/vllm/health.py)."""
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` of a request to prefill whose decode runs elsewhere (vLLM 0.32, NixlConnector)."""
_KV_CACHE_DTYPES: dict[str, str] = {"fp8": "fp8", "int8": "int8_per_token_head"}
"""vLLM's names of the formats of KV caches that are not the model's own type."""
TORCH = "run it with `hexgen2 launch --engine torch`"


@dataclass(frozen=True)
class VllmProcess:
    """One `vllm serve` process: a replica, or its part on one node. `rank` numbers the nodes of the replica
    from 0; the process of rank 0 serves the API at `port` of `node`."""

    replica: str
    node: str
    rank: int
    port: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Surroundings:
    """What differs between launching on this machine and exporting for others.

    Attributes
    ----------
    model : the checkpoint, as vLLM finds it on the machines
    address : node -> address
    device : GPU id -> device number on its machine
    port : (default port, number of ports in a row) -> the first port to use instead
    checkpoint_weights : format of the checkpoint's weights; None: that of the placement's model
    """

    model: str
    address: Callable[[str], str]
    device: Callable[[str], int] = lambda gpu: split(gpu)[1]
    port: Callable[[int, int], int] = lambda wanted, _: wanted
    checkpoint_weights: WeightType | None = None


def check_vllm(placement: Placement, source: str) -> None:
    """Check that vLLM can run the placement as it is.

    Raises
    ------
    InputError : it cannot; names the replica or route, and the reason
    """
    if problem := _kv_problem(placement):
        raise InputError(source, "model.kv_type", problem, "search with --kv fp8")
    if placement.attention_workers:
        raise InputError(source, "attention_workers", "vLLM does not support them", "choose another strategy")
    for k, replica in enumerate(placement.replicas):
        degrees = {stage.shape for stage in replica.stages}
        problem, remedy = "", TORCH
        if len(degrees) > 1:
            problem = f"{replica.shape} differ by stage, and vLLM has one tensor-parallel degree in a replica"
        elif replica.role != "colocated" and len(replica.stages) > 1:
            does = "reads from" if replica.role == "prefill" else "writes to"
            problem = f"{len(replica.stages)} pipeline stages, and vLLM's NixlConnector {does} one only"
        elif is_cpu(placement, replica.gpus[0]) and len(replica.stages) > 1:
            problem = "pipelines on CPUs are not known to work with vLLM 0.32"
        elif wrong := _degrees_problem(placement, replica):
            problem, remedy = f"{replica.shape}: {wrong}", "change the degrees of its stages"
        elif not _blocks_of_nodes(replica):
            problem = "its nodes hold unequal numbers of its GPUs, which vLLM does not support"
        if problem:
            raise InputError(source, f"replicas[{k}] ({replica.id})", problem, remedy)
    for k, route in enumerate(placement.routes):
        sender, receiver = (placement.replica(end).stages[0] for end in (route.from_, route.to))
        wide, heads = sender.attention_degree, placement.model.kv_heads
        if wide > receiver.attention_degree and wide > heads:
            problem = f"{route.from_} has each of {heads} KV heads several times, which the fewer GPUs of"
            problem += f" {route.to} cannot read with vLLM's NixlConnector"
            raise InputError(source, f"routes[{k}]", problem, TORCH)


def _kv_problem(placement: Placement) -> str:
    """Why vLLM cannot keep KV caches in the format that is planned; "" if it can."""
    kv = placement.model.kv_type
    if kv == "int4":
        return "vLLM's KV caches in 4 bits are not those that were planned"
    if kv == "int8" and any(is_cpu(placement, gpu) for replica in placement.replicas for gpu in replica.gpus):
        return "vLLM has no KV caches in int8 on CPUs"
    if kv == "int8" and any(route.from_ != route.to for route in placement.routes):
        return "KV caches in int8 are not known to move with vLLM 0.32"
    return ""


def vllm_processes(placement: Placement, around: Surroundings) -> list[VllmProcess]:
    """The processes of all replicas, in the placement's order; the placement must pass `check_vllm`."""
    longest, processes, side_channel = longest_context(placement), list[VllmProcess](), SIDE_CHANNEL_PORT
    for k, replica in enumerate(placement.replicas):
        processes += _of_replica(placement, replica, k, side_channel, longest, around)
        side_channel += replica.attention_data_parallel
    return processes


def longest_context(placement: Placement) -> int:
    """Length in tokens of the longest request that fits into the memory of every replica."""
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    costs = placement.costs()
    room = min(
        kv_capacity_tokens(replica, cluster, costs) // replica.attention_data_parallel
        for replica in placement.replicas
    )
    return max(min(placement.model.max_position, room), 1)


def memory_share(placement: Placement, replica: Replica) -> float:
    """The share of a GPU's memory that the placement's cost model plans for an engine."""
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    costs = placement.costs()
    shares = []
    for stage in replica.stages:
        device = cluster.accelerators[cluster.index(stage.gpus[0])]
        phase: Phase = "prefill" if replica.role == "prefill" else "decode"
        memory = costs.stage_memory(phase, stage.tensor_group(device), True, True)
        shares.append(memory.limit / device.memory_bytes)
    return min(*shares, MOST_MEMORY)


def _blocks_of_nodes(replica: Replica) -> bool:
    """Whether the ranks (stage by stage) fall into equal blocks, one per node."""
    nodes = gpus_by_node(replica.gpus)
    in_order = [node_of(gpu) for gpu in replica.gpus]
    blocks = [node for node, indices in nodes.items() for _ in indices]
    return blocks == in_order and len({len(indices) for indices in nodes.values()}) == 1


def _degrees_problem(placement: Placement, replica: Replica) -> str:
    """Why vLLM cannot run the attention groups or the expert parallelism of a replica; "" if it can."""
    stage = replica.stages[0]
    if stage.expert_parallel not in (1, stage.tensor_parallel):
        return "vLLM divides the experts over all GPUs of a stage, or not at all"
    if stage.attention_data_parallel == 1:
        return ""
    if placement.model.experts == 1:
        return "vLLM runs attention groups of mixtures of experts only"
    if len(gpus_by_node(replica.gpus)) > 1:
        return "attention groups are started on a single node only"
    if is_cpu(placement, replica.gpus[0]):
        return "attention groups on CPUs are not known to work with vLLM 0.32"
    return ""


def _in_rank_order(replica: Replica) -> list[str]:
    """The GPUs of a replica as vLLM counts them: attention group by group, and in each stage by stage."""
    return [
        gpu
        for group in range(replica.attention_data_parallel)
        for stage in replica.stages
        for gpu in stage.gpus[group * stage.attention_degree : (group + 1) * stage.attention_degree]
    ]


def _of_replica(
    placement: Placement, replica: Replica, k: int, side: int, longest: int, around: Surroundings
) -> list[VllmProcess]:
    groups = replica.attention_data_parallel
    cpu, nodes = is_cpu(placement, replica.gpus[0]), gpus_by_node(replica.gpus)
    head = around.address(next(iter(nodes)))
    port, requests = around.port(API_PORT + k, 1), math.ceil(replica.max_batch / groups)
    arguments = [
        *("serve", around.model, "--served-model-name", placement.model.name),
        *("--tensor-parallel-size", str(replica.stages[0].attention_degree)),
        *("--pipeline-parallel-size", str(len(replica.stages))),
        *("--max-num-seqs", str(requests), "--max-model-len", str(longest)),
    ]
    if groups > 1:
        arguments += ["--data-parallel-size", str(groups), "--api-server-count", "1"]
    if replica.stages[0].expert_parallel > 1:
        arguments += ["--enable-expert-parallel"]
    if replica.role != "decode":
        arguments += ["--max-num-batched-tokens", str(_step_tokens(replica, requests))]
    weights = placement.model.weight_type
    if weights not in SIXTEEN_BIT and around.checkpoint_weights not in (None, weights):
        arguments += ["--quantization", weights]
    if placement.model.kv_type in _KV_CACHE_DTYPES:
        arguments += ["--kv-cache-dtype", _KV_CACHE_DTYPES[placement.model.kv_type]]
    if cpu:
        arguments += ["--enforce-eager"]
    else:
        arguments += ["--gpu-memory-utilization", f"{memory_share(placement, replica):.3f}"]
    if replica.role != "colocated":
        arguments += ["--kv-transfer-config", _kv_transfer(replica.role, cpu)]
    side_channel, master = around.port(side, groups), around.port(MASTER_PORT + k, 1)
    processes = []
    for rank, node in enumerate(nodes):
        where = ["--host", around.address(node), "--port", str(port)]
        if len(nodes) > 1:
            where += ["--distributed-executor-backend", "mp", "--nnodes", str(len(nodes))]
            where += ["--node-rank", str(rank), "--master-addr", head, "--master-port", str(master)]
            where += ["--headless"] if rank else []
        environment = {"VLLM_HOST_IP": around.address(node)}
        if cpu:
            gib = longest * replica.max_batch * placement.model.kv_bytes_per_token / 2**30
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(math.ceil(gib), 1))
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            # Otherwise the sampler is compiled with g++ during the first steps.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        else:
            own = [gpu for gpu in _in_rank_order(replica) if node_of(gpu) == node]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(around.device(gpu)) for gpu in own)
        if len(replica.stages) > 1:
            layers = ",".join(str(stage.layer_count) for stage in replica.stages)
            environment["VLLM_PP_LAYER_PARTITION"] = layers
        if replica.role != "colocated":
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = around.address(node)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel)
        processes.append(VllmProcess(replica.id, node, rank, port, (*arguments, *where), environment))
    return processes


def _step_tokens(replica: Replica, requests: int) -> int:
    """Most tokens in one of vLLM's steps, so that as many of prompts are in it as planned: of a colocated
    replica beside a token for each request that decodes in the step. vLLM asks for one at least for each of
    the `requests` that may run."""
    if replica.role == "prefill":
        return max(replica.engine.step_tokens, requests)
    return max(replica.engine.chunk_tokens + math.ceil(requests / len(replica.stages)), requests)


def _kv_transfer(role: str, cpu: bool) -> str:
    """Settings of the KV connector. engine_id is left out: each start then draws a new one, so that peers do
    not mistake a restarted replica for its predecessor."""
    does = {"prefill": "kv_producer", "decode": "kv_consumer", "mixed": "kv_both"}
    settings = {
        "kv_connector": "NixlConnector",
        "kv_role": does[role],
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_S},
    }
    if cpu:
        settings["kv_buffer_device"] = "cpu"
    return json.dumps(settings, separators=(",", ":"))

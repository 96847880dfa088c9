"""Turns a placement into the configuration message of each worker."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cluster_specs.loader import resolve
from cost_model.architecture import ModelArchitecture, WeightType
from cost_model.config import architecture_from_folder
from cost_model.dtypes import SIXTEEN_BIT, WEIGHT_BYTES, kv_format_fields
from cost_model.errors import InputError
from cost_model.pipeline import PipelineSemantics
from hexgen2.cluster import Cluster
from hexgen2.devices import accelerators_of, is_cpu, split
from hexgen2.headwise.allocation import THETA
from hexgen2.placement import Placement, Replica
from runtime.headwise.plan import lanes_of
from runtime.headwise.room import budget_tokens
from runtime.options import (
    CPU_TRANSPORTS,
    DEFAULTS,
    EMULATED,
    GPU_TRANSPORTS,
    KV_TRANSPORTS,
    NIXL,
    PLAIN_KV,
    TORCH,
    TORCH_PACKED_KV,
    EngineOptions,
)
from runtime.protocol.message import ATTENTION, PROTOCOL_VERSION, StageShape
from runtime.protocol.to_workers import Configure, Emulation, KvLink, WindowedLayers
from runtime.routing.kv_budget import kv_budgets
from runtime.routing.kv_division import divided, keeps_windows_apart

_SHORT: dict[str, WeightType] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def device_of(placement: Placement, gpu: str, cuda_devices: int | None = None) -> str:
    """The torch device of a GPU id when all nodes are on this machine: "cpu" or "cuda:N".

    The GPUs of all nodes are numbered consecutively, so that two nodes on one machine never share a GPU,
    unless there are only so many `cuda_devices`, which they then take in turns.
    """
    if is_cpu(placement, gpu):
        return "cpu"
    name, index = split(gpu)
    before = 0
    for node in placement.cluster.nodes:
        if node.name == name:
            break
        if not is_cpu(placement, f"{node.name}/0"):
            before += accelerators_of(placement, node.name)[1]
    number = before + index
    return f"cuda:{number if cuda_devices is None else number % cuda_devices}"


def workers_of(placement: Placement) -> list[str]:
    """The GPUs of a placement that get a worker: those of the stages, then attention workers."""
    stages = [gpu for replica in placement.replicas for gpu in replica.gpus]
    return stages + [worker.gpu for worker in placement.attention_workers]


def stage_shapes(replica: Replica) -> tuple[StageShape, ...]:
    """The stages of a replica as messages carry them."""
    return tuple(
        StageShape(workers=tuple(stage.gpus), first_layer=stage.layers[0], end_layer=stage.layers[1])
        for stage in replica.stages
    )


def shares_of(cores: Sequence[int], workers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Divide this machine's cores evenly among its CPU workers, neighbouring cores to the same worker.

    With fewer than two cores per worker the result is empty: the operating system then schedules them freely.
    """
    count = len(cores) // max(len(workers), 1)
    if count < 2:
        return {}
    return {worker: tuple(cores[k * count : (k + 1) * count]) for k, worker in enumerate(workers)}


def emulated_links(placement: Placement) -> dict[str, tuple[KvLink, ...]]:
    """The cluster's links from each worker that prefills for other replicas to every other GPU, by the
    sending worker.

    All other GPUs, because after a re-plan KV caches may go to any of them.
    """
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    senders = [gpu for replica in placement.replicas if replica.prefills_for_others for gpu in replica.gpus]
    index = {gpu: number for number, gpu in enumerate(cluster.gpu_ids)}

    def link(source: str, destination: str) -> KvLink:
        ends = index[source], index[destination]
        return KvLink(
            source=source,
            destination=destination,
            bandwidth_bytes_s=float(cluster.bandwidth_bytes_s[ends]),
            latency_s=float(cluster.latency_s[ends]),
        )

    return {
        source: tuple(link(source, other) for other in cluster.gpu_ids if other != source)
        for source in senders
    }


def _check_transport(name: str, on_cpu: list[bool]) -> None:
    """Refuse a transport with which every request would fail.

    Raises
    ------
    InputError : the transport does not suit these devices, or its package is not installed
    """
    if (name in GPU_TRANSPORTS and any(on_cpu)) or (name in CPU_TRANSPORTS and not all(on_cpu)):
        kind = "GPUs" if name in GPU_TRANSPORTS else "CPUs"
        others = ", ".join(each for each in KV_TRANSPORTS if each not in GPU_TRANSPORTS + CPU_TRANSPORTS)
        problem = f"works between {kind} only, and the placement has other devices"
        raise InputError("--kv-transport", name, problem, f"use one of {others}")
    if name == NIXL and importlib.util.find_spec(NIXL) is None:
        problem = "the Python package nixl is not installed"
        raise InputError("--kv-transport", name, problem, "pip install '.[nixl]', or use auto")


def _emulated_transport(name: str) -> str:
    """The transport of the emulated engine, which has its own over TCP."""
    if name not in ("auto", "tcp"):
        raise InputError("--kv-transport", name, "is not for the emulated engine", "use auto or tcp")
    return EMULATED


def kv_format_of(placement: Placement, options: EngineOptions) -> str:
    """How workers of the torch engine store KV caches: the name of a format in `kv_cache/formats.py`."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return placement.model.kv_type if placement.model.kv_type in TORCH_PACKED_KV else PLAIN_KV


def as_computed(
    placement: Placement, dtype: str, stored_bytes: float, kv_format: str = PLAIN_KV
) -> Placement:
    """A placement whose model has the bytes that it takes in workers of the torch engine: activations have
    their type, KV caches their format, whatever was planned. Weights that are not quantised have their type,
    too, but if all workers are CPUs, those that are stored in fewer bytes stay so.

    Parameters
    ----------
    stored_bytes : of a weight in the checkpoint that is not quantised
    """
    width, fields = WEIGHT_BYTES[_SHORT[dtype]], placement.model.model_dump()
    on_cpus = all(is_cpu(placement, gpu) for replica in placement.replicas for gpu in replica.gpus)
    kept = min(width, stored_bytes) if on_cpus else width
    kv = _SHORT[dtype] if kv_format == PLAIN_KV else kv_format
    changes: dict[str, object] = {"activation_bytes": width, "plain_weight_bytes": kept}
    changes |= kv_format_fields(kv, placement.model.kv_head_dim)
    if placement.model.weight_type in SIXTEEN_BIT:
        changes |= {"weight_type": _SHORT[dtype], "weight_bytes": kept}
    return placement.model_copy(update={"model": ModelArchitecture(**{**fields, **changes})})


def _check_room(placement: Placement, dtype: str) -> None:
    """Refuse a type in which not even one block of KV cache fits beside the weights.

    Raises
    ------
    InputError : so it is on the GPUs of a replica
    """
    for replica, tokens in kv_budgets(placement).items():
        if tokens < 1:
            problem = f"its weights do not fit into the memory of replica {replica}"
            remedy = "use --dtype bfloat16, or search a placement for more or larger GPUs"
            raise InputError("--dtype", dtype, problem, remedy)


def _windowed(
    placement: Placement, budgets: Mapping[str, int], options: EngineOptions
) -> dict[str, tuple[int, WindowedLayers]]:
    """For each replica, the tokens of its layers that keep all, and its layers with a window; empty if there
    are none, or they keep all tokens, too."""
    if not keeps_windows_apart(placement):
        return {}
    costs, model = placement.costs(), placement.model
    layers = tuple(sorted(set(range(model.layers)) - set(model.full_attention_layers)))

    def of(replica: Replica) -> tuple[int, WindowedLayers]:
        tokens, room = divided(
            placement, replica, costs, budgets[replica.id], options.chunk_tokens, options.block_tokens
        )
        return tokens, WindowedLayers(layers=layers, window=room.window, kv_budget_tokens=room.tokens)

    return {replica.id: of(replica) for replica in placement.replicas}


def configurations(
    placement: Placement,
    checkpoint: Path,
    gpu_dtype: str,
    options: EngineOptions = DEFAULTS,
    engine: str = TORCH,
) -> dict[str, Configure]:
    """The first message to every worker, by worker, in the placement's order.

    Attention workers come last. All workers compute in the same type, the one in `options`, and hold the KV
    cache in the same format. If the type is "auto": float32 if any worker is a CPU (on which it is fast),
    else `gpu_dtype`.

    Raises
    ------
    InputError : the transport in `options` does not suit these devices, or its package is not installed; the
        weights do not fit in this type
    """
    secret, block = secrets.token_hex(32), options.block_tokens
    gpus = workers_of(placement)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if any(is_cpu(placement, gpu) for gpu in gpus) else gpu_dtype
    kv_format = PLAIN_KV
    if engine == TORCH:
        kv_format = kv_format_of(placement, options)
        stored_bytes = architecture_from_folder(checkpoint).activation_bytes
        placement = as_computed(placement, dtype, stored_bytes, kv_format)
        _check_room(placement, dtype)
    budgets = {name: max(tokens // block, 1) * block for name, tokens in kv_budgets(placement).items()}
    windowed = _windowed(placement, budgets, options) if engine == TORCH else {}
    budgets |= {name: tokens for name, (tokens, _) in windowed.items()}
    lanes = {
        replica.id: lanes_of(placement, replica, budgets[replica.id], block)
        for replica in placement.replicas
        if placement.workers_of(replica.id)
    }
    budgets |= {name: budget_tokens(own, block) for name, own in lanes.items()}
    emulation, transport = None, options.kv_transport
    semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
    if engine == EMULATED:
        emulation = Emulation(placement=placement.to_json().encode(), kv_scale=options.kv_scale)
        transport = _emulated_transport(transport)
    else:
        _check_transport(transport, [is_cpu(placement, gpu) for gpu in gpus])
    emulated = emulated_links(placement) if emulation or options.emulate_links else {}
    cores = shares_of(sorted(os.sched_getaffinity(0)), [gpu for gpu in gpus if is_cpu(placement, gpu)])
    configured = {
        gpu: Configure(
            protocol=PROTOCOL_VERSION,
            worker=gpu,
            replica=replica.id,
            role=replica.role,
            stages=stage_shapes(replica),
            checkpoint=str(checkpoint),
            device=device_of(placement, gpu, options.cuda_devices),
            dtype=dtype,
            kv_budget_tokens=budgets[replica.id],
            block_tokens=block,
            max_batch=replica.max_batch,
            max_prefill_tokens=replica.engine.step_tokens,
            max_mixed_tokens=options.chunk_tokens or replica.engine.chunk_tokens,
            steps_in_flight=replica.engine.steps_in_flight(semantics, len(replica.stages)),
            reuse_prefixes=options.reuse_prefixes and replica.id not in lanes,
            kv_format=kv_format,
            kv_transport=transport,
            kv_links=emulated.get(gpu, ()),
            host="127.0.0.1",
            secret=secret,
            threads=len(cores.get(gpu, (0,))),
            cores=cores.get(gpu, ()),
            engine=engine,
            emulation=emulation,
            lanes=lanes.get(replica.id, ()),
            theta=THETA,
            measure_heads=options.measure_heads,
            layers=placement.model.layers,
            ranges=placement.layer_ranges is not None,
            windowed=windowed[replica.id][1] if windowed else None,
        )
        for replica in placement.replicas
        for gpu in replica.gpus
    }
    for worker in placement.attention_workers:
        configured[worker.gpu] = msgspec.structs.replace(
            configured[placement.replica(worker.replica).gpus[0]],
            worker=worker.gpu,
            role=ATTENTION,
            device=device_of(placement, worker.gpu, options.cuda_devices),
            threads=len(cores.get(worker.gpu, (0,))),
            cores=cores.get(worker.gpu, ()),
        )
    return configured

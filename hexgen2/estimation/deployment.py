"""From a run to the placement that serves it."""

from __future__ import annotations

from cluster_specs.schema import ClusterSpec, NetworkDefault, NetworkSpec, NodeSpec
from cost_model.base import CostModel
from cost_model.errors import InputError
from cost_model.hardware import usual_interconnect
from hexgen2.estimation.run import Run, Shape, Workers
from hexgen2.placement import (
    BoundRecord,
    CostModelName,
    Latency,
    Placement,
    Route,
    SearchRecord,
    Throughput,
)
from hexgen2.replica import Replica, Role, Stage
from hexgen2.workload.classes import load_workload
from hexgen2.workload.lengths import Workload

MEAN_SHARE = 0.9
"""Mean length of requests whose lengths are drawn from 80 to 100 % of the nominal one."""
NETWORK_GBIT_S = 400.0
"""Network bandwidth of each GPU between nodes, assumed: one port of NDR InfiniBand."""
NETWORK_LATENCY_US = 10.0
NODE_GPUS = 8
_RACK_GPUS = {"GB200": 72, "GB300": 72}

ASSUMPTIONS = [
    f"{NODE_GPUS} GPUs to a node (72 of GB200 and GB300), joined as such cards usually are; "
    "each worker has nodes of its own",
    f"{NETWORK_GBIT_S:g} Gbit/s per GPU and {NETWORK_LATENCY_US:g} us between nodes",
]


def workload_of(run: Run) -> Workload:
    """The mean lengths of a run's requests."""
    return load_workload(None, max(1.0, MEAN_SHARE * run.isl), max(1.0, MEAN_SHARE * run.osl))


def placement_of(run: Run, costs: CostModel) -> Placement:
    """The placement of a run: a colocated replica, or prefill and decode replicas with routes between all of
    them. Its throughput, and what its replicas and routes carry, are only shares of a load of 1 request/s.

    Parameters
    ----------
    costs : the cost model, for the run's model and the lengths of `workload_of`
    """
    nodes: list[NodeSpec] = []
    if run.colocated is not None:
        replicas, routes = _replicas(run, "colocated", run.colocated, nodes), []
    else:
        assert run.prefill is not None
        assert run.decode is not None
        senders = _replicas(run, "prefill", run.prefill, nodes)
        receivers = _replicas(run, "decode", run.decode, nodes)
        share = 1 / (len(senders) * len(receivers))
        replicas = [*senders, *receivers]
        routes = [
            Route.between(
                sender,
                receiver,
                costs.kv_bytes_per_layer,
                capacity_req_s=1.0,
                flow_req_s=share,
                to_every_rank=costs.kv_to_every_rank,
            )
            for sender in senders
            for receiver in receivers
        ]
    workload = workload_of(run)
    return Placement(
        strategy="as-run",
        cluster=_cluster(nodes),
        model=run.model,
        workload=workload,
        cost_model=CostModelName.of(costs, pipeline="pipelined", links="shared"),
        replicas=replicas,
        routes=routes,
        throughput=Throughput(req_s=1.0, output_tok_s=workload.osl),
        latency=Latency(ttft_ms=0.0, tpot_ms=0.0),
        price_per_hour=0.0,
        bound=BoundRecord(req_s=1.0, gap=0.0, assumptions=[]),
        bottlenecks=[],
        search=SearchRecord(seconds=0.0, seed=0, evaluations=0),
    )


def _cluster(nodes: list[NodeSpec]) -> ClusterSpec:
    """The nodes, with a network that is as fast as their network cards."""
    rate = max(node.network_gbit_s or 0.0 for node in nodes)
    default = NetworkDefault(bandwidth_gbit_s=rate, latency_us=NETWORK_LATENCY_US)
    return ClusterSpec(
        name="as-run", assumptions=ASSUMPTIONS, nodes=nodes, network=NetworkSpec(default=default)
    )


def _replicas(run: Run, role: Role, workers: Workers, nodes: list[NodeSpec]) -> list[Replica]:
    """A replica for each worker of a role, on nodes of its own, which are added to `nodes`."""
    found = []
    for index in range(workers.count):
        gpus = _gpus(run, f"{role}-{index}", workers.shape, nodes)
        found.append(
            Replica(
                id=f"{role}-{index}",
                role=role,
                stages=_stages(gpus, workers.shape, run.model.layers),
                max_batch=min(workers.worker_batch or run.concurrency, run.concurrency),
                capacity_req_s=1.0,
                utilisation=1 / workers.count,
            )
        )
    return found


def _gpus(run: Run, name: str, shape: Shape, nodes: list[NodeSpec]) -> list[str]:
    """The GPUs of a worker. Stages do not straddle nodes unless they are larger than one."""
    size = _RACK_GPUS.get(run.gpu.name, NODE_GPUS)
    if shape.stage_gpus <= size:
        size -= size % shape.stage_gpus
    gpus: list[str] = []
    while len(gpus) < shape.gpus:
        count = min(size, shape.gpus - len(gpus))
        node = f"{name}-node-{len(gpus) // size}"
        nodes.append(
            NodeSpec(
                name=node,
                accelerators=f"{run.gpu.name}:{count}",
                interconnect=usual_interconnect(run.gpu),  # type: ignore[arg-type]
                network_gbit_s=NETWORK_GBIT_S * count,
            )
        )
        gpus += [f"{node}/{k}" for k in range(count)]
    return gpus


def _stages(gpus: list[str], shape: Shape, layers: int) -> list[Stage]:
    """Pipeline stages of equal size, with layers as even as can be."""
    size, stages = shape.stage_gpus, []
    for k in range(shape.pp):
        own = (k * layers // shape.pp, (k + 1) * layers // shape.pp)
        stages.append(
            Stage(
                gpus=gpus[k * size : (k + 1) * size],
                layers=own,
                attention_data_parallel=shape.attention_dp,
                expert_parallel=shape.expert_parallel,
            )
        )
    return stages


def check_room(run: Run, placement: Placement, rooms: dict[str, int]) -> None:
    """Refuse a placement of which a replica cannot hold the weights, or not one request.

    Parameters
    ----------
    rooms : tokens of KV cache for which each replica has memory

    Raises
    ------
    InputError
    """
    for replica in placement.replicas:
        longest = run.isl + (0 if replica.role == "prefill" else run.osl)
        gpus = f"{len(replica.gpus)} {run.gpu.name}"
        remedy = "take more GPUs or fewer bits"
        if rooms[replica.id] <= 0:
            problem = f"the weights of {run.model.name} do not fit into {gpus}"
            raise InputError("memory", "", problem, remedy)
        if rooms[replica.id] // replica.attention_data_parallel < longest:
            problem = f"a request of {longest} tokens does not fit into {gpus} beside the weights"
            raise InputError("memory", "", problem, remedy)

"""Exports a placement to Ray: the resources that replicas reserve, and the job that launches them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from cost_model.errors import InputError
from hexgen2.devices import gpus_by_node, is_cpu, node_spec, nodes_in_use
from hexgen2.placement import Placement

CPU_SHARE = 0.01
"""Ray CPUs reserved per worker: a token amount, since the placement has divided the CPUs already."""
NODE_SHARE = 0.001
"""Amount of a node's own resource that each bundle on it reserves, to pin it there."""


def node_resource(placement: Placement, node: str) -> str:
    """The Ray resource that only this node has: Ray's built-in one if the placement has an address for the
    node, otherwise one that `ray start --resources` must define."""
    address = node_spec(placement, node).address
    return f"node:{address}" if address else f"hexgen2-{node}"


def bundles_of(placement: Placement, gpus: Sequence[str], cpu: bool) -> list[dict[str, float]]:
    """The resources that a replica reserves on each of its nodes, in the order of its GPUs (or CPUs in their
    place); `node_resource` pins each bundle to its node."""
    bundles = []
    for node, indices in gpus_by_node(gpus).items():
        devices = {"CPU": round(len(indices) * CPU_SHARE, 4)} if cpu else {"GPU": float(len(indices))}
        bundles.append({**devices, node_resource(placement, node): NODE_SHARE})
    return bundles


def ray_files(placement: Placement, model: str | None, source: str) -> dict[str, str]:
    """File name -> text.

    Raises
    ------
    InputError : the placement has attention workers
    """
    if placement.attention_workers:
        problem = "only the local launcher starts them"
        raise InputError(source, "attention_workers", problem, "use `hexgen2 launch` on one machine")
    folder = model or placement.model.name
    entrypoint = ["hexgen2", "launch", "placement.json", "--launcher", "ray", "--model-path", folder]
    entrypoint += ["--host", "0.0.0.0", "--port", "8000"]
    job = {"entrypoint": shlex.join(entrypoint), "metadata": {"placement": placement.cluster.name}}
    groups = {
        replica.id: {
            "strategy": "PACK",
            "bundles": bundles_of(placement, replica.gpus, is_cpu(placement, replica.gpus[0])),
        }
        for replica in placement.replicas
    }
    return {
        "placement.json": placement.to_json(),
        "placement_groups.json": json.dumps(groups, indent=1) + "\n",
        "job.json": json.dumps(job, indent=1) + "\n",
        "start-ray.sh": _start_script(placement),
        "submit.sh": _SUBMIT.format(entrypoint=job["entrypoint"]),
        "README.md": _README.format(
            model=placement.model.name, cluster=placement.cluster.name, folder=folder
        ),
    }


def _start_script(placement: Placement) -> str:
    cases = []
    for node, indices in nodes_in_use(placement).items():
        resource = node_resource(placement, node)
        own = {} if resource.startswith("node:") else {resource: 1}
        gpus = _gpus_here(placement, node, indices)
        words = [*gpus, *(["--resources", json.dumps(own)] if own else [])]
        cases.append(f"  {shlex.quote(node)}) set -- {shlex.join(words)} ;;")
    return _START.format(nodes=" ".join(nodes_in_use(placement)), cases="\n".join(cases))


def _gpus_here(placement: Placement, node: str, indices: list[int]) -> list[str]:
    kind = next(r for r in placement.replicas if node in gpus_by_node(r.gpus))
    return [] if is_cpu(placement, kind.gpus[0]) else ["--num-gpus", str(max(indices) + 1)]


_START = """#!/bin/sh
# Run on each machine, starting with the one whose address is HEAD_ADDRESS: ./start-ray.sh NODE HEAD_ADDRESS
# NODE is the machine's name in the placement: {nodes}
set -eu
node=$1 head=$2
case $node in
{cases}
  *) echo "no node '$node' in the placement" >&2; exit 2 ;;
esac
if hostname -I | tr ' ' '\\n' | grep -qxF "$head"; then
    exec ray start --head --node-ip-address "$head" --port 6379 --include-dashboard=true "$@"
fi
exec ray start --address "$head:6379" "$@"
"""

_SUBMIT = """#!/bin/sh
# Run where Ray's dashboard can be reached (at RAY_API_SERVER_ADDRESS or http://127.0.0.1:8265).
set -eu
cd "$(dirname "$0")"
exec ray job submit --no-wait --working-dir . -- {entrypoint}
"""

_README = """# {model} on {cluster}, by Ray

1. Install hexgen2 with its extras runtime and ray on all machines, with the same version of Python, and put
   the checkpoint into `{folder}`.
2. Run `./start-ray.sh NODE HEAD_ADDRESS` on each machine. If the Ray cluster exists already, its nodes need
   the resources that this script defines (`hexgen2-NODE`), or the placement needs their addresses. Ray's
   ports listen on all interfaces without a password: keep them in a private network.
3. Run `./submit.sh`, or `hexgen2 launch placement.json --launcher ray` on a machine of the cluster.

`placement_groups.json` lists what each replica reserves: one bundle per node with its GPUs. The OpenAI API
listens on port 8000 of the machine that runs the job; Ray chooses its head node unless told otherwise.
"""

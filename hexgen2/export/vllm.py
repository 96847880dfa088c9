"""Exports a placement to plain vLLM: a script per process, the routes for a proxy, and instructions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from cost_model.models import SHIPPED
from hexgen2.devices import node_spec, nodes_in_use
from hexgen2.export.labels import safe_names
from hexgen2.export.vllm_command import TO_PREFILL, Surroundings, VllmProcess, check_vllm, vllm_processes
from hexgen2.placement import Placement

MODEL_VARIABLE = "HEXGEN2_MODEL"


def vllm_files(placement: Placement, model: str, source: str) -> dict[str, str]:
    """File name -> text.

    Parameters
    ----------
    model : the checkpoint on the machines: a folder, or a name on the Hugging Face Hub

    Raises
    ------
    InputError : vLLM cannot run the placement
    """
    check_vllm(placement, source)
    labels = safe_names(nodes_in_use(placement))
    variables = {node: f"ADDRESS_{label.upper().replace('-', '_')}" for node, label in labels.items()}
    # vLLM makes fp8 of the shipped models, which are in 16 bits, as it loads them. Checkpoints in other
    # formats say so themselves.
    plain = placement.model.name in SHIPPED and placement.model.weight_type == "fp8"
    around = Surroundings(
        f"${{{MODEL_VARIABLE}}}",
        lambda node: f"${{{variables[node]}}}",
        checkpoint_weights="bf16" if plain else None,
    )
    processes = vllm_processes(placement, around)
    scripts = _script_names(processes)
    return {
        **{name: _script(process) for name, process in zip(scripts, processes, strict=True)},
        "cluster.env": _environment(placement, variables, model),
        "routes.json": _routes(placement, processes, variables),
        "README.md": _readme(placement, scripts, processes),
    }


def _script_names(processes: list[VllmProcess]) -> list[str]:
    replicas = safe_names(process.replica for process in processes)
    shared = {process.replica for process in processes if process.rank}
    return [
        f"{replicas[each.replica]}{f'-rank-{each.rank}' if each.replica in shared else ''}.sh"
        for each in processes
    ]


def _word(text: str) -> str:
    """Quote a word of a shell command, leaving our own variables to the shell."""
    return f'"{text}"' if text.startswith("${") else shlex.quote(text)


def _script(process: VllmProcess) -> str:
    words = [_word(word) for word in process.arguments]
    lines, k = ["exec vllm " + " ".join(words[:2])], 2
    while k < len(words):
        size = 2 if k + 1 < len(words) and not process.arguments[k + 1].startswith("--") else 1
        lines.append("    " + " ".join(words[k : k + size]))
        k += size
    exports = [f"export {name}={_word(value)}" for name, value in process.environment.items()]
    return "\n".join(
        [
            "#!/bin/sh",
            f"# {process.replica}, on node {process.node}.",
            "set -eu",
            'set -a; . "$(dirname "$0")/cluster.env"; set +a',
            *exports,
            " \\\n".join(lines),
            "",
        ]
    )


def _environment(placement: Placement, variables: Mapping[str, str], model: str) -> str:
    lines = [
        "# Read by every script in this folder. Fill in what is empty.",
        "# The checkpoint: a folder on every machine, or a name on the Hugging Face Hub.",
        f"{MODEL_VARIABLE}={shlex.quote(model)}",
        "# Addresses of the nodes, as seen from the other nodes.",
    ]
    for node, variable in variables.items():
        address = node_spec(placement, node).address or ""
        lines += [
            f"# {node}: {node_spec(placement, node).accelerators}",
            f"{variable}={shlex.quote(address)}",
        ]
        lines.append(f': "${{{variable}:?is empty in cluster.env}}"')
    lines += ["# If set, clients and the proxy must send this as a bearer token.", "# VLLM_API_KEY="]
    return "\n".join([*lines, ""])


def _routes(placement: Placement, processes: list[VllmProcess], variables: Mapping[str, str]) -> str:
    """The input of a proxy: where replicas serve, and the share of requests on each route."""
    serving = {process.replica: process for process in processes if process.rank == 0}
    shares = [
        {"prefill": route.from_, "decode": route.to, "flow_req_s": route.flow_req_s}
        | ({"min_prompt_tokens": route.min_prompt_tokens} if route.min_prompt_tokens else {})
        for route in placement.routes
    ]
    shares += [
        {"prefill": each.id, "decode": each.id, "flow_req_s": each.utilisation * each.capacity_req_s}
        for each in placement.replicas
        if each.role == "colocated"
    ]
    replicas = {
        name: {"role": placement.replica(name).role, "address": variables[process.node], "port": process.port}
        for name, process in serving.items()
    }
    value = {"replicas": replicas, "routes": shares, "kv_transfer_params": TO_PREFILL}
    return json.dumps(value, indent=1) + "\n"


def _readme(placement: Placement, scripts: list[str], processes: list[VllmProcess]) -> str:
    rows = [
        f"| `{name}` | {process.replica} | {placement.replica(process.replica).role} | {process.node} "
        f"| {placement.replica(process.replica).shape} | {'joins' if process.rank else process.port} |"
        for name, process in zip(scripts, processes, strict=True)
    ]
    return _README.format(model=placement.model.name, cluster=placement.cluster.name, rows="\n".join(rows))


_README = """# {model} on {cluster}, by plain vLLM

Written for vLLM 0.32. Fill in `cluster.env`, copy the folder to every node, and run each script on its node:

| script | replica | role | node | tensor-parallel degree by stage | port |
| --- | --- | --- | --- | --- | --- |
{rows}

`CUDA_VISIBLE_DEVICES` numbers the GPUs of a node as the placement does. Ports from 8100 (API), 5600 (NIXL's
side channel) and 29500 (replicas across nodes) must be free, and open between the nodes. Nothing is
encrypted; use a private network.

Prefill and decode replicas need a proxy in front. For each request, the proxy chooses a route of
`routes.json` in proportion to `flow_req_s`, among those whose `min_prompt_tokens`, if
any, the prompt has, or among all if none of these has room. Then it
1. sends the request to the prefill replica with `"stream": false, "max_tokens": 1` and the
   `kv_transfer_params` of `routes.json`;
2. sends the client's request to the decode replica, with the `kv_transfer_params` of the first response, and
   relays the response.

`hexgen2 launch placement.json --engine vllm` is such a proxy. It starts the replicas itself, on one machine,
and recovers requests after failures.
"""

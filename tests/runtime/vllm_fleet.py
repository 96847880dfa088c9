"""A prefill and a decode replica on CPUs, for the vLLM engine."""

from __future__ import annotations

from pathlib import Path

from served import make_placement
from tokenizer_files import write_model

from hexgen2.placement import Placement, Stage

HEAD_DIM = 32
"""The least that vLLM's attention on CPUs has."""


def write_fleet_model(folder: Path) -> None:
    """The tests' Llama with heads that vLLM has kernels for."""
    write_model(folder, head_dim=HEAD_DIM)


def pair(folder: Path) -> Placement:
    """prefill-0 -> decode-0, each on one CPU."""
    placement = make_placement(folder)
    kept = [placement.replica(name) for name in ("prefill-0", "decode-1")]
    one = [Stage(gpus=[f"box/{k}"], layers=(0, placement.model.layers)) for k in range(2)]
    replicas = [
        each.model_copy(update={"id": name, "stages": [stage], "utilisation": 0.25, "max_batch": 4})
        for each, name, stage in zip(kept, ("prefill-0", "decode-0"), one, strict=True)
    ]
    route = placement.routes[0].model_copy(update={"flow_req_s": 1.0})
    return placement.model_copy(
        update={
            "replicas": replicas,
            "routes": [route],
            "throughput": placement.throughput.model_copy(update={"req_s": 1.0, "output_tok_s": 16.0}),
        }
    )

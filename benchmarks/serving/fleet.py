"""A small model on CPU workers of this machine, launched as users do, for the benchmarks of the runtime."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hexgen2.placement import Placement

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMAND = str(Path(sys.executable).with_name("hexgen2"))
START_S = 180.0
CLUSTER = """
name: {cores}-cores
nodes:
  - {{name: box, accelerators: Core:{cores}, interconnect: shared-memory, price_per_gpu_hour: 0}}
accelerators:
  Core: {{memory_gib: {memory_gib}, bf16_dense_tflops: 0.05, memory_bandwidth_gbyte_s: 8, kind: cpu}}
"""


SMALL = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
}
"""55 million parameters: a step takes one core some tens of ms, a hundred times the front end's time per
token."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.15,
}
"""A step takes 1 ms."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3_moe": {**TINY, **EXPERTS, "num_experts": 8, "head_dim": 16},
    "deepseek_v3": {
        **TINY,
        **EXPERTS,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        **TINY,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "head_dim": 16,
        "sliding_window": 48,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 500.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
}
"""Tiny models by their model_type: without experts, with experts, with experts and latent attention, and with
experts and windows."""


def make_model(folder: Path, sizes: Mapping[str, Any] = SMALL, kind: str = "llama") -> None:
    """Write a random model of a model_type in float32, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.append(str(EXAMPLES))
    from make_checkpoint import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        kind,
        **sizes,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_placement(
    work: Path, model: Path, colocated: bool, isl: int, osl: int, memory_gib: float = 2
) -> Path:
    """One prefill and one decode replica, each on half of the machine's cores, or one colocated replica on
    all of them."""
    name = "colocated" if colocated else "pair"
    cluster, placement = work / f"{name}.yaml", work / f"{name}.json"
    cluster.write_text(CLUSTER.format(cores=1 if colocated else 2, memory_gib=memory_gib))
    phases = "colocated" if colocated else "disaggregated"
    asked = ["--isl", str(isl), "--osl", str(osl), "--phases", phases]
    command = [COMMAND, "search", "--cluster", str(cluster), "--model", str(model), *asked]
    subprocess.run([*command, "-o", str(placement)], check=True, capture_output=True)
    found = Placement.load(placement)
    roles = ["colocated"] if colocated else ["decode", "prefill"]
    assert sorted(replica.role for replica in found.replicas) == roles
    return placement


@contextmanager
def launched(
    placement: Path, model: Path | None, *options: str, cores: Sequence[int] = ()
) -> Iterator[tuple[str, psutil.Process]]:
    """The URL of a running `hexgen2 launch`, and its process; without a model, its engine is emulated. With
    `cores`, it sees no others."""
    engine = ["--model-path", str(model)] if model else ["--engine", "emulated"]
    command = [COMMAND, "launch", str(placement), *engine, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        server = psutil.Popen([*pinned, *command], stderr=log, start_new_session=True)
        try:
            yield _until_serving(server, log), server
        finally:
            server.terminate()
            server.wait(60)


def _until_serving(server: psutil.Popen, log) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        log.seek(0)
        for line in log:
            if line.startswith("serving "):
                return line.split(" on ")[1].split()[0]
        time.sleep(0.1)
    log.seek(0)
    raise SystemExit(f"the fleet did not start:\n{log.read()}")

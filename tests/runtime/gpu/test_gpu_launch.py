"""`hexgen2 launch` on one GPU: replicas that compute prompts and answers together, and apart."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
import torch
from placements import placement_of, replica_of
from reference import Reference
from served import COMMAND, MODEL, Process
from tokenizer_files import write_model

from cluster_specs.schema import AcceleratorSpec, ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from hexgen2.placement import Placement, Route
from hexgen2.workload.lengths import RequestClass, Workload

CARD = AcceleratorSpec(memory_gib=8, bf16_dense_tflops=100, memory_bandwidth_gbyte_s=1000)
PROMPT = "the quick brown fox jumps over the lazy dog, again and again"
SHAPES = {
    "together": ({"colocated-0": [("box/0", 4)]}, []),
    "apart": ({"prefill-0": [("box/0", 4)], "decode-0": [("box/1", 4)]}, [("prefill-0", "decode-0")]),
}


def placement(folder: Path, shape: str) -> Placement:
    """Replicas of one GPU each, in a cluster that has two."""
    replicas, flows = SHAPES[shape]
    box = NodeSpec(name="box", accelerators="Card:2", interconnect="shared-memory")
    model = architecture_from_folder(folder).model_copy(update={"name": MODEL})
    used = 0.5 if shape == "apart" else 0.25
    return placement_of(
        ClusterSpec(name="one-box", nodes=[box], accelerators={"Card": CARD}),
        model,
        Workload(name="short", classes=(RequestClass(name="short", isl=32, osl=16),)),
        [replica_of(name, stages, capacity_req_s=2.0, utilisation=used) for name, stages in replicas.items()],
        [
            Route(
                from_=prefill,
                to=decode,
                flow_req_s=1.0,
                capacity_req_s=2.0,
                kv_bytes_per_req=32 * model.kv_bytes_per_token,
            )
            for prefill, decode in flows
        ],
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transport", ["auto", "cuda_ipc", "tcp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_the_same(shape: str, transport: str, tmp_path: Path) -> None:
    if shape == "together" and transport != "auto":
        pytest.skip("nothing is sent")
    folder = tmp_path / "model"
    write_model(folder)
    (tmp_path / "placement.json").write_text(placement(folder, shape).to_json())
    command = [sys.executable, "-c", COMMAND, "launch", str(tmp_path / "placement.json")]
    options = ["--model-path", str(folder), "--port", "0", "--dtype", "float32", "--kv-transport", transport]
    server = Process([*command, *options, "--cuda-devices", "1"], tmp_path / "log")
    try:
        url = server.wait_for(r"serving .* on (http://\S+)").group(1)
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        asked["ignore_eos"] = True
        answers = []
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        texts = {each["choices"][0]["text"] for each in answers}
        assert texts == {Reference(folder).text(PROMPT, 20)}
        assert answers[0]["usage"]["completion_tokens"] == 20
        assert server.interrupt() == 0
    finally:
        server.close()


def test_ranks_of_a_replica_need_devices_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    whole = placement(folder, "together")
    replica = replica_of("colocated-0", [("box/0 box/1", 4)], capacity_req_s=2.0, utilisation=0.25)
    (tmp_path / "placement.json").write_text(whole.model_copy(update={"replicas": [replica]}).to_json())
    command = [sys.executable, "-c", COMMAND, "launch", str(tmp_path / "placement.json")]
    server = Process([*command, "--model-path", str(folder), "--cuda-devices", "1"], tmp_path / "log")
    try:
        assert server.process.wait(60) == 2
        assert "2 GPUs would be 1 CUDA devices" in (tmp_path / "log").read_text()
    finally:
        server.close()

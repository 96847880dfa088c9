"""Search with Helix on a few unlike cores, launch the placement by the command line, and use its API."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import openai
import pytest
from commands import hexgen2, refused
from reference import Reference
from served import SECONDS, Launched, gauge, until_idle
from tokenizer_files import write_model

from hexgen2.checks import violations
from hexgen2.placement import Placement

CLUSTER = """
name: four-cores
nodes:
  - {name: a, accelerators: "Big:1", interconnect: shared-memory}
  - {name: b, accelerators: "Mid:1", interconnect: shared-memory}
  - {name: c, accelerators: "Mid:1", interconnect: shared-memory}
  - {name: d, accelerators: "Small:1", interconnect: shared-memory}
network:
  default: {bandwidth_gbit_s: 16, latency_us: 100}
accelerators:
  Big: {memory_gib: 0.0050, bf16_dense_tflops: 0.2, memory_bandwidth_gbyte_s: 10, kind: cpu}
  Mid: {memory_gib: 0.0045, bf16_dense_tflops: 0.1, memory_bandwidth_gbyte_s: 10, kind: cpu}
  Small: {memory_gib: 0.0040, bf16_dense_tflops: 0.1, memory_bandwidth_gbyte_s: 10, kind: cpu}
"""
PROMPT = "Every route carries"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of a model, and the file of a placement that Helix makes for it."""
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "model").mkdir()
    write_model(folder / "model")
    (folder / "cluster.yaml").write_text(CLUSTER)
    asked = ("--cluster", folder / "cluster.yaml", "--model", folder / "model", "--isl", 32, "--osl", 16)
    done = hexgen2("search", *asked, "--strategy", "helix", "-o", folder / "placement.json")
    assert done.returncode == 0, done.stderr
    return folder / "model", folder / "placement.json"


def test_a_placement_of_helix_is_searched_launched_and_used(files, tmp_path):
    model, path = files
    placement = Placement.load(path)
    assert placement.layer_ranges is not None and violations(placement) == []
    reference = Reference(model)
    server = Launched(placement, model, tmp_path)
    try:
        server.until_serving()
        with httpx.Client(base_url=server.url, timeout=SECONDS) as http:
            client = openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS
            )
            asked = {"model": placement.model.name, "max_tokens": 24, "temperature": 0}
            body = {"prompt": PROMPT, "ignore_eos": True, **asked}
            answers = [http.post("/v1/completions", json=body) for _ in range(8)]
            texts = {answer.json()["choices"][0]["text"] for answer in answers}
            assert texts == {reference.text(PROMPT)}
            paths = Counter(answer.headers["x-hexgen2-path"] for answer in answers)
            assert len(paths) > 1
            assert all(">".join(each.json()["hexgen2"]["path"]) in paths for each in answers)
            assert {each.json()["usage"]["completion_tokens"] for each in answers} == {24}

            stream = client.completions.create(
                prompt=PROMPT, stream=True, logprobs=1, extra_body={"ignore_eos": True}, **asked
            )
            pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
            assert "".join(piece.text for piece in pieces) == reference.text(PROMPT)
            assert pieces[-1].finish_reason == "length"
            stop = reference.text(PROMPT)[4:7]
            stopped = client.completions.create(prompt=PROMPT, stop=stop, **asked).choices[0]
            assert stopped.finish_reason == "stop" and stop not in stopped.text
            with http.stream(
                "POST", "/v1/completions", json=body | {"max_tokens": 200, "stream": True}
            ) as gone:
                next(gone.iter_lines())
            chat = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **asked)
            assert chat.usage is not None and 0 < chat.usage.completion_tokens <= 24
            until_idle(http)

            assert json.loads(http.get("/placement").text) == json.loads(path.read_text())
            health = http.get("/health").json()
            assert health == {"status": "ok", "replicas": {each.id: "up" for each in placement.replicas}}
            passed = {each["path"][0] for each in http.get("/requests").json()["requests"]}
            assert passed <= {replica.id for replica in placement.replicas}
            hops = sum(count * len(path.split(">")[1:]) for path, count in paths.items())
            assert gauge(http, "hexgen2_route_requests_total") > hops
            assert (
                gauge(http, "hexgen2_route_kv_bytes_total") == gauge(http, "hexgen2_preemptions_total") == 0
            )
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "vllm"], ["layer_ranges", "--engine vllm cannot run", "use --engine torch"]),
        (["--engine", "emulated"], ["layer_ranges", "--engine emulated cannot run", "use --engine torch"]),
        (["--replan"], ["--replan", "are not re-planned", "leave it out"]),
        (["--scheduler", "memory"], ["--scheduler", "memory", "use one of flow, swarm, random"]),
    ],
)
def test_what_ranges_of_layers_do_not_have_is_refused(files, options, words):
    model, path = files
    line = refused(hexgen2("launch", path, "--model-path", model, "--port", 0, *options))
    assert all(word in line for word in words), line

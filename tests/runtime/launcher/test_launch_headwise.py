"""Search with Hetis from the command line, launch the placement, and check its tokens and metrics."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from commands import hexgen2
from served import SECONDS, Launched, gauge, until_idle

from hexgen2.placement import Placement

CLUSTER = """
name: unlike-cores
nodes:
  - {name: fast, accelerators: "Fast:1", interconnect: shared-memory}
  - {name: slow, accelerators: "Slow:2", interconnect: shared-memory}
network: {default: {bandwidth_gbit_s: 100, latency_us: 1}}
accelerators:
  Fast: {memory_gib: 0.0045, bf16_dense_tflops: 1.0, memory_bandwidth_gbyte_s: 10, kind: cpu}
  Slow: {memory_gib: 0.01, bf16_dense_tflops: 0.01, memory_bandwidth_gbyte_s: 10, kind: cpu}
"""


@pytest.fixture(scope="module")
def found(model_folder, tmp_path_factory):
    """A placement in a file, and its name."""
    folder = tmp_path_factory.mktemp("hetis")
    (folder / "cluster.yaml").write_text(CLUSTER)
    inputs = ("--cluster", folder / "cluster.yaml", "--model", model_folder, "--isl", 64, "--osl", 64)
    searched = hexgen2("search", *inputs, "--strategy", "hetis", "-o", folder / "found.json")
    assert searched.returncode == 0, searched.stderr
    return folder / "found.json"


def test_what_hetis_plans_is_launched_and_gives_the_tokens_of_the_model(
    found, model_folder, reference, tmp_path
):
    placement = Placement.load(found)
    assert [worker.gpu for worker in placement.attention_workers] == ["slow/0", "slow/1"]
    server = Launched(placement, model_folder, tmp_path)
    body = {"model": placement.model.name, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    prompts = [f"the quick {'brown ' * k}fox" for k in range(4)] * 6
    try:
        server.until_serving()
        with httpx.Client(base_url=server.url, timeout=SECONDS) as http, ThreadPoolExecutor(24) as pool:
            answers = list(
                pool.map(lambda prompt: http.post("/v1/completions", json=body | {"prompt": prompt}), prompts)
            )
            until_idle(http)
            dispatched = gauge(http, "hexgen2_kv_heads_dispatched_total")
            left = gauge(http, "hexgen2_kv_heads")
            shown = http.get("/placement").json()["attention_workers"]
            up = gauge(http, "hexgen2_attention_worker_up")
        assert server.interrupt() == 0
    finally:
        server.close()
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [reference.text(prompt, 40) for prompt in prompts]
    assert dispatched > 0 and left == 0 and up == 2
    assert [worker["gpu"] for worker in shown] == ["slow/0", "slow/1"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--engine", "emulated"), "the emulated engine cannot run them; use --engine torch"),
        (("--engine", "vllm"), "the vllm engine cannot run them; use --engine torch"),
        (("--launcher", "ray"), "--launcher ray cannot start them; use --launcher local"),
        (("--replan",), "--replan cannot change their replicas; leave out --replan"),
    ],
)
def test_what_cannot_be_done_with_attention_workers_is_refused_in_one_line(
    found, model_folder, options, reason
):
    done = hexgen2("launch", found, "--model-path", model_folder, *options)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith(f"attention_workers: {reason}")


def test_what_is_left_after_a_loss_is_planned_anew_by_the_same_strategy(found, tmp_path):
    done = hexgen2("search", "--from", found, "--lost", "slow/1", "-o", tmp_path / "left.json")
    assert done.returncode == 0, done.stderr
    left = Placement.load(tmp_path / "left.json")
    assert (left.strategy, left.lost) == ("hetis", ["slow/1"])
    assert [worker.gpu for worker in left.attention_workers] == ["slow/0"]
    found_again = tmp_path / "back.json"
    back = hexgen2("search", "--from", tmp_path / "left.json", "--added", "slow/1", "-o", found_again)
    assert back.returncode == 0, back.stderr
    assert Placement.load(found_again).replicas == Placement.load(found).replicas
    slow = hexgen2("search", "--from", found, "--lost", "fast", "-o", tmp_path / "slow.json")
    assert slow.returncode == 0, slow.stderr
    assert Placement.load(tmp_path / "slow.json").attention_workers == []  # all that is left is of one type

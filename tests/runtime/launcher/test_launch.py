"""Launching, losing workers and stopping: nothing hangs, and nothing is left behind."""

import importlib.util
import json
import os
import signal
import time
from contextlib import nullcontext

import httpx
import pytest
from served import Server, alive, gauge, listens, make_placement, until_idle

from cluster_specs.loader import accelerator_of
from cost_model.architecture import ModelArchitecture
from cost_model.errors import InputError
from cost_model.families import FAMILIES as READERS
from cost_model.hardware import interconnect_link
from cost_model.models import find_model
from hexgen2.attention_workers import AttentionWorker
from hexgen2.replica import EngineSettings, Replica
from runtime.checkpoint import TORCH_FAMILIES, check_family
from runtime.kv_transfer.transports.registry import AUTO, transport_names
from runtime.launcher.configure import configurations, device_of
from runtime.options import GPU_TRANSPORTS, KV_TRANSPORTS, EngineOptions
from runtime.routing.kv_budget import kv_budgets
from runtime.routing.router import Route, routes_of

MODEL = "tiny-llama"
LONG = {
    "model": MODEL,
    "prompt": "the",
    "max_tokens": 250,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
SHORT = {"model": MODEL, "prompt": "the", "max_tokens": 4, "ignore_eos": True}
GONE_S = 60.0


@pytest.fixture
def launch(model_folder, tmp_path):
    servers = []

    def start(**options):
        servers.append(Server(options.pop("model", model_folder), tmp_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def until_gone(processes):
    deadline = time.monotonic() + GONE_S
    while left := alive(processes):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _lose_a_decode_replica(server, http):
    """Kill one of decode-0's two workers while it streams; decode-1 must go on, and finish decode-0's
    requests too."""
    whole = http.post("/v1/completions", json=LONG | {"stream": False}).json()["choices"][0]["text"]
    texts = dict.fromkeys(range(4), "")
    struck = False
    with http.stream("POST", "/v1/completions", json=LONG | {"n": 4}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if not struck:  # at the first chunk, even if its text is still empty
                    _workers(server)[3].kill()
                    struck = True
                texts[choice["index"]] += choice["text"]
    assert line == "" or line == "data: [DONE]"
    assert list(texts.values()) == [whole] * 4
    assert "hexgen2_requests_resumed_total 0.0" not in http.get("/metrics").text
    health = http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "degraded" and "decode-0" in health.json()["reason"]
    live = http.get("/placement").json()
    assert "decode-0" not in {replica["id"] for replica in live["replicas"]}
    for _ in range(3):
        answer = http.post("/v1/completions", json=SHORT)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-hexgen2-decode-replica"] == "decode-1"


def _workers(server):
    """The worker processes in the order of their start, which is that of the GPUs."""
    fork_server = next(each for each in server.family() if "forkserver" in " ".join(each.cmdline()[:4]))
    return sorted(fork_server.children(), key=lambda each: each.pid)


def test_a_lost_worker_degrades_and_ctrl_c_stops_everything(launch):
    server = launch().until_serving()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        _lose_a_decode_replica(server, http)
        family = server.family()
        with http.stream("POST", "/v1/completions", json=LONG | {"n": 16}) as response:
            lines = response.iter_lines()
            next(lines)
            code = server.interrupt()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and "stopping" in json.loads(events[-2])["error"]["message"]
    assert code == 0
    assert alive(family) == [] and not listens(server.port)


def test_lost_replicas_come_back_and_a_killed_server_leaves_no_worker(launch):
    """Workers are killed or stopped one after the other while requests stream, and every text is whole.
    Finally the server itself is killed."""
    server = launch(restarts=9).until_serving()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        whole = http.post("/v1/completions", json=LONG | {"stream": False}).json()["choices"][0]["text"]
        names = [each["id"] for each in http.get("/placement").json()["replicas"]]
        for number, victims in enumerate([(5,), (3,), (0, 5)]):
            texts = dict.fromkeys(range(6), "")
            struck = False
            with http.stream("POST", "/v1/completions", json=LONG | {"n": 6}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        texts[choice["index"]] += choice["text"]
                        if not struck and all(texts.values()):
                            how = signal.SIGSTOP if number % 2 else signal.SIGKILL
                            for each in [_workers(server)[victim] for victim in victims]:
                                each.send_signal(how)
                            struck = True
            assert struck and list(texts.values()) == [whole] * 6
            deadline = time.monotonic() + GONE_S
            while gauge(http, "hexgen2_replica_restarts_total") < number + 1 or _lost(http):
                assert time.monotonic() < deadline, server.log.read_text()
                time.sleep(0.05)
        until_idle(http)
        assert http.get("/health").json()["replicas"] == dict.fromkeys(names, "up")
        assert gauge(http, "hexgen2_requests_resumed_total") > 0
        assert len(_workers(server)) == 6
        for _ in range(4):
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        with http.stream("POST", "/v1/completions", json=LONG) as response:
            next(response.iter_lines())
            family = server.family()
            commands = [" ".join(each.cmdline()) for each in family]
            assert len(family) == 9  # the server, six workers, and what multiprocessing needs:
            assert any("resource_tracker" in each for each in commands)
            assert any("forkserver" in each for each in commands)
            os.kill(server.process.pid, signal.SIGKILL)
    until_gone(family)


def _lost(http):
    return {name for name, state in http.get("/health").json()["replicas"].items() if state == "lost"}


def test_a_server_killed_while_starting_leaves_no_worker(launch):
    server = launch()
    server.wait_for("starting 6 workers")
    deadline = time.monotonic() + GONE_S
    while len(server.family()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(server.process.pid, signal.SIGKILL)
    while left := alive(server.family()):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_ctrl_c_while_starting(launch):
    server = launch()
    server.wait_for("starting 6 workers")
    family = server.family()
    assert server.interrupt() == 0
    until_gone(family)


# from placement to workers


def test_models_that_only_vllm_runs_are_refused_by_the_torch_engine(model_folder):
    placement = make_placement(model_folder)
    check_family(placement, "torch", "p.json")
    mixture = placement.model_copy(update={"model": find_model("minimax-m2.5")})
    with pytest.raises(InputError, match=r"p\.json: model\.family: .*minimax_m2.*--engine vllm"):
        check_family(mixture, "torch", "p.json")
    for engine in ("vllm", "emulated"):
        check_family(mixture, engine, "p.json")


def test_attention_workers_are_refused_where_scores_become_weights_otherwise(model_folder):
    placement = make_placement(model_folder)
    workers = [AttentionWorker(gpu="a/0", replica="r", kv_shares=[1.0])]
    for family, refused in (("gemma2", True), ("gemma3", False), ("deepseek_v3", True)):
        model = placement.model.model_copy(update={"family": family})
        check_family(placement.model_copy(update={"model": model}), "torch", "p.json")
        update = {"model": model, "attention_workers": workers}
        with (
            pytest.raises(InputError, match="attention workers do not compute") if refused else nullcontext()
        ):
            check_family(placement.model_copy(update=update), "torch", "p.json")


@pytest.mark.parametrize(
    ("degree", "runs"), [("attention_data_parallel", ["vllm"]), ("expert_parallel", ["vllm", "emulated"])]
)
def test_stages_that_an_engine_does_not_run_are_refused(model_folder, degree, runs):
    placement = make_placement(model_folder)
    setattr(placement.replicas[0].stages[0], degree, 2)
    for engine in runs:
        check_family(placement, engine, "p.json")
    for engine in {"torch", "emulated"} - set(runs):
        with pytest.raises(InputError, match=rf"stages\[0\]\.{degree}.*{engine} engine.*--engine vllm"):
            check_family(placement, engine, "p.json")


def test_the_torch_engine_has_code_for_the_families_that_are_said_to_run():
    models = pytest.importorskip("runtime.engine.torch.models")
    assert {READERS[kind].family for kind in models.FAMILIES} == set(TORCH_FAMILIES)


def test_devices_are_numbered_through_the_nodes_of_this_machine(model_folder):
    placement = make_placement(model_folder)
    core = placement.cluster.nodes[0]
    pods = [core.model_copy(update={"name": f"pod-{name}", "accelerators": "H100:2"}) for name in "ab"]
    cluster = placement.cluster.model_copy(update={"nodes": [pods[0], core, pods[1]]})
    placement = placement.model_copy(update={"cluster": cluster})
    gpus = ["pod-a/0", "pod-a/1", "box/5", "pod-b/0", "pod-b/1"]
    assert [device_of(placement, gpu) for gpu in gpus] == ["cuda:0", "cuda:1", "cpu", "cuda:2", "cuda:3"]
    shared = [device_of(placement, gpu, cuda_devices=3) for gpu in gpus]
    assert shared == ["cuda:0", "cuda:1", "cpu", "cuda:2", "cuda:0"]


def test_the_kv_budget_is_what_memory_has_room_for_as_far_as_it_is_of_use(model_folder):
    placement = make_placement(model_folder)
    longest = placement.model.max_position
    roles = {replica.id: replica for replica in placement.replicas}
    for name, tokens in kv_budgets(placement).items():
        replica = roles[name]
        if replica.role == "prefill":
            batches = len(replica.stages) + 1
            assert tokens == 2 * max(longest, batches * replica.max_batch * 32)
        else:
            assert tokens == 2 * replica.max_batch * longest
    shape = {"layers": 32, "kv_heads": 8, "head_dim": 128, "max_position": 1_000_000}
    large = ModelArchitecture(**(placement.model.model_dump() | shape))
    stage = placement.replicas[0].stages[0]
    one = placement.replicas[0].model_copy(
        update={"role": "colocated", "stages": [stage.model_copy(update={"layers": (0, 32)})]}
    )
    tight = placement.model_copy(update={"model": large, "replicas": [one]})
    memory = 4 * 2**30
    (tokens,) = kv_budgets(tight).values()
    assert 0.3 * memory < tokens * large.kv_bytes_per_token < 0.9 * memory


def test_every_worker_is_told_its_replica_and_the_same_secret(model_folder):
    placement = make_placement(model_folder)
    configured = configurations(placement, model_folder, "bfloat16")
    assert list(configured) == [gpu for replica in placement.replicas for gpu in replica.gpus]
    assert len({each.secret for each in configured.values()}) == 1
    assert {each.dtype for each in configured.values()} == {"float32"}
    assert configured["box/4"].replica == "decode-0" and configured["box/4"].stages[0].workers == (
        "box/3",
        "box/4",
    )


def test_workers_fill_their_steps_as_the_placement_says(model_folder):
    placement = make_placement(model_folder)
    replicas = [
        r.model_copy(update={"engine": EngineSettings(step_tokens=96 + k, chunk_tokens=24 + k, in_flight=7)})
        for k, r in enumerate(placement.replicas)
    ]
    planned = placement.model_copy(update={"replicas": replicas})
    for options in (EngineOptions(), EngineOptions(chunk_tokens=9)):
        configured = configurations(planned, model_folder, "bfloat16", options)
        for replica in replicas:
            for gpu in replica.gpus:
                each, engine = configured[gpu], replica.engine
                assert (each.max_prefill_tokens, each.steps_in_flight) == (engine.step_tokens, 7)
                assert each.max_mixed_tokens == (options.chunk_tokens or engine.chunk_tokens)
    before = [r.model_dump(exclude={"engine"}) for r in placement.replicas]
    old = placement.model_copy(update={"replicas": [Replica(**each) for each in before]})
    steps = {g: c.steps_in_flight for g, c in configurations(old, model_folder, "bfloat16").items()}
    assert steps == {gpu: len(r.stages) for r in old.replicas for gpu in r.gpus}


def test_emulated_links_lead_from_prefill_replicas_to_wherever_a_replan_may_decode(model_folder):
    placement = make_placement(model_folder)
    configured = configurations(placement, model_folder, "bfloat16", EngineOptions(emulate_links=True))
    prefill = {gpu for each in placement.replicas if each.role == "prefill" for gpu in each.gpus}
    wanted = {(source, other) for source in prefill for other in configured if other != source}
    links = [link for each in configured.values() for link in each.kv_links]
    assert {(link.source, link.destination) for link in links} == wanted
    assert all(link.source == gpu for gpu, each in configured.items() for link in each.kv_links)
    shared_memory, _ = interconnect_link("shared-memory", accelerator_of(placement.cluster, "Core"))
    speeds = (shared_memory.bandwidth_bytes_s, shared_memory.latency_s)
    assert {(link.bandwidth_bytes_s, link.latency_s) for link in links} == {speeds}
    assert not any(each.kv_links for each in configurations(placement, model_folder, "bfloat16").values())


def test_a_transport_that_the_devices_do_not_have_is_refused(model_folder):
    placement = make_placement(model_folder)
    for name in GPU_TRANSPORTS:
        with pytest.raises(InputError, match="use one of auto, tcp, nixl"):
            configurations(placement, model_folder, "bfloat16", EngineOptions(kv_transport=name))
    configured = configurations(placement, model_folder, "bfloat16", EngineOptions(kv_transport="shm"))
    assert {each.kv_transport for each in configured.values()} == {"shm"}
    assert set(KV_TRANSPORTS) == {AUTO, *transport_names()}


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="the package nixl is there")
def test_a_transport_that_is_not_installed_is_refused(model_folder):
    placement = make_placement(model_folder)
    with pytest.raises(InputError, match="nixl is not installed; pip install"):
        configurations(placement, model_folder, "bfloat16", EngineOptions(kv_transport="nixl"))


def test_routes_follow_the_flows_and_colocated_replicas_are_routes_to_themselves(model_folder):
    placement = make_placement(model_folder)
    expected = [
        Route("prefill-0", "decode-0", 1.0),
        Route("prefill-1", "decode-0", 1.0),
        Route("prefill-1", "decode-1", 2.0),
    ]
    assert routes_of(placement) == expected
    alone = placement.replicas[0].model_copy(update={"role": "colocated"})
    placement = placement.model_copy(update={"replicas": [alone], "routes": []})
    assert routes_of(placement) == [Route("prefill-0", "prefill-0", 1.0)]

"""Launching, losing workers and stopping: nothing hangs, nothing stays behind."""

import asyncio
import json
import os
import signal
import socket
import time

import httpx
import psutil
import pytest
from served import Server, alive, listens, make_placement
from tokenizer_files import write_model, write_tokenizer

from cost_model.errors import InputError
from runtime.api.text import Detokenizer
from runtime.launcher.configure import configurations, device_of, kv_budget_tokens
from runtime.router import Route, routes_of
from runtime.serve import serve

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
GONE_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture
def launch(folder, tmp_path):
    servers = []

    def start(**options):
        servers.append(Server(options.pop("model", folder), tmp_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def until_gone(processes):
    deadline = time.monotonic() + GONE_S
    while left := alive(processes):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_lost_worker_degrades_and_ctrl_c_stops_everything(launch):
    server = launch().until_serving()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
        _lose_a_decode_replica(server, http)
        family = server.family()
        with http.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            code = server.interrupt()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and "stopping" in json.loads(events[-2])["error"]["message"]
    assert code == 0
    assert alive(family) == [] and not listens(server.port)


def _lose_a_decode_replica(server, http):
    """Kill one of decode-0's two workers while it streams; decode-1 must go on."""
    with http.stream("POST", "/v1/completions", json=LONG | {"n": 4}) as response:
        lines = response.iter_lines()
        next(lines)
        _worker(server, "box/3").kill()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert "decode-0 is lost" in json.loads(events[-2])["error"]["message"]
    health = http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "degraded" and "decode-0" in health.json()["reason"]
    live = http.get("/placement").json()
    assert "decode-0" not in {replica["id"] for replica in live["replicas"]}
    for _ in range(3):
        answer = http.post("/v1/completions", json=SHORT)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-hexgen2-decode-replica"] == "decode-1"


def _worker(server, gpu):
    """The process of a worker, found by the order in which they were started."""
    fork_server = next(each for each in server.family() if "forkserver" in " ".join(each.cmdline()[:4]))
    workers = sorted(fork_server.children(), key=lambda each: each.pid)
    return workers[int(gpu.rpartition("/")[2])]


def test_when_all_replicas_are_lost_requests_get_503(launch):
    server = launch().until_serving()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for index in (4, 5):
            _worker(server, f"box/{index}").kill() if index == 5 else None
        _worker(server, "box/0").kill()
        deadline = time.monotonic() + GONE_S
        while "prefill-0" not in http.get("/health").json().get("reason", ""):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer = http.post("/v1/completions", json=SHORT)
    assert answer.status_code in (200, 503)


def test_a_killed_server_leaves_no_worker(launch):
    server = launch().until_serving()
    family = server.family()
    assert len(family) > 6
    os.kill(server.process.pid, signal.SIGKILL)
    until_gone(family)


def test_ctrl_c_while_starting(launch):
    server = launch()
    server.wait_for("starting 6 workers")
    family = server.family()
    assert server.interrupt() == 0
    until_gone(family)


def test_a_busy_port_is_one_line(launch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = launch(port=port)
        assert server.process.wait(60) == 2
    (line,) = server.log.read_text().splitlines()
    assert f"127.0.0.1:{port}" in line and "--port" in line


def test_a_broken_checkpoint_is_one_error(launch, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    write_model(folder)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    server = launch(model=folder)
    assert server.process.wait(90) == 2
    assert "Traceback" not in server.log.read_text()
    until_gone(server.family())

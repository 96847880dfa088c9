"""A placement in a Ray cluster: the same tokens as any other launch, replicas restart, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest
from served import ROOT, SECONDS, Launched, alive, gauge, make_placement, small, until_idle

from hexgen2.placement import Placement

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
HEXGEN2, RAY = (str(Path(sys.executable).with_name(name)) for name in ("hexgen2", "ray"))
PROMPT = list(range(20, 60))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1", **more}


@pytest.fixture(scope="module")
def ray_address():
    """A Ray cluster on this machine, in a session of its own."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port = free_port()
        where = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}"]
        limits = ["--num-cpus=2", "--object-store-memory=100000000", "--include-dashboard=false"]
        process = subprocess.Popen(
            [RAY, "start", *where, *limits, "--block", "--disable-usage-stats"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + SECONDS
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None and time.monotonic() < deadline, "Ray did not start"
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGTERM)
            psutil.wait_procs(family, timeout=10)
            for each in alive(family):
                each.kill()
            process.kill()
            process.wait(SECONDS)


def ray_workers() -> list[psutil.Process]:
    """The worker processes in the Ray cluster."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "runtime.launcher.ray_actor" in (process.info["cmdline"] or []):
            found.append(process)
    return alive(found)


def complete(http: httpx.Client) -> list[str]:
    body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["tokens"]


def test_a_placement_in_ray_serves_recovers_and_leaves_nothing(
    model_folder, server, http, ray_address, tmp_path
):
    expected = complete(http)  # from the local launcher
    where = ["--launcher", "ray", "--restarts", "3"]
    fleet = Launched(make_placement(model_folder), model_folder, tmp_path, *where, RAY_ADDRESS=ray_address)
    try:
        fleet.until_serving()
        with httpx.Client(base_url=fleet.url, timeout=SECONDS) as client:
            assert [complete(client) for _ in range(4)] == [expected] * 4
            workers = ray_workers()
            assert len(workers) == 6
            victim = next(each for each in workers if "box/0" in each.cmdline())
            victim.kill()
            fleet.wait_for(r"replica prefill-0 serves again")
            deadline = time.monotonic() + SECONDS
            while client.get("/health").json()["status"] != "ok":
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert [complete(client) for _ in range(4)] == [expected] * 4
            until_idle(client)
        assert fleet.interrupt() == 0
        assert not ray_workers()
    finally:
        fleet.close()


def test_another_placement_while_a_fleet_in_ray_serves(model_folder, server, http, ray_address, tmp_path):
    expected = complete(http)
    where = ["--launcher", "ray", "--restarts", "0", "--replan", "--replan-after-s", "1"]
    placement = small(make_placement(model_folder))
    fleet = Launched(placement, model_folder, tmp_path, *where, RAY_ADDRESS=ray_address)
    try:
        fleet.until_serving()
        with httpx.Client(base_url=fleet.url, timeout=SECONDS) as client:
            assert complete(client) == expected
            next(each for each in ray_workers() if "box/5" in each.cmdline()).kill()
            fleet.wait_for(r"re-planning without box/5\n")
            deadline = time.monotonic() + SECONDS
            while not gauge(client, "hexgen2_replans_total") or client.get("/health").status_code != 200:
                assert time.monotonic() < deadline, fleet.log.read_text()
                assert complete(client) == expected
            after = Placement.model_validate_json(client.get("/placement").text)
            used = {gpu for replica in after.replicas for gpu in replica.gpus}
            assert after.lost == ["box/5"] and "box/5" not in used
            assert [complete(client) for _ in range(4)] == [expected] * 4
            assert len(ray_workers()) == len(used)
        assert fleet.interrupt() == 0
        assert not ray_workers()
    finally:
        fleet.close()


def test_too_little_room_and_no_cluster_are_one_line(model_folder, ray_address, tmp_path):
    placement = make_placement(model_folder)
    core = placement.cluster.accelerators["Core"].model_copy(update={"kind": "gpu"})
    cluster = placement.cluster.model_copy(update={"accelerators": {"Core": core}})
    path = tmp_path / "placement.json"
    placement.model_copy(update={"cluster": cluster}).save(path)
    command = [HEXGEN2, "launch", str(path), "--model-path", str(model_folder), "--launcher", "ray"]
    for address, says in ((ray_address, "needs 6 GPU"), (f"127.0.0.1:{free_port()}", "no Ray cluster")):
        done = subprocess.run(
            [*command, "--port", "0"],
            env=environment(RAY_ADDRESS=address),
            capture_output=True,
            text=True,
            timeout=SECONDS * 2,
        )
        assert done.returncode == 2, done.stderr
        assert re.search(says, done.stderr.splitlines()[-1]), done.stderr
        assert "Traceback" not in done.stderr

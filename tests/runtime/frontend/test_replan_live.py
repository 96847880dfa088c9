"""A new placement while a launched fleet serves: requests go on, and the result is valid."""

import signal
import threading
import time
from contextlib import suppress

import httpx
import psutil
import pytest
from instructions import AVX512, kernels
from served import KEY, STOP_S, Launched, alive, gauge, make_placement, small, until_idle

from hexgen2.checks import verify
from hexgen2.placement import Placement

PROMPT = "a b c d e f g h"
TOKENS = 24
LIMIT_S = 300.0


def client_of(server: Launched) -> httpx.Client:
    headers = {"Authorization": f"Bearer {server.key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=LIMIT_S)


@pytest.fixture
def launch(model_folder, tmp_path):
    servers = []

    def start(*options):
        placement = small(make_placement(model_folder))
        servers.append(Launched(placement, model_folder, tmp_path, *options, key=KEY))
        return servers[-1].until_serving()

    yield start
    for server in servers:
        server.close()


def answer(http):
    body = {
        "model": "tiny-llama",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return http.post("/v1/completions", json=body)


class Load:
    """Clients that send one request after the other until told to stop."""

    def __init__(self, server, clients=3):
        self.answers, self._stop, self._server = [], threading.Event(), server
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self):
        with client_of(self._server) as http:
            while not self._stop.is_set():
                self.answers.append(answer(http))

    def end(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        return self.answers


def wait_for(what):
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers(server):
    """The worker processes in the order of their start, which is at first that of the GPUs."""
    fork_server = next(each for each in server.family() if "forkserver" in " ".join(each.cmdline()[:4]))
    return sorted(fork_server.children(), key=lambda each: each.pid)


def check_whole(answers, expected):
    assert answers
    for each in answers:
        assert each.status_code == 200, each.text
        assert each.json()["choices"][0]["text"] == expected
        assert each.json()["usage"]["completion_tokens"] == TOKENS


def test_a_replica_that_stays_lost_brings_another_placement_and_every_request_is_whole(launch):
    server = launch("--restarts", "0", "--replan", "--replan-after-s", "1")
    with client_of(server) as http:
        expected = answer(http).json()["choices"][0]["text"]
        load = Load(server)
        workers(server)[5].kill()
        wait_for(lambda: gauge(http, "hexgen2_replans_total") >= 1)
        answers = load.end()
        check_whole([*answers, *(answer(http) for _ in range(8))], expected)
        assert len({each.headers["x-hexgen2-decode-replica"] for each in answers}) > 1
        # On an overloaded machine another worker may also have seemed dead, so that the plan omits it.
        wait_for(lambda: http.get("/health").status_code == 200)
        live = http.get("/placement").text
        placement = Placement.model_validate_json(live)
        verify(placement)
        assert "box/5" in placement.lost
        assert not {gpu for replica in placement.replicas for gpu in replica.gpus} & set(placement.lost)
        health = http.get("/health")
        assert health.status_code == 200
        assert health.json()["replicas"] == {replica.id: "up" for replica in placement.replicas}
        assert len(workers(server)) == sum(len(replica.gpus) for replica in placement.replicas)
        until_idle(http)
        again = http.post("/replan")
        assert again.status_code == 409 and "no replica is lost" in again.text
        family = server.family()
        assert server.interrupt() == 0
    assert alive(family) == []
    said = server.log.read_text()
    assert "re-planning without box/5" in said and "the new placement serves" in said


def test_on_demand_and_a_search_that_finds_nothing_leaves_the_fleet_as_it_is(launch):
    limited = ("--cpu-instructions", "avx2") if AVX512 else ()
    server = launch("--restarts", "0", "--replan", "--replan-after-s", "1000", *limited)
    if limited:
        assert {kernel for process in server.family() for kernel in kernels(process)} == {"avx2"}
    with client_of(server) as http:
        expected = answer(http).json()["choices"][0]["text"]
        assert httpx.post(server.url + "/replan").status_code == 401
        assert http.post("/replan").status_code == 409
        workers(server)[5].kill()
        wait_for(lambda: http.get("/health").status_code == 503)
        degraded = Placement.model_validate_json(http.get("/placement").text)
        verify(degraded)
        assert {"decode-1"} == {"prefill-0", "prefill-1", "decode-0", "decode-1"} - {
            replica.id for replica in degraded.replicas
        }
        check_whole([answer(http) for _ in range(4)], expected)
        # All replicas that could decode are lost as well: nothing is left to plan with.
        assert http.post("/replan").status_code == 202
        server.wait_for("the new placement serves", LIMIT_S)
        check_whole([answer(http) for _ in range(4)], expected)

        def none_is_up():
            for each in workers(server):
                with suppress(psutil.NoSuchProcess):  # It may have ended with the others.
                    each.kill()
            return "up" not in http.get("/health").json()["replicas"].values()

        wait_for(none_is_up)
        assert http.post("/replan").status_code == 202
        server.wait_for("no new placement: .*goes on as it is", LIMIT_S)
        none = answer(http)
        assert none.status_code == 503 and none.headers["retry-after"]
        assert "no replica is left" in none.json()["error"]["message"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_S) == 0


def test_an_emulated_fleet_takes_up_another_placement(launch):
    server = launch("--engine", "emulated", "--restarts", "0", "--replan", "--replan-after-s", "1")
    with client_of(server) as http:
        expected = answer(http).json()["choices"][0]["text"]
        load = Load(server)
        workers(server)[5].kill()
        wait_for(lambda: gauge(http, "hexgen2_replans_total") >= 1)
        check_whole([*load.end(), *(answer(http) for _ in range(4))], expected)
        placement = Placement.model_validate_json(http.get("/placement").text)
        verify(placement)
        assert "box/5" in placement.lost
        assert server.interrupt() == 0

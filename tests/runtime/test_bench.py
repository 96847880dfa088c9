"""`hexgen2 bench` against a launched placement: its counts agree with those of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served import FLOWS, KEY, MODEL, SECONDS, until_idle

COMMAND = str(Path(sys.executable).with_name("hexgen2"))
LENGTHS = ["--isl", "40", "--osl", "12"]


def bench(server, *options: str) -> subprocess.CompletedProcess:
    command = [COMMAND, "bench", server.url, "--api-key", KEY, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def records(http, count: int) -> list[dict]:
    return http.get("/requests").json()["requests"][-count:]


def test_it_agrees_with_the_records_of_the_server(server, http, tmp_path):
    until_idle(http)
    output = tmp_path / "results.json"
    options = ("--request-rate", "20", "--num-prompts", "24", "--seed", "3")
    done = bench(server, *LENGTHS, *options, "-o", str(output), "--json")
    assert done.returncode == 0, done.stderr
    assert output.read_text() == done.stdout
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"], found["unfinished"]) == (24, 0, 0)
    assert found["total_input_tokens"] == 24 * 40 and found["total_output_tokens"] == 24 * 12
    assert found["model"] == MODEL and found["predicted_req_s"] == 4.0
    seen = records(http, 24)
    assert all(record["prompt_tokens"] == 40 and record["output_tokens"] == 12 for record in seen)
    # The client sends a request before the server has it, and sees a token after the server does.
    spans = [record["last_token_s"] - record["arrived_s"] for record in seen]
    assert found["mean_e2el_ms"] >= 1e3 * sum(spans) / 24
    first = [record["first_token_s"] - record["arrived_s"] for record in seen]
    assert found["mean_ttft_ms"] >= 1e3 * sum(first) / 24
    for row in found["routes"]:
        own = [r for r in seen if (r["prefill_replica"], r["decode_replica"]) == (row["from"], row["to"])]
        assert row["requests"] == len(own) and row["bytes"] == sum(record["kv_bytes"] for record in own)
    assert {(row["from"], row["to"]) for row in found["routes"]} == set(FLOWS)
    assert found["replicas"]["decode-1"]["requests"] == sum(r["decode_replica"] == "decode-1" for r in seen)
    # Every token except the first has a gap before it, so their mean weighs requests equally here.
    assert found["mean_itl_ms"] == pytest.approx(found["mean_tpot_ms"])


def test_no_more_than_the_asked_concurrency(server, http):
    done = bench(server, *LENGTHS, "--num-prompts", "12", "--max-concurrency", "2", "--json")
    found = json.loads(done.stdout)
    assert found["completed"] == 12
    seen = records(http, 12)
    assert all(
        sum(other["arrived_s"] <= one["arrived_s"] < other["last_token_s"] for other in seen) <= 2
        for one in seen
    )


def test_targets_and_tables(server):
    done = bench(server, *LENGTHS, "--num-prompts", "4", "--ttft", "1e9", "--tpot", "1e9")
    assert done.returncode == 0, done.stderr
    assert "100% within the targets" in done.stdout and "prefill-1 -> decode-1" in done.stdout


def test_too_long_prompts_fail_with_the_servers_reason(server):
    done = bench(server, "--isl", "400", "--osl", "9", "--num-prompts", "3", "--json")
    found = json.loads(done.stdout)
    assert found["failed"] == 3 and found["completed"] == 0
    ((why, count),) = found["failures"].items()
    assert why.startswith("400: the longest context is") and count == 3


def test_a_wrong_key_and_a_wrong_model_are_one_line(server):
    command = [COMMAND, "bench", server.url, *LENGTHS]
    without = {key: value for key, value in os.environ.items() if key != "HEXGEN2_API_KEY"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=without)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "--api-key" in done.stderr
    done = bench(server, *LENGTHS, "--model", "gpt-5")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "gpt-5" in done.stderr and MODEL in done.stderr


def test_an_interrupt_keeps_what_was_measured(server, http):
    before = len(http.get("/requests").json()["requests"])
    command = [COMMAND, "bench", server.url, "--api-key", KEY, *LENGTHS, "--request-rate", "10", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + SECONDS
    while len(http.get("/requests").json()["requests"]) < before + 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    found = json.loads(process.communicate(timeout=SECONDS)[0])
    assert process.returncode == 0 and found["interrupted"]
    assert found["completed"] > 0 and found["completed"] + found["unfinished"] + found["failed"] == 1000
    until_idle(http)


def test_a_stream_has_a_chunk_for_every_token(client):
    prompt = list(range(50, 80))
    for seed in range(4):
        options = {"max_tokens": 20, "temperature": 1.5, "seed": seed, "extra_body": {"ignore_eos": True}}
        chunks = list(client.completions.create(model=MODEL, prompt=prompt, stream=True, **options))
        assert len(chunks) == 20

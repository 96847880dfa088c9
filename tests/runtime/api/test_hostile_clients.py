"""Hostile clients of a fleet with real workers: every request gets its answer, while the streams of others go
on with the same tokens and without more memory."""

import asyncio
import os
import random
import time

import httpx
import psutil
import pytest
from bystander import bystander
from hostile import HEAD, MALFORMED, POST, asked, exchange, heavy, hold, mutated, petty, send_all, statuses
from served import KEY, MODEL, SECONDS, Server, until_idle

SEED = int(os.environ.get("HEXGEN2_SEED", "0"))
LONGEST_S = 1.0
TRIES = 3
GROWTH_BYTES = 64 * 1024 * 1024
STREAMED = {
    "model": MODEL,
    "prompt": "the quick brown fox",
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory):
    limits = {"max_connections": 400, "max_address_connections": 300, "read_timeout_s": 5.0}
    server = Server(model_folder, tmp_path_factory.mktemp("hostile"), key=KEY, restarts=3, **limits)
    try:
        yield server.until_serving()
    finally:
        server.close()


@pytest.fixture(scope="module")
def text(fleet):
    """The answer to the streamed request while there is no attack."""
    plain = {**STREAMED, "stream": False}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=plain, headers=headers, timeout=SECONDS)
    return answer.json()["choices"][0]["text"]


def attack(fleet, text, attacks, *arguments):
    """Run an attack while a bystander streams, who must notice nothing. Another program may delay the
    bystander too, so an attack fails only if it does so every time."""
    for tries_left in reversed(range(TRIES)):
        with bystander(fleet.url, KEY, STREAMED) as seen:
            found = asyncio.run(attacks(*arguments))
            time.sleep(0.2)
        assert not seen.wrong, seen.wrong
        assert seen.texts and set(seen.texts) == {text}
        print(f"longest waits: health {seen.health_s:.2f} s, a token of a stream {seen.gap_s:.2f} s")
        if max(seen.health_s, seen.gap_s) <= LONGEST_S:
            break
        assert tries_left, (seen.health_s, seen.gap_s)
    assert " is lost (" not in fleet.log.read_text()
    return found


def memory(fleet):
    return sum(each.memory_info().rss for each in fleet.family() if each.status() != psutil.STATUS_ZOMBIE)


def test_malformed_requests_get_an_answer_or_a_close(fleet, text):
    found = attack(fleet, text, send_all, fleet.port, MALFORMED * 3)
    for request, answers in zip(MALFORMED * 3, found, strict=True):
        assert 500 not in answers, request[:200]
        assert len(answers) <= 4, request[:200]


def test_mutated_requests_get_an_answer_or_a_close(fleet, text):
    rng = random.Random(SEED)
    requests = [mutated(rng, KEY) for _ in range(600)]
    for request, answers in zip(requests, attack(fleet, text, send_all, fleet.port, requests), strict=True):
        assert not any(status >= 500 and status != 503 for status in answers), (SEED, request)


def test_bodies_that_cost_much_are_refused_before_they_do(fleet, text):
    requests = heavy(KEY)
    found = attack(fleet, text, send_all, fleet.port, requests * 2, len(requests))
    for request, answers in zip(requests * 2, found, strict=True):
        (status,) = answers
        assert status in (200, 400), request[:300]


def test_requests_of_thousands_of_parts_are_cut_short(fleet, text):
    requests = petty(KEY) * 25
    for request, answers in zip(
        requests, attack(fleet, text, send_all, fleet.port, requests, len(requests)), strict=True
    ):
        assert len(answers) <= 129 and 500 not in answers, request[:200]


async def flood(port):
    """Many connections at once: silent, slow, and with garbage."""
    garbage = [random.Random(SEED).randbytes(300) for _ in range(100)]
    silent = hold(port, [b""] * 80 + [POST] * 80 + [POST + b"Content-Length: 999\r\n\r\n"] * 80, 3.0)
    return (await asyncio.gather(silent, send_all(port, garbage, 50)))[1]


def test_slow_clients_and_floods_of_connections_leave_room_for_others(fleet, text):
    attack(fleet, text, flood, fleet.port)


async def leave_early(port):
    """Clients that ask for long answers and read nothing, or disconnect at once."""
    body = (
        b'{"model": "tiny-llama", "prompt": "a", "max_tokens": 150, "n": 2, "stream": true, "logprobs": 20}'
    )
    opened = []
    for number in range(60):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked(body, KEY))
        await writer.drain()
        if number % 3:
            writer.transport.abort() if number % 3 == 1 else writer.write_eof()
        opened.append(writer)
    await asyncio.sleep(1.0)
    for writer in opened:
        writer.transport.abort()


def test_clients_that_read_nothing_or_go_at_once_leave_nothing(fleet, text):
    attack(fleet, text, leave_early, fleet.port)
    with httpx.Client(base_url=fleet.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        until_idle(http)


def test_a_hundred_requests_in_one_write_are_answered_in_order(fleet, text):
    async def pipelined(port):
        return statuses(await exchange(port, (HEAD + b"\r\n") * 100))

    assert attack(fleet, text, pipelined, fleet.port) == [200] * 100


def test_the_fleet_is_as_it_was(fleet, text):
    """After a first round of everything, further rounds take no more memory, and all tokens stay the same."""

    async def everything():
        rng = random.Random(SEED)
        await send_all(fleet.port, [*MALFORMED, *petty(KEY), *heavy(KEY)])
        await send_all(fleet.port, [mutated(rng, KEY) for _ in range(200)])
        await leave_early(fleet.port)

    def rest():
        with httpx.Client(base_url=fleet.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
            until_idle(http)
            answer = http.post("/v1/completions", json={**STREAMED, "stream": False}, timeout=SECONDS)
            assert answer.json()["choices"][0]["text"] == text
            assert http.get("/health").json()["status"] == "ok"

    asyncio.run(everything())
    rest()
    before = memory(fleet)
    for _ in range(2):
        asyncio.run(everything())
    rest()
    assert memory(fleet) - before < GROWTH_BYTES
    log = fleet.log.read_text()
    assert "Traceback" not in log and "\x1b" not in log
    assert len(log.splitlines()) < 50, log

"""Far more requests than a launched placement can serve, and what all its processes log about them."""

import asyncio
import json
from collections import Counter

import httpx
import pytest
from served import KEY, MODEL, SECONDS, Server, gauge, until_idle


@pytest.fixture(scope="module")
def crowded(model_folder, tmp_path_factory):
    """A server with a short queue that logs everything as JSON."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEXGEN2_LOG", "INFO")
        environment.setenv("HEXGEN2_LOG_FORMAT", "json")
        server = Server(
            model_folder, tmp_path_factory.mktemp("crowded"), key=KEY, queue_limit=6, queue_timeout_s=30
        )
    try:
        yield server.until_serving()
    finally:
        server.close()


def test_each_of_too_many_requests_ends_and_nothing_is_left(crowded):
    headers = {"Authorization": f"Bearer {KEY}"}
    answers = []

    async def ask(client, number):
        prompt = [3 + (number * 7 + k) % 390 for k in range(30)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body | {"stream": number % 2 == 0})
        answers.append(answer)

    async def crowd():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=crowded.url, headers=headers, timeout=3 * SECONDS, limits=limits
        ) as client:
            await asyncio.gather(*(ask(client, number) for number in range(120)))

    asyncio.run(crowd())
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 503} and sum(statuses.values()) == 120, statuses
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1 and answer.json()["error"]["code"] == "overloaded"
        elif "stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    with httpx.Client(base_url=crowded.url, headers=headers, timeout=SECONDS) as http:
        until_idle(http)
        assert gauge(http, "hexgen2_requests_waiting") == 0
        text = http.get("/metrics").text
        assert gauge(http, "hexgen2_client_requests_total") == statuses[200]
        assert 'client="tests"' in text and KEY not in text
        blocks = {}
        for line in text.splitlines():
            if line.startswith(("hexgen2_kv_blocks_free{", "hexgen2_kv_tokens_budget{")):
                name, _, rest = line.partition("{")
                blocks[name, rest.split("}")[0]] = float(rest.split()[-1])
        for (name, replica), value in blocks.items():
            if name == "hexgen2_kv_blocks_free":
                assert value == blocks["hexgen2_kv_tokens_budget", replica] // 16


def test_a_request_can_be_followed_through_all_processes(crowded):
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "follow-me.1"}
    with httpx.Client(base_url=crowded.url, headers=headers, timeout=SECONDS) as http:
        body = {"model": MODEL, "prompt": "the", "max_tokens": 4, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.headers["x-request-id"] == "follow-me.1" and answer.json()["id"] == "cmpl-follow-me.1"
        until_idle(http)
    text = crowded.log.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    mine = [line for line in lines if line.get("request_id") == "follow-me.1"]
    assert {"time", "level", "process", "logger", "message", "attempt"} <= set(mine[0])
    front_end = [line["message"] for line in mine if line["process"] == "front end"]
    for word in ("received from tests", "routed to prefill-", "first token", "ended (length) after 4"):
        assert any(word in message for message in front_end), front_end
    workers = {(line["process"], line["replica"]) for line in mine if line["process"] != "front end"}
    assert {replica.partition("-")[0] for _, replica in workers} == {"prefill", "decode"}
    assert len({line["attempt"] for line in mine}) == 1 and KEY not in text

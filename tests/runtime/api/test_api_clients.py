"""A served placement, and clients that leave, send invalid requests, or inspect the server."""

import asyncio
import contextlib
import json
from functools import partial

import httpx
import openai
import pytest
from api_requests import CHAT, COMPLETION, JSON, check_error
from served import MODEL, SECONDS, gauge, make_placement, until_idle
from tokenizer_files import CONTEXT, write_model

from hexgen2.placement import Placement
from runtime.api.app import create_app
from runtime.api.metrics import Metrics
from runtime.api.service import Service
from runtime.api.tokenizer import ModelTokenizer
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica
from runtime.protocol.from_workers import Released, RequestFailed, StepOutput, TokenOutput
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Prefill
from runtime.routing.router import Route, Router

# clients that leave


def test_a_client_that_leaves_its_stream_frees_the_cache(http):
    until_idle(http)
    counter = 'hexgen2_requests_total{outcome="cancelled"}'
    before = gauge(http, counter)
    body = {"model": MODEL, "prompt": "the", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 32}
    for _ in range(20):  # on a busy machine, all answers may end before this client looks
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["x-hexgen2-decode-replica"].startswith("decode-")
            next(response.iter_lines())
            in_flight = gauge(http, "hexgen2_kv_tokens")
        if in_flight:
            break
    assert in_flight > 0
    until_idle(http)
    assert gauge(http, counter) > before


def test_a_client_that_gives_up_waiting_frees_the_cache(http):
    until_idle(http)
    body = {"model": MODEL, "prompt": "the", "max_tokens": 250, "ignore_eos": True, "n": 8}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.2)
    until_idle(http)
    records = http.get("/requests").json()["requests"][-8:]
    assert "cancelled" in {record["outcome"] for record in records}


def test_a_storm_of_clients_of_whom_many_leave_leaves_nothing_behind(server, http):
    until_idle(http)
    outcomes = []

    async def ask(client, number):
        prompt = [3 + (number * 7 + k) % 390 for k in range(1 + number * 13 % 100)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1 + number % 40, "n": 1 + number % 2}
        if number % 3 == 0:
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                await anext(response.aiter_lines())
        elif number % 7 == 0:
            with contextlib.suppress(httpx.TimeoutException):
                await client.post("/v1/completions", json=body, timeout=0.05)
        else:
            outcomes.append((await client.post("/v1/completions", json=body)).status_code)

    async def storm():
        async with httpx.AsyncClient(base_url=server.url, headers=http.headers, timeout=SECONDS) as client:
            await asyncio.gather(*(ask(client, number) for number in range(60)))

    asyncio.run(storm())
    assert len(outcomes) > 30 and set(outcomes) == {200}
    until_idle(http)


# errors

WRONG = {
    "unknown model": ("/v1/completions", COMPLETION | {"model": "gpt-4"}, 404, "model_not_found"),
    "answer too long": (
        "/v1/completions",
        COMPLETION | {"max_tokens": CONTEXT},
        400,
        "context_length_exceeded",
    ),
    "prompt too long": (
        "/v1/completions",
        COMPLETION | {"prompt": "x y " * 900},
        400,
        "context_length_exceeded",
    ),
    "chat too long": ("/v1/chat/completions", CHAT | {"max_tokens": CONTEXT}, 400, "context_length_exceeded"),
    "no prompt": ("/v1/completions", {"model": MODEL}, 400, None),
    "empty prompt": ("/v1/completions", COMPLETION | {"prompt": ""}, 400, None),
    "no prompts": ("/v1/completions", COMPLETION | {"prompt": []}, 400, None),
    "mixed prompt": ("/v1/completions", COMPLETION | {"prompt": [1, "a"]}, 400, None),
    "foreign token": ("/v1/completions", COMPLETION | {"prompt": [100_000]}, 400, None),
    "negative token": ("/v1/completions", COMPLETION | {"prompt": [-1]}, 400, None),
    "token of 65 bits": ("/v1/completions", COMPLETION | {"prompt": [2**64]}, 400, None),
    "text for a number": ("/v1/completions", COMPLETION | {"max_tokens": "4"}, 400, None),
    "no tokens": ("/v1/completions", COMPLETION | {"max_tokens": 0}, 400, None),
    "too hot": ("/v1/completions", COMPLETION | {"temperature": 3}, 400, None),
    "no choices": ("/v1/completions", COMPLETION | {"n": 0}, 400, None),
    "too many choices": ("/v1/completions", COMPLETION | {"prompt": ["a"] * 100, "n": 100}, 400, None),
    "a list": ("/v1/completions", [COMPLETION], 400, None),
    "no messages": ("/v1/chat/completions", CHAT | {"messages": []}, 400, None),
    "bad role": ("/v1/chat/completions", CHAT | {"messages": [{"role": "king", "content": "x"}]}, 400, None),
    "template": ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, 400, None),
    "top without": ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, None),
    "too large": ("/v1/completions", COMPLETION | {"prompt": "x" * (4 << 20)}, 413, None),
}


REFUSED = [
    {"presence_penalty": 2.5},
    {"frequency_penalty": -2.01},
    {"repetition_penalty": 0},
    {"min_p": 1.1},
    {"top_p": 0},
    {"top_k": -2},
    {"top_k": 2**31},
    {"top_k": 2**63},
    {"top_k": 2**64 - 1},
    {"top_k": 10**30},
    {"seed": 2**63},
    {"seed": -(2**63) - 1},
    {"max_tokens": 2**31},
    {"min_tokens": 2**63},
    {"stop_token_ids": [2**64]},
    {"min_tokens": -1},
    {"min_tokens": 5},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"the": 1}},
    {"logit_bias": {"100000": 1}},
    {"logit_bias": [5]},
    {"stop_token_ids": [100_000]},
    {"stop_token_ids": ["5"]},
    {"skip_special_tokens": 1},
    {"include_stop_str_in_output": "yes"},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"guided_regex": "a+"},
    {"prompt_logprobs": 1},
]
REFUSED_COMPLETIONS = [
    {"best_of": 3},
    {"best_of": 1, "n": 2},
    {"suffix": "."},
    {"echo": True, "logprobs": 1},
    {"logprobs": 21},
]


@pytest.mark.parametrize("option", REFUSED + REFUSED_COMPLETIONS, ids=str)
def test_an_option_that_is_wrong_or_not_served_is_named(http, option):
    bodies = [("/v1/completions", COMPLETION)]
    bodies += [("/v1/chat/completions", CHAT)] if option in REFUSED else []
    for path, body in bodies:
        response = http.post(path, json=body | option)
        check_error(response, 400, None)
        assert response.json()["error"]["param"] == next(iter(option))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_get_openai_errors(http, name):
    path, body, status, code = WRONG[name]
    check_error(http.post(path, json=body), status, code)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"null"])
def test_bodies_that_are_not_json_objects(http, content):
    response = http.post("/v1/completions", content=content, headers=JSON)
    check_error(response, 400, None)


def test_a_large_body_without_a_length_is_cut_off(http):
    response = http.post("/v1/completions", content=(b" " * 65536 for _ in range(80)), headers=JSON)
    check_error(response, 413, None)


def test_unknown_paths_and_methods(http):
    check_error(http.get("/v1/nothing"), 404, None)
    check_error(http.get("/v1/completions"), 405, None)
    check_error(http.get("/v1/models/other"), 404, "model_not_found")


def test_the_key_guards_all_that_clients_ask_for(server):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ключ".encode()}):
        check_error(httpx.get(server.url + "/v1/models", headers=headers), 401, "invalid_api_key")
        check_error(httpx.get(server.url + "/openapi.json", headers=headers), 401, "invalid_api_key")
        check_error(httpx.post(server.url + "/v1/completions", headers=headers), 401, "invalid_api_key")
        assert httpx.get(server.url + "/health", headers=headers).json()["status"] == "ok"
        assert httpx.get(server.url + "/live", headers=headers).status_code == 200


def test_the_client_sees_openai_exceptions(client, server):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()


def in_process(folder, queue_limit=256, link=None):
    """A client of the application without a server, with a replica that never answers or has the given
    link."""
    placement = make_placement(folder)
    link, metrics = link or Silent(), Metrics()
    replica = Replica("c", "colocated", "box/0", {"box/0": link}, 512, 4)
    coordinator = Coordinator(
        Router([Route("c", "c", 1.0)]), {"c": replica}, metrics, queue_limit=queue_limit
    )
    metrics.watch(coordinator)
    link.answer = partial(coordinator._in_flight.handle, replica)
    service = Service(placement, coordinator, ModelTokenizer.load(folder), metrics)
    transport = httpx.ASGITransport(create_app(service))
    return httpx.AsyncClient(transport=transport, base_url="http://app")


class Silent:
    """A link that drops everything."""

    heard = 0

    def send(self, message):
        pass


class Notes:
    """A link that only records what was sent."""

    heard = 0

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def prefills(model_folder, path, body):
    """The messages that a replica gets about a request whose client has left."""

    async def ask():
        link = Notes()
        async with in_process(model_folder, link=link) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post(path, json=body), 0.3)
        return [message for message in link.sent if isinstance(message, Prefill)]

    return asyncio.run(ask())


def test_every_option_reaches_the_replica(model_folder):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "017": 3.5},
        "min_tokens": 2,
        "max_tokens": 4,
        "stop_token_ids": [9, 5],
        "seed": 3,
    }
    expected = Sampling(
        **options
        | {"logit_bias": ((5, -100.0), (17, 3.5)), "stop_token_ids": (0, 5, 9), "seed": 3, "logprobs": -1}
    )
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        (prefill,) = prefills(model_folder, path, body | options)
        assert prefill.sampling == expected and prefill.sampling.needs_history
        (prefill,) = prefills(model_folder, path, body | options | {"ignore_eos": True})
        assert prefill.sampling.end_token_ids == (5, 9)
        (prefill,) = prefills(model_folder, path, body)
        assert not prefill.sampling.needs_history and prefill.sampling.end_token_ids == (0,)


def test_the_first_choice_of_each_prompt_goes_first(model_folder):
    body = COMPLETION | {"prompt": [[5], [6]], "n": 2, "best_of": 2, "seed": 3}
    sent = prefills(model_folder, "/v1/completions", body)
    assert [prefill.prompt for prefill in sent] == [(5,), (5,), (6,), (6,)]
    seeds = [prefill.sampling.seed for prefill in sent]
    assert seeds[0] == seeds[2] == 3 and seeds[1] == seeds[3] != 3


class GivesUp:
    """A link to a replica that gives up every request after some tokens."""

    heard = 0

    def __init__(self, tokens):
        self.tokens = tokens

    def send(self, message):
        if isinstance(message, Prefill):
            asyncio.get_running_loop().call_soon(self.play, message.request_id)

    def play(self, request_id):
        for index in range(self.tokens):
            output = TokenOutput(request_id=request_id, index=index, token=70 + index)
            self.answer(StepOutput(replica="c", outputs=(output,)))
        self.answer(
            RequestFailed(request_id=request_id, replica="c", text="its KV cache is torn", fault=False)
        )
        self.answer(Released(request_id=request_id, replica="c"))


@pytest.mark.parametrize(("stream", "tokens"), [(False, 0), (False, 2), (True, 0), (True, 2)])
def test_a_request_that_a_replica_gives_up_is_500_or_an_error_event(model_folder, stream, tokens, caplog):
    async def ask():
        async with in_process(model_folder, link=GivesUp(tokens)) as client:
            answer = await client.post(
                "/v1/completions", json=COMPLETION | {"max_tokens": 9, "stream": stream}
            )
            return answer, (await client.get("/metrics")).text

    answer, metrics = asyncio.run(ask())
    if stream and tokens:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert answer.status_code == 200 and events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
    else:
        check_error(answer, 500, "request_failed")
        error = answer.json()["error"]
    assert "failed at request" in error["message"] and error["code"] == "request_failed"
    assert "replica c gave up request r0: its KV cache is torn" in caplog.text
    assert 'hexgen2_kv_tokens{replica="c"} 0.0' in metrics
    assert 'hexgen2_requests_total{outcome="failed"} 1.0' in metrics


def test_a_full_queue_is_503_with_retry_after(model_folder):
    async def ask():
        async with in_process(model_folder, queue_limit=0) as client:
            answers = [
                await client.post("/v1/completions", json=COMPLETION | {"stream": s}) for s in (False, True)
            ]
            return answers, (await client.get("/metrics")).text

    answers, metrics = asyncio.run(ask())
    for answer in answers:
        check_error(answer, 503, "overloaded")
        assert int(answer.headers["retry-after"]) > 0
    assert 'hexgen2_requests_refused_total{reason="overloaded"} 2.0' in metrics


def test_chat_without_a_template_is_400(tmp_path):
    write_model(tmp_path, chat_template=None)

    async def ask():
        async with in_process(tmp_path) as client:
            return await client.post("/v1/chat/completions", json=CHAT)

    answer = asyncio.run(ask())
    check_error(answer, 400, None)
    assert "no chat template" in answer.json()["error"]["message"]


# what the server shows


def test_models_placement_and_metrics(client, http, server, tmp_path):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    path = tmp_path / "live.json"
    path.write_text(http.get("/placement").text)
    live = Placement.load(path)
    assert live == Placement.load(server.log.parent / "placement.json")
    client.completions.create(model=MODEL, prompt="the", max_tokens=24)
    until_idle(http)
    text = http.get("/metrics").text
    for name in (
        "time_to_first_token",
        "time_per_output_token",
        "inter_token_latency",
        "e2e_request_latency",
    ):
        assert gauge(http, f"hexgen2_{name}_seconds_count") > 0
    assert gauge(http, "hexgen2_requests_waiting") == 0 and gauge(http, "hexgen2_replica_up") == 4
    assert 'hexgen2_route_kv_bytes_total{decode_replica="decode-1",prefill_replica="prefill-1"}' in text
    assert json.loads(http.get("/health").text)["status"] == "ok"


def test_a_prompt_asked_again_is_found_and_its_blocks_come_back(http):
    body = {"model": MODEL, "prompt": [3 + k % 50 for k in range(100)], "max_tokens": 4, "temperature": 0}
    answers = [http.post("/v1/completions", json=body).json() for _ in range(6)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert found[0] == 0 and set(found) == {0, 96}  # whole blocks of 16, on the replicas that had the prefix
    moved = [answer["hexgen2"]["kv_bytes"] for answer in answers]
    assert 0 < min(moved) < max(moved)  # the decode replica had those blocks too
    until_idle(http)
    lines = http.get("/metrics").text.splitlines()
    free = [line for line in lines if line.startswith("hexgen2_kv_blocks_free{")]
    budgets = [line for line in lines if line.startswith("hexgen2_kv_tokens_budget{")]
    for own, budget in zip(sorted(free), sorted(budgets), strict=True):
        assert float(own.split()[-1]) == float(budget.split()[-1]) // 16
    assert any(line.startswith("hexgen2_prompt_tokens_cached_total") for line in lines)

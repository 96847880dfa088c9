"""OpenAI's own client against a served placement with real workers."""

import asyncio
import contextlib
import json
import time
from functools import cache

import httpx
import openai
import pytest
import torch
from served import Server, make_placement
from tokenizer_files import CONTEXT, SENTENCES, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hexgen2.placement import Placement
from runtime.api.app import create_app
from runtime.api.metrics import Metrics
from runtime.api.service import Service
from runtime.api.tokenizer import ModelTokenizer
from runtime.coordinator import Coordinator
from runtime.replica import Replica
from runtime.router import Route, Router

MODEL = "tiny-llama"
KEY = "a key"
KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 8 * 4
PROMPTS = [*SENTENCES, "the", "KV cache of a request 🚀", "0123", "Ein schöner Tag"]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which route?"}]
SECONDS = 60


class Reference:
    """What transformers generates from the same files."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None
        self.text = cache(self._text)

    @torch.inference_mode()
    def greedy(self, ids, count=24):
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        output = self.model.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        return output[0, len(ids) :].tolist()

    def _text(self, prompt, count=24):
        answer = self.greedy(self.tokenizer(prompt).input_ids, count)
        return self.tokenizer.decode(answer, skip_special_tokens=True)

    @torch.inference_mode()
    def logprobs(self, ids):
        return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    server = Server(folder, tmp_path_factory.mktemp("server"), key=KEY)
    try:
        yield server.until_serving()
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS
    ) as http:
        yield http


def gauge(http, name):
    """The sum over all labels of a metric."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


def until_idle(http):
    deadline = time.monotonic() + SECONDS
    while gauge(http, "hexgen2_kv_tokens") or gauge(http, "hexgen2_requests_running"):
        assert time.monotonic() < deadline, http.get("/metrics").text
        time.sleep(0.05)


# answers


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(client, reference, prompt):
    answer = client.completions.create(prompt=prompt, **GREEDY)
    assert answer.choices[0].text == reference.text(prompt)
    assert answer.choices[0].finish_reason == "length"
    length = len(reference.tokenizer(prompt).input_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 24)
    assert answer.hexgen2["kv_bytes"] == length * KV_BYTES_PER_TOKEN


def test_prompts_as_ids_and_as_lists(client, reference):
    ids = [reference.tokenizer(prompt).input_ids for prompt in PROMPTS[:3]]
    expected = [reference.text(prompt) for prompt in PROMPTS[:3]]
    for prompt in (ids, PROMPTS[:3]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[0], **GREEDY).choices[0].text == expected[0]


def test_chat_is_the_template_and_the_same_engine(client, reference):
    ids = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    expected = reference.tokenizer.decode(reference.greedy(ids), skip_special_tokens=True)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)
    parts = [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, MESSAGES[1]]
    assert client.chat.completions.create(messages=parts, **GREEDY).choices[0].message.content == expected


def test_chat_takes_what_the_context_leaves(client, reference):
    ids = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == CONTEXT - len(ids)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3, "n": 2}])
def test_streams_carry_the_same_text(client, options):
    request = {**GREEDY, **options, "prompt": SENTENCES[2]}
    whole = client.completions.create(**request)
    texts, reasons, chunks = [""] * len(whole.choices), {}, []
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 4
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-1].hexgen2["kv_bytes"] == whole.hexgen2["kv_bytes"]


def test_chat_streams_carry_the_same_text(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[-1].usage is None


def test_a_seed_repeats_itself_and_choices_differ(client):
    request = {**GREEDY, "temperature": 1.0, "seed": 7, "prompt": "the", "n": 3}
    first, second = (client.completions.create(**request) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3
    assert client.completions.create(**{**request, "n": 1}).choices[0].text == texts[0]
    assert client.completions.create(**{**request, "seed": 8}).choices[0].text != texts[0]
    narrow = {**request, "extra_body": {"ignore_eos": True, "top_k": 1}, "n": 1}
    assert client.completions.create(**narrow).choices[0].text == (
        client.completions.create(prompt="the", **GREEDY).choices[0].text
    )
    assert first.usage.completion_tokens == 72 and len(first.hexgen2["choices"]) == 3


def test_a_seed_gives_the_same_tokens_on_every_route(client, http):
    """The routes join replicas of one GPU, of two stages and of two tensor-parallel GPUs."""
    until_idle(http)
    rules = [{"temperature": 1.0}, {"temperature": 1.4, "top_p": 0.9, "extra_body": {"top_k": 50}}]
    for rule in rules:
        extra = {"ignore_eos": True, **rule.get("extra_body", {})}
        request = {"max_tokens": 40, "seed": 21, "logprobs": 0, **rule, "extra_body": extra}
        drawn = {}
        for _ in range(8):
            answer = client.completions.create(model=MODEL, prompt=SENTENCES[1], **request)
            route = (answer.hexgen2["prefill_replica"], answer.hexgen2["decode_replica"])
            drawn.setdefault(route, []).append(answer.choices[0].logprobs.tokens)
        assert len(drawn) == 3, drawn.keys()
        first = drawn["prefill-0", "decode-0"][0]
        assert len(first) == 40
        assert all(tokens == first for all_drawn in drawn.values() for tokens in all_drawn)


def test_stop_strings_cut_the_text_and_are_never_shown(client, http, reference):
    text = reference.text(SENTENCES[0])
    stop = text[7:11]
    expected = text.partition(stop)[0]
    request = {**GREEDY, "prompt": SENTENCES[0], "stop": [stop, "never there"]}
    answer = client.completions.create(**request)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    shown = ""
    for chunk in client.completions.create(stream=True, **request):
        shown += chunk.choices[0].text
        assert expected.startswith(shown)
    assert shown == expected
    until_idle(http)


def test_the_end_token_ends_an_answer(client):
    for seed in range(12):
        answer = client.completions.create(
            model=MODEL, prompt="the", temperature=2, seed=seed, n=4, max_tokens=200
        )
        if ended := [choice for choice in answer.choices if choice.finish_reason == "stop"]:
            assert all("<|end|>" not in choice.text for choice in ended)
            assert answer.usage.completion_tokens < 800
            return
    pytest.fail("no answer of 48 ended")


def test_logprobs_are_those_of_transformers(client, reference):
    ids = reference.tokenizer(SENTENCES[3]).input_ids
    answer = reference.greedy(ids, 6)
    rows = reference.logprobs([*ids, *answer])[len(ids) - 1 :]
    best = [row.max().item() for row in rows[:6]]
    request = {**GREEDY, "max_tokens": 6}
    given = client.completions.create(prompt=SENTENCES[3], logprobs=3, **request).choices[0].logprobs
    assert given.token_logprobs == pytest.approx(best, abs=1e-3)
    assert [max(top.values()) for top in given.top_logprobs] == pytest.approx(best, abs=1e-3)
    assert given.text_offset[0] == 0 and len(given.text_offset) == len(given.tokens) == 6
    chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=4, **request)
    content = chat.choices[0].logprobs.content
    assert len(content) == 6 and all(len(entry.top_logprobs) == 4 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    streamed = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=4, stream=True, **request
    )
    entries = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in content], abs=1e-5
    )


def test_one_token_is_answered_by_the_prefill_replica_alone(client, reference):
    raw = client.completions.with_raw_response.create(prompt="the", **{**GREEDY, "max_tokens": 1})
    answer = raw.parse()
    assert answer.choices[0].text == reference.text("the", 1) and answer.hexgen2["kv_bytes"] == 0
    assert raw.headers["x-hexgen2-prefill-replica"] == raw.headers["x-hexgen2-decode-replica"]


def test_sixteen_clients_at_once(server, reference, http):
    async def ask(client, number):
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2:
            return (await client.completions.create(prompt=prompt, **GREEDY)).choices[0].text
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(16)))

    expected = [reference.text(PROMPTS[number % len(PROMPTS)]) for number in range(16)]
    assert asyncio.run(all_at_once()) == expected
    until_idle(http)
    records = http.get("/requests").json()["requests"]
    routes = {(record["prefill_replica"], record["decode_replica"]) for record in records}
    assert {("prefill-0", "decode-0"), ("prefill-1", "decode-0"), ("prefill-1", "decode-1")} <= routes


# clients that leave


def test_a_client_that_leaves_its_stream_frees_the_cache(http):
    until_idle(http)
    counter = 'hexgen2_requests_total{outcome="cancelled"}'
    before = gauge(http, counter)
    body = {"model": MODEL, "prompt": "the", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 4}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["x-hexgen2-decode-replica"].startswith("decode-")
        next(response.iter_lines())
        assert gauge(http, "hexgen2_kv_tokens") > 0
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

COMPLETION = {"model": MODEL, "prompt": "the", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
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
    "text for a number": ("/v1/completions", COMPLETION | {"max_tokens": "4"}, 400, None),
    "no tokens": ("/v1/completions", COMPLETION | {"max_tokens": 0}, 400, None),
    "too hot": ("/v1/completions", COMPLETION | {"temperature": 3}, 400, None),
    "no choices": ("/v1/completions", COMPLETION | {"n": 0}, 400, None),
    "too many choices": ("/v1/completions", COMPLETION | {"prompt": ["a"] * 100, "n": 100}, 400, None),
    "echo": ("/v1/completions", COMPLETION | {"echo": True}, 400, None),
    "penalty": ("/v1/completions", COMPLETION | {"presence_penalty": 1.5}, 400, None),
    "best of": ("/v1/completions", COMPLETION | {"best_of": 3}, 400, None),
    "a list": ("/v1/completions", [COMPLETION], 400, None),
    "no messages": ("/v1/chat/completions", CHAT | {"messages": []}, 400, None),
    "bad role": ("/v1/chat/completions", CHAT | {"messages": [{"role": "king", "content": "x"}]}, 400, None),
    "template": ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, 400, None),
    "top without": ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, None),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, None),
    "too large": ("/v1/completions", COMPLETION | {"prompt": "x" * (4 << 20)}, 413, None),
}


def check_error(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"] == code


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_get_openai_errors(http, name):
    path, body, status, code = WRONG[name]
    check_error(http.post(path, json=body), status, code)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"null"])
def test_bodies_that_are_not_json_objects(http, content):
    response = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    check_error(response, 400, None)


def test_a_large_body_without_a_length_is_cut_off(http):
    response = http.post("/v1/completions", content=(b" " * 65536 for _ in range(80)))
    check_error(response, 413, None)


def test_unknown_paths_and_methods(http):
    check_error(http.get("/v1/nothing"), 404, None)
    check_error(http.get("/v1/completions"), 405, None)
    check_error(http.get("/v1/models/other"), 404, "model_not_found")


def test_the_key_guards_all_but_health_and_metrics(server):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ключ".encode()}):
        for path in ("/v1/models", "/placement", "/requests"):
            check_error(httpx.get(server.url + path, headers=headers), 401, "invalid_api_key")
        check_error(httpx.post(server.url + "/v1/completions", headers=headers), 401, "invalid_api_key")
        assert httpx.get(server.url + "/health", headers=headers).json()["status"] == "ok"
        assert httpx.get(server.url + "/metrics", headers=headers).status_code == 200


def test_the_client_sees_openai_exceptions(client, server):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()


def in_process(folder, queue_limit=256):
    """A client of the application alone, over a replica that never answers."""
    placement = make_placement(folder)
    idle = Replica("c", "colocated", "box/0", {"box/0": Silent()}, 512, 4)
    coordinator = Coordinator(Router([Route("c", "c", 1.0)]), {"c": idle}, queue_limit=queue_limit)
    service = Service(placement, coordinator, ModelTokenizer.load(folder), Metrics())
    transport = httpx.ASGITransport(create_app(service, None))
    return httpx.AsyncClient(transport=transport, base_url="http://app")


class Silent:
    """A link to nobody."""

    def send(self, message):
        pass


def test_a_full_queue_is_503_with_retry_after(folder):
    async def ask():
        async with in_process(folder, queue_limit=0) as client:
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
    client.completions.create(prompt="the", **GREEDY)
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

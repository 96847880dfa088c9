"""Requests do not affect each other: each client gets its own answer, and the fleet keeps serving."""

from __future__ import annotations

import json

import httpx
import pytest
from api_requests import CHAT, COMPLETION, JSON, check_error
from instant import instant_server
from served import MODEL

from runtime.api.schemas import Accepted
from runtime.api.tokenizer import ModelTokenizer
from runtime.options import FrontOptions

HALF = b"\\ud800"
BIASES = {str(token): 1 for token in range(1025)}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"model": "tiny-llama", "prompt": "a%b"}', "prompt"),
        ("/v1/completions", b'{"model": "tiny-llama", "prompt": ["a", "%b"]}', "prompt"),
        ("/v1/completions", b'{"model": "tiny-llama", "prompt": "a", "stop": ["%b"]}', "stop"),
        (
            "/v1/chat/completions",
            b'{"model": "tiny-llama", "messages": [{"role": "user", "content": "%b"}]}',
            "messages",
        ),
    ],
)
def test_half_characters_are_refused(http, path, body, param):
    response = http.post(path, content=body % HALF, headers=JSON)
    check_error(response, 400, None)
    assert response.json()["error"]["param"] == param
    assert http.post(path, content=body % b"\\ud83d\\ude00", headers=JSON).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"])
def test_a_body_that_does_not_say_that_it_is_json_is_refused(http, kind):
    """Browsers let a web page send such a body to another site without asking."""
    body = json.dumps(COMPLETION).encode()
    response = http.post("/v1/completions", content=body, headers={"Content-Type": kind} if kind else {})
    check_error(response, 415, None)
    for good in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert http.post("/v1/completions", content=body, headers={"Content-Type": good}).status_code == 200


@pytest.mark.parametrize(
    "option",
    [{"top_k": 2**31 - 1}, {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"temperature": 5e-324}],
    ids=str,
)
def test_the_ends_of_ranges_are_served(http, option):
    """The engine serves them, and other requests afterwards."""
    for body in (COMPLETION | option, COMPLETION):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "more", "param", "option"),
    [
        ("/v1/completions", {"stop": ["x"] * 5}, "stop", "--max-stop-strings"),
        ("/v1/completions", {"stop": ["x"] * 100_000}, "stop", "--max-stop-strings"),
        ("/v1/completions", {"stop": "x" * 257}, "stop", "--max-stop-length"),
        ("/v1/completions", {"stop": ["y", "x" * 257]}, "stop", "--max-stop-length"),
        ("/v1/completions", {"stop_token_ids": [1] * 129}, "stop_token_ids", "--max-stop-token-ids"),
        (
            "/v1/completions",
            {"logit_bias": BIASES},
            "logit_bias",
            "--max-logit-bias",
        ),
        ("/v1/completions", {"prompt": ["x"] * 129}, "prompt", "--max-choices"),
        ("/v1/completions", {"prompt": [[1]] * 129}, "prompt", "--max-choices"),
        ("/v1/completions", {"prompt": ["x"] * 43, "n": 3}, "prompt", "--max-choices"),
        ("/v1/completions", {"n": 129}, "n", "--max-choices"),
        ("/v1/completions", {"n": 2**31 - 1}, "n", "--max-choices"),
        ("/v1/chat/completions", {"n": 129}, "n", "--max-choices"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}] * 2049},
            "messages",
            "--max-messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]},
            "messages",
            "--max-messages",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_more_than_there_may_be_is_refused_with_the_option_that_says_so(http, path, more, param, option):
    body = COMPLETION if path == "/v1/completions" else CHAT
    response = http.post(path, json=body | more)
    check_error(response, 400, None)
    error = response.json()["error"]
    assert error["param"] == param and option in error["message"] and len(error["message"]) < 200


def test_as_much_as_there_may_be_is_served(http):
    most = {
        "stop": ["x" * 256] * 4,
        "stop_token_ids": list(range(100, 228)),
        "logit_bias": {str(k): 1 for k in range(200)},
        "n": 4,
    }
    assert http.post("/v1/completions", json=COMPLETION | most).status_code == 200


def test_a_limit_is_an_option(model_folder):
    options = FrontOptions(max_stop_strings=7, max_choices=200, max_prompt_tokens=100)
    with instant_server(model_folder, options) as (url, _), httpx.Client(base_url=url) as http:
        assert http.post("/v1/completions", json=COMPLETION | {"stop": ["x"] * 7}).status_code == 200
        assert http.post("/v1/completions", json=COMPLETION | {"stop": ["x"] * 8}).status_code == 400
        refused = http.post("/v1/completions", json=COMPLETION | {"prompt": [[5] * 11] * 10})
        check_error(refused, 400, None)
        assert "--max-prompt-tokens" in refused.text
        assert http.post("/v1/completions", json=COMPLETION | {"prompt": [[5] * 10] * 10}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "field",
    [
        {"prompt_embeds": ["AAAA"]},
        {"structural_tag": {}},
        {"guided_json": {}},
        {"guided_whitespace_pattern": " "},
        {"temprature": 0.5},
        {"temprature": None},
        {"allowed_token_ids": [1]},
        {"length_penalty": 2},
        {"return_token_ids": True},
        {"kv_transfer_params": {"a": 1}},
        {"cache_salt": "x"},
        {"": 1},
    ],
    ids=str,
)
def test_a_field_that_would_not_be_heeded_is_refused_by_name(http, path, field):
    body = COMPLETION if path == "/v1/completions" else CHAT
    response = http.post(path, json=body | field)
    check_error(response, 400, None)
    (name,) = field
    assert response.json()["error"]["param"] == name
    assert response.json()["error"]["message"].startswith(f"{name}: ")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
        {"role": "user", "content": "x", "weight": 1},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
    ],
    ids=str,
)
def test_what_a_message_has_besides_text_is_refused(http, message):
    response = http.post("/v1/chat/completions", json=CHAT | {"messages": [*CHAT["messages"], message]})
    check_error(response, 400, None)
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert error["message"].startswith(f"messages.{len(CHAT['messages'])}.")


def test_fields_without_effect_are_accepted(http):
    fields = {
        "user": "ali",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "parallel_tool_calls": True,
        "tools": None,
        "response_format": {"type": "text"},
        "length_penalty": 1.0,
        "stream_options": {"include_obfuscation": False},
    }
    assert fields.keys() & Accepted.model_fields.keys()
    plain = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0}).json()
    given = http.post("/v1/chat/completions", json=CHAT | {"temperature": 0, **fields}).json()
    assert given["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": 5}, "prompt: must be a text"),
        ({"prompt": []}, "prompt: must be a text"),
        ({"prompt": ["a", 1]}, "prompt: starts with a text but also has something else"),
        ({"prompt": [1, "a"]}, "prompt: must have only texts, or only integers"),
        ({"prompt": [[1], "a"]}, "prompt: must have only texts, or only integers"),
        ({"prompt": [1, True]}, "prompt: must have only texts, or only integers"),
        ({"prompt": [1, 2**64]}, "prompt: has a token id outside the range from 0 to 2147483647"),
        ({"prompt": [-1]}, "prompt: has a token id outside the range from 0 to 2147483647"),
        ({"stop": 5}, "stop: "),
        ({"stop": ["a", 5]}, "stop.1: "),
        ({"logit_bias": {"x": 1}}, "logit_bias.x: "),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: "),
        ({"stream_options": {"x": 1}}, "stream_options.x: unknown field"),
        ({"temperature": 3}, "temperature: must be from 0 to 2"),
        ({"temperature": -1}, "temperature: must be from 0 to 2"),
        ({"temperature": 10**400}, "temperature: "),
        ({"top_p": 0}, "top_p: must be above 0 and at most 1"),
        ({"top_k": 2**63}, "top_k: must be from -1 to 2147483647"),
        ({"presence_penalty": 3}, "presence_penalty: must be from -2 to 2"),
        ({"seed": 2**64}, f"seed: must be from {-(2**63)} to {2**63 - 1}"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids.1: must be from 0 to 2147483647"),
        ({"logit_bias": {"5": -101}}, "logit_bias.5: must be from -100 to 100"),
    ],
    ids=str,
)
def test_a_refusal_says_where_the_fault_is(http, body, said):
    response = http.post("/v1/completions", json=COMPLETION | body)
    check_error(response, 400, None)
    assert response.json()["error"]["message"].startswith(said), response.text


def test_a_missing_field_is_named(http):
    response = http.post("/v1/completions", json={"model": MODEL})
    check_error(response, 400, None)
    assert response.json()["error"]["message"] == "prompt: is missing"


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b'{"a":' * 500_000,
        b"[" + b"[]," * 1_000_000 + b"[]]",
        b'{"model": "m", "prompt": ' + b"1" * 4_000_000 + b"}",
        b'{"prompt": "' + b"\\ud83d" * 600_000 + b'"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999, "model": "tiny-llama", "prompt": "x"}',
        b'"' * 4_000_000,
        b"\xef\xbb\xbf{}",
        b"\x00" * 1000,
        b'{"model": "tiny-llama", "prompt": "x", "' + b"k" * 1_000_000 + b'": 1}',
        b"{" + b",".join(b'"%d":0' % k for k in range(300_000)) + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_bombs_are_400(http, content):
    response = http.post("/v1/completions", content=content, headers=JSON)
    check_error(response, 400, None)
    assert len(response.text) < 1000


def test_brackets_in_a_text_are_no_structure(http):
    text = '{"[' * 20_000
    response = http.post("/v1/completions", json=COMPLETION | {"prompt": text})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_refused_by_its_bytes(model_folder):
    """Without tokenizing it."""

    class Untouched(ModelTokenizer):
        def encode(self, text):
            raise AssertionError("the text was tokenised")

    with instant_server(model_folder) as (url, _):
        service_of = Untouched.load(model_folder)
        longest = max(len(token.encode()) for token in service_of._core.get_vocab())
        assert service_of.token_bytes == longest
        response = httpx.post(f"{url}/v1/completions", json=COMPLETION | {"prompt": "x" * 2_000_000})
        check_error(response, 400, "context_length_exceeded")
        assert "2000000 bytes" in response.text


def test_usage_comes_with_every_chunk_that_asks_for_it(http):
    body = COMPLETION | {"stream": True, "max_tokens": 4, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    lines = http.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 4
    assert all("usage" in chunk for chunk in chunks)

"""What one client sends does not reach another: each gets its own answer, and the fleet serves on."""

from __future__ import annotations

import json

import pytest
from test_api_clients import COMPLETION, JSON, check_error

HALF = b"\\ud800"


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
    """What a web page could send to another site without asking."""
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
    """By the engine, which answers others afterwards."""
    for body in (COMPLETION | option, COMPLETION):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text

"""The API against requests generated from its own schema, and against arbitrary bodies."""

import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from instant import instant_server
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import MODEL

JSON = {"Content-Type": "application/json"}
EXAMPLES = 30
QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def instant(model_folder):
    with instant_server(model_folder) as (url, coordinator):
        yield url, coordinator


@pytest.fixture(scope="module")
def described(instant):
    return schemathesis.openapi.from_url(f"{instant[0]}/openapi.json")


def test_the_description_names_every_path_and_its_errors(instant):
    schema = httpx.get(f"{instant[0]}/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/live",
        "/metrics",
        "/placement",
        "/requests",
    }
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]) and "422" not in operation[
                "responses"
            ]
    chat = schema["components"]["schemas"]["ChatRequest"]
    assert {"model", "messages"} == set(chat["required"]) and "enum" in chat["properties"]["tools"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/placement"),
        ("GET", "/requests"),
    ],
)
def test_no_request_that_fits_the_description_is_an_error_of_the_server(described, method, path):
    operation = described[path][method]

    @QUIET
    @given(case=operation.as_strategy())
    def check(case):
        if isinstance(case.body, dict) and len(case.body) > 1:
            case.body = {**case.body, "model": MODEL}
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "prompt",
        "messages",
        "n",
        "max_tokens",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "seed",
        "best_of",
        "echo",
        "min_tokens",
        "max_completion_tokens",
        "tools",
        "response_format",
        "skip_special_tokens",
    ]
)


@QUIET
@given(st.sampled_from(["completions", "chat/completions"]), st.dictionaries(KEYS, JUNK, max_size=4))
def test_options_of_any_kind_get_an_answer_or_an_error_of_the_client(instant, kind, options):
    chat = {"messages": [{"role": "user", "content": "the"}]}
    body = {
        "model": MODEL,
        "max_tokens": 2,
        **(chat if kind != "completions" else {"prompt": "the"}),
        **options,
    }
    answer = httpx.post(f"{instant[0]}/v1/{kind}", content=json.dumps(body), headers=JSON, timeout=30)
    assert answer.status_code in (200, 400), (answer.status_code, body, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@QUIET
@given(st.binary(max_size=200))
def test_bodies_of_any_bytes_are_errors_of_the_client(instant, body):
    answer = httpx.post(f"{instant[0]}/v1/completions", content=body, headers=JSON, timeout=30)
    assert answer.status_code == 400 and "error" in answer.json()


def test_afterwards_nothing_is_held(instant):
    coordinator = instant[1]
    assert coordinator.waiting == 0
    assert not any(replica.held for replica in coordinator.replicas.values())

"""Fixtures of the runtime's tests: one served placement for all API tests, its clients, and a receiver of KV
caches."""

import httpx
import openai
import pytest
from kv_pairs import HALF, Pool, Receiving
from reference import Reference
from served import KEY, SECONDS, Server
from tokenizer_files import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny Llama with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="session")
def reference(model_folder):
    return Reference(model_folder)


@pytest.fixture(scope="session")
def server(model_folder, tmp_path_factory):
    server = Server(model_folder, tmp_path_factory.mktemp("server"), key=KEY)
    try:
        yield server.until_serving()
    finally:
        server.close()


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS)


@pytest.fixture(scope="session")
def http(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=SECONDS) as http:
        yield http


@pytest.fixture
def receiving():
    """The worker d/0, which holds half of the heads and no layer 0."""
    there = Receiving("d/0", Pool(HALF))
    yield there
    there.close()

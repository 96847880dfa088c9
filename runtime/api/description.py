"""The responses in /openapi.json: OpenAI's objects with this server's additions."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from runtime.api.schemas import ChatRequest, CompletionRequest


class _Described(BaseModel):
    model_config = ConfigDict(extra="allow")


class Fault(_Described):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Described):
    error: Fault


class CachedTokens(_Described):
    cached_tokens: int


class Usage(_Described):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Trace(_Described):
    """Where the request ran, and how many bytes of KV cache moved for it; through ranges of layers, also the
    path that it took."""

    prefill_replica: str
    decode_replica: str
    kv_bytes: int
    path: list[str] = []


class _Answer(_Described):
    """The fields that text and chat completions share; object and choices depend on the kind."""

    id: str
    object: str
    created: int
    model: str
    choices: Any
    usage: Usage
    hexgen2: Trace


class CompletionChoice(_Described):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class AssistantMessage(_Described):
    role: Literal["assistant"]
    content: str


class ChatChoice(_Described):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(_Described):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Described):
    object: Literal["list"]
    data: list[ModelCard]


class Health(_Described):
    status: Literal["ok", "degraded"]
    reason: str = ""
    replicas: dict[str, Literal["up", "starting", "lost"]]


EVENTS: dict[str, Any] = {"text/event-stream": {}}
REFERENCE = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest)
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid, too large, too slow, or not allowed"},
    "5XX": {"model": ErrorBody, "description": "The server is overloaded (with Retry-After), or failed"},
}


def answers(model: type[BaseModel], streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an endpoint that returns a model, or streams it on request."""
    return {200: {"model": model, "content": EVENTS} if streamed else {"model": model}}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint whose body is parsed as a model (see `describe`)."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, with_keys: bool) -> None:
    """Serve /openapi.json; with_keys: it says that clients need an API key."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = schema.setdefault("components", {})
            bodies = [(model, "validation") for model in BODIES]
            _, definitions = models_json_schema(bodies, ref_template=REFERENCE)  # type: ignore[arg-type]
            components.setdefault("schemas", {}).update(definitions["$defs"])
            if with_keys:
                schemes = components.setdefault("securitySchemes", {})
                schemes["key"] = {"type": "http", "scheme": "bearer"}
                schema["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]

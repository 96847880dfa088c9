"""Streamed completions from an OpenAI endpoint, measured token by token."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cost_model.errors import InputError
from hexgen2.bench.http import HttpError, Response, Server
from hexgen2.bench.measurements import Measurements

_TOKEN_IDS = range(16, 240)
"""Token ids that exist in every vocabulary and are rarely special tokens."""
_WORDS = ("a", "and", "be", "have", "in", "it", "not", "of", "on", "that", "the", "to", "with", "you")
"""Words that are a single token each, space included, in the usual vocabularies."""
_REFUSED = (400, 404, 415, 422)
_DATA, _DONE = b"data:", b"[DONE]"


@dataclass(frozen=True)
class Dialect:
    """What a server supports beyond the plain API.

    Attributes
    ----------
    token_ids : prompts may be token ids; otherwise they are words, each counted as one token
    ignore_eos : answers have exactly the requested length; otherwise they may be shorter
    """

    token_ids: bool = True
    ignore_eos: bool = True


class Failure(Exception):
    """A request that got no complete answer; the message says why."""


async def find_model(server: Server, wanted: str | None) -> str:
    """The model to request: the first that the server has, or `wanted` if the server has it.

    Raises
    ------
    InputError : the server cannot be reached, rejects the key, or lacks the model
    """
    url = server.address.url
    try:
        response = await server.get("/v1/models")
        body = await response.read()
    except HttpError as error:
        remedy = "start it (`hexgen2 launch`), or correct the URL"
        raise InputError(url, "", f"cannot be reached ({error})", remedy) from error
    if response.status in (401, 403):
        raise InputError("--api-key", "", f"is missing or wrong ({_message(body)})", "give the server's key")
    served = _ids(body) if response.status == 200 else []
    if wanted is None:
        if not served:
            problem = f"/v1/models names no model (status {response.status})"
            raise InputError(url, "", problem, "give the URL of an OpenAI server, or --model")
        return served[0]
    if served and wanted not in served:
        raise InputError("--model", wanted, f"is not served by {url}", f"use one of {', '.join(served)}")
    return wanted


async def find_dialect(server: Server, model: str) -> Dialect:
    """What the server supports, found with requests for two tokens, which also warm it up.

    Raises
    ------
    InputError : the server answers no completion request
    """
    said = ""
    for ignore_eos, token_ids in itertools.product((True, False), repeat=2):
        dialect = Dialect(token_ids, ignore_eos)
        try:
            response = await server.post("/v1/completions", request_body(model, dialect, 4, 2))
            body = await response.read()
        except HttpError as error:
            raise InputError(
                server.address.url, "/v1/completions", str(error), "see the server's log"
            ) from None
        if response.status == 200:
            return dialect
        said = f"answers {response.status}: {_message(body)}"
        if response.status not in _REFUSED:
            break
    raise InputError(server.address.url, "/v1/completions", said, "give a server that supports completions")


def request_body(model: str, dialect: Dialect, isl: int, osl: int, rng: random.Random | None = None) -> bytes:
    """A JSON request for osl tokens after a random prompt of isl tokens."""
    choices = (rng or random.Random(0)).choices
    prompt: Any = choices(_TOKEN_IDS, k=isl) if dialect.token_ids else " ".join(choices(_WORDS, k=isl))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": osl,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if dialect.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()


async def complete(
    server: Server, body: bytes, index: int, seen: Measurements, clock: Callable[[], float]
) -> None:
    """Send one request and record its answer in `seen`."""
    seen.sent_s[index] = clock()
    try:
        response = await server.post("/v1/completions", body)
        if response.status != 200:
            raise Failure(f"{response.status}: {_message(await response.read())}")
        await _follow(response, index, seen, clock)
    except (Failure, HttpError) as error:
        seen.failed[index] = str(error)


async def _follow(response: Response, index: int, seen: Measurements, clock: Callable[[], float]) -> None:
    """Read the events of a stream to its end; the request has ended only if its answer is complete."""
    tokens, last, finished, counted = 0, 0.0, False, False
    async for line in response.lines():
        if not line.startswith(_DATA):
            continue
        now = clock()
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            continue
        event = _event(data)
        if event.error:
            response.close()
            raise Failure(event.error)
        if event.usage:
            counted = True
            seen.isl[index], seen.osl[index] = event.usage
        if event.route:
            seen.routes[index] = event.route
        if not event.is_token:
            continue
        if tokens:
            seen.gap_s.append(now - last)
        else:
            seen.first_s[index] = now
        tokens, last = tokens + 1, now
        finished = finished or event.is_last
    if not finished:
        raise Failure("the stream ended before the answer did")
    if not counted:
        seen.osl[index] = tokens
    seen.end_s[index] = last


class _Event(NamedTuple):
    """The content of a stream event.

    Attributes
    ----------
    usage : prompt and output tokens, as counted by the server
    route : prefill replica and decode replica, or the replicas of its path, and the KV bytes moved
    """

    error: str = ""
    is_token: bool = False
    is_last: bool = False
    usage: tuple[int, int] | None = None
    route: tuple[tuple[str, ...], int] | None = None


def _event(data: bytes) -> _Event:
    try:
        event = json.loads(data)
        if "error" in event:
            return _Event(error=_error_text(event["error"]))
        choices, usage, where = event.get("choices"), event.get("usage"), event.get("hexgen2")
        return _Event(
            is_token=bool(choices),
            is_last=bool(choices and choices[0].get("finish_reason")),
            usage=(int(usage["prompt_tokens"]), int(usage["completion_tokens"])) if usage else None,
            route=(_replicas(where), where["kv_bytes"]) if where else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Failure("a stream event does not follow the OpenAI API") from None


def _replicas(where: dict[str, Any]) -> tuple[str, ...]:
    """The replicas that a request passed, in order."""
    return tuple(where.get("path") or (where["prefill_replica"], where["decode_replica"]))


def _ids(body: bytes) -> list[str]:
    """The names of the models in a response of /v1/models."""
    try:
        return [str(card["id"]) for card in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError):
        return []


def _message(body: bytes) -> str:
    """The message of an error response, on one line."""
    try:
        return _error_text(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return " ".join(body.decode("utf-8", "replace").split())[:200] or "no reason given"


def _error_text(error: Any) -> str:
    text = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(text).split())[:200] or "no reason given"

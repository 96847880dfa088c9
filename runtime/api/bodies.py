"""Reads request bodies: checks their sizes first, then parses and validates them.

No body, whatever it holds, may block the event loop: large ones are parsed in a thread, in steps that each
hold the interpreter lock only briefly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from runtime.api.errors import ApiError, bad_request, shown
from runtime.api.workroom import Workroom
from runtime.options import FrontOptions

AT_ONCE_BYTES = 32 * 1024
MAX_CONTAINERS = 16384
"""Most objects and arrays in a body: four per message of the longest chat, times two."""
OUT_OF_RANGE = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
)
SPARE_VALUES = 262144
"""Most values in a body, not counting the tokens of its prompts."""
Body = TypeVar("Body", bound=BaseModel)


class Bodies:
    """Parses request bodies into pydantic models.

    Parameters
    ----------
    context_tokens : returns how many tokens a prompt may have now
    """

    def __init__(self, options: FrontOptions, context_tokens: Callable[[], int]) -> None:
        self._options, self._context_tokens = options, context_tokens
        self._room = Workroom("bodies", AT_ONCE_BYTES)

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The body of a request.

        Raises
        ------
        ApiError : 400, which names the field and what is wrong with it
        """
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise bad_request("the connection closed before the body was complete") from None
        return await self._room.do(len(raw), lambda: self._parse(raw, model))

    def _parse(self, raw: bytes, model: type[Body]) -> Body:
        options = self._options
        tokens = min(options.max_prompt_tokens, options.max_choices * self._context_tokens())
        fields = _json(raw, SPARE_VALUES + tokens)
        if not isinstance(fields, dict):
            raise bad_request("the body must be a JSON object")
        for name in fields:
            if name not in model.model_fields:
                raise _unknown(shown(name), shown(name))
        self._check_sizes(fields)
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            raise _explained(model, error.errors(include_url=False, include_input=False)) from None

    def _check_sizes(self, fields: dict[str, Any]) -> None:
        """Refuse lists and strings that are too long, before validating their entries."""
        options = self._options
        for name, most, option in (
            ("stop", options.max_stop_strings, "--max-stop-strings"),
            ("stop_token_ids", options.max_stop_token_ids, "--max-stop-token-ids"),
            ("logit_bias", options.max_logit_bias, "--max-logit-bias"),
            ("messages", options.max_messages, "--max-messages"),
        ):
            value = fields.get(name)
            if isinstance(value, list | dict) and len(value) > most:
                raise _too_many(name, f"has {len(value)} entries", most, option)
        prompt = fields.get("prompt")
        several = isinstance(prompt, list) and not isinstance((prompt or [0])[0], int)
        if isinstance(prompt, list) and several and len(prompt) > options.max_choices:
            raise _too_many("prompt", f"has {len(prompt)} prompts", options.max_choices, "--max-choices")
        self._check_texts(fields)

    def _check_texts(self, fields: dict[str, Any]) -> None:
        most = self._options.max_stop_length
        stop = fields.get("stop")
        for text in stop if isinstance(stop, list) else [stop]:
            if isinstance(text, str) and len(text) > most:
                raise _too_many("stop", f"has a string of {len(text)} characters", most, "--max-stop-length")
        messages = fields.get("messages")
        parts = sum(
            len(message["content"])
            for message in (messages if isinstance(messages, list) else ())
            if isinstance(message, dict) and isinstance(message.get("content"), list)
        )
        if parts > self._options.max_messages:
            raise _too_many("messages", f"has {parts} parts", self._options.max_messages, "--max-messages")


def _too_many(param: str, found: str, most: int, option: str) -> ApiError:
    return bad_request(f"{param}: {found}, but this server accepts at most {most} ({option})", param)


def _json(raw: bytes, most_values: int) -> Any:
    """Parse a body as strict JSON. A body with more parts than any valid request is refused unparsed, since
    parsing it would hold the interpreter lock for too long."""
    if _containers(raw) > MAX_CONTAINERS or raw.count(b",") > most_values:
        structure = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
        if _containers(structure) > MAX_CONTAINERS:
            raise bad_request(f"the body has more than {MAX_CONTAINERS} objects and arrays")
        if structure.count(b",") > most_values:
            message = f"the body has more than {most_values} values, the largest prompts included"
            raise bad_request(message)
    try:
        return json.loads(raw, parse_constant=_no_number)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except (ValueError, MemoryError) as error:
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}") from None


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _unknown(where: str, param: str | None) -> ApiError:
    return bad_request(f"{where}: unknown field; this server would ignore it", param)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _explained(model: type[BaseModel], errors: list[ErrorDetails]) -> ApiError:
    """The first error as a message for the client: the field, where in it, and what is wrong. For a field
    with several possible types, the error of the best-matching type is reported."""
    first = errors[0]["loc"][:1]
    error = max((each for each in errors if each["loc"][:1] == first), key=lambda each: len(each["loc"]))
    steps = [shown(step) for step in error["loc"]]
    param = steps[0] if steps else None
    if error["type"] == "extra_forbidden":
        return _unknown(".".join(steps), param)
    if error["type"] == "missing":
        return bad_request(f"{'.'.join(steps)}: is missing", param)
    if error["type"] in ("union_tag_invalid", "model_type", "dict_type"):
        return bad_request(f"{'.'.join(steps)}: must be an object", param)
    inside = [step for step in steps[1:] if not _is_a_branch(step)]
    where = ".".join([param or "body", *inside])
    if error["type"] in OUT_OF_RANGE and (allowed := _range_of(model, param or "")):
        return bad_request(f"{where}: must be {allowed}", param)
    return bad_request(f"{where}: {error['msg']}", param)


@cache
def _range_of(model: type[BaseModel], field: str) -> str:
    """The allowed range of a numeric field, or of the numbers in it; "" if there is none."""
    found = [model.model_json_schema()["properties"].get(field, {})]
    for schema in found:
        found += [*schema.get("anyOf", ()), *_inside(schema)]
        if "maximum" in schema:
            least, most = schema.get("minimum"), schema["maximum"]
            return f"from {least} to {most}" if least is not None else _above(schema)
    return ""


def _inside(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the entries of a list or an object."""
    parts = [
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("patternProperties", {}).values(),
    ]
    return [part for part in parts if isinstance(part, dict)]


def _above(schema: dict[str, Any]) -> str:
    return f"above {schema['exclusiveMinimum']} and at most {schema['maximum']}"


def _is_a_branch(step: str) -> bool:
    """Whether a step of an error location is pydantic's name for one type of a union."""
    return "[" in step or "function-" in step or step in ("str", "int")

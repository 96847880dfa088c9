"""What every request passes first: its key, its sizes, and who it comes from."""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cost_model.errors import HexGen2Error
from runtime.api.connection import MAX_HEAD_BYTES
from runtime.api.errors import ApiError, bad_request, from_serving
from runtime.api.keys import KeyRing
from runtime.generation import Origin
from runtime.options import FrontOptions

OPEN_PATHS = frozenset({"/health", "/metrics"})
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
MAX_HEADERS = 100
LONGEST_TIMEOUT_S = 1e6
BEARER = re.compile("^bearer ", re.IGNORECASE)  # schemes have no case (RFC 9110, section 11.1)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Gate:
    """ASGI middleware: gives each request an Origin (`request.state.origin`), or refuses it.

    Refused are requests without a key (401; health and metrics are open), with too many headers (431), with a
    body that is too large (413), too slow (408) or not JSON by its Content-Type (415). A client may name its
    request with X-Request-Id, which every answer carries, and say with X-Request-Timeout-S in how many
    seconds it must have ended.

    Parameters
    ----------
    check_place : raises HexGen2Error if nothing that a client asks for can be generated now: it is then
        refused before its body is read, so that refusing takes little from those who are served
    """

    def __init__(self, app: ASGIApp, options: FrontOptions, check_place: Callable[[str], None]) -> None:
        self._app, self._options, self._keys = app, options, KeyRing(options.api_keys)
        self._check_place = check_place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            origin = self._origin(scope, headers, request_id)
            if scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
                _check_json(headers)
                self._check_place(origin.client)
        except (ApiError, HexGen2Error) as error:
            refusal = error if isinstance(error, ApiError) else from_serving(error)
            await refusal.response()(scope, receive, named)
            return
        scope.setdefault("state", {})["origin"] = origin
        await self._app(scope, self._limited(receive), named)

    def _origin(self, scope: Scope, headers: Headers, request_id: str) -> Origin:
        """Who asks; raises ApiError if it may not."""
        raw = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in raw)
        if len(raw) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            message = f"there are more than {MAX_HEADERS} headers, or {MAX_HEAD_BYTES} bytes with the path"
            raise ApiError(431, message, "invalid_request_error")
        if scope["http_version"] == "1.1" and "host" not in headers:
            raise bad_request("the header Host is missing", "Host")
        client = self._client(scope, headers)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._options.max_body_bytes:
            raise ApiError(413, self._too_large(), "invalid_request_error")
        return Origin(client, request_id, _timeout_s(headers), headers.get("traceparent", ""))

    def _client(self, scope: Scope, headers: Headers) -> str:
        """The name of the client's key; of an open server, its address."""
        if self._keys and scope["path"] not in OPEN_PATHS:
            given = BEARER.sub("", headers.get("authorization", "")).strip()
            name = self._keys.name_of(given)
            if name is None:
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                raise ApiError(401, message, "invalid_request_error", code="invalid_api_key")
            return name
        return scope["client"][0] if scope.get("client") else ""

    def _too_large(self) -> str:
        return f"the body is larger than {self._options.max_body_bytes} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """A receive that ends a body that is too large, or is not all here in time."""
        received, reading = 0, True
        ends_s = asyncio.get_running_loop().time() + self._options.read_timeout_s

        async def limited() -> Message:
            nonlocal received, reading
            if not reading:
                return await receive()
            try:
                async with asyncio.timeout_at(ends_s):
                    message = await receive()
            except TimeoutError:
                took = f"the body took longer than {self._options.read_timeout_s:g} s"
                raise HTTPException(408, took) from None
            reading = message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._options.max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return limited


def _request_id(headers: Headers) -> str:
    """The client's own id of the request if it is fit for a log, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _check_json(headers: Headers) -> None:
    """Refuse a body that does not say that it is JSON: browsers send that to another site only if it agrees,
    so that no web page can post requests for whoever looks at it."""
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = "the body must be JSON; send it with Content-Type: application/json"
        raise ApiError(415, message, "invalid_request_error", "Content-Type")


def _timeout_s(headers: Headers) -> float | None:
    given = headers.get("x-request-timeout-s")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise bad_request("X-Request-Timeout-S must be a number of seconds above 0", "X-Request-Timeout-S")
    return seconds

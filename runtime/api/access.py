"""The checks that every request passes first: its key, Host name and sizes."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cost_model.errors import HexGen2Error
from runtime.api.connection import MAX_HEAD_BYTES, MAX_HEADERS, site_of
from runtime.api.errors import ApiError, bad_request, from_serving
from runtime.api.keys import KeyRing
from runtime.frontend.request import Origin
from runtime.options import FrontOptions

OPEN_PATHS = frozenset({"/health", "/live"})
CLIENT_PATHS = ("/v1/", "/openapi.json")
"""All other paths are for the operator."""
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
LONGEST_TIMEOUT_S = 1e6
BEARER = re.compile("^bearer ", re.IGNORECASE)  # schemes have no case (RFC 9110, section 11.1)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::\d{0,5})?")
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers that proxies add: the client is on another machine even if the connection is local."""
OPERATOR, ANY = "operator", "*"


class AccessControl:
    """ASGI middleware: gives each request an Origin (`request.state.origin`), or refuses it.

    It refuses requests with a Host that is not in `allowed_hosts` (403), without a key (401; /health needs
    none), with too many headers (431), with a body that is too large (413), too slow (408) or not JSON by its
    Content-Type (415), and any body while those of other requests fill the memory for them (503). A client
    may name its request with X-Request-Id, which every answer carries, and limit its time with
    X-Request-Timeout-S. HEAD is answered like GET, without the body.

    Operator paths (metrics, requests, placement) need the operator's key if there is one. Otherwise,
    if clients have keys, only this machine may read them, and changes need one of those keys.

    Parameters
    ----------
    check_place : raises HexGen2Error while no request of a client can be accepted: when the queue is full,
        requests are rejected before the body is read, which keeps rejecting cheap
    """

    def __init__(self, app: ASGIApp, options: FrontOptions, check_place: Callable[[str], None]) -> None:
        self._app, self.options, self._keys = app, options, KeyRing(options.api_keys)
        self._operator = KeyRing({OPERATOR: options.operator_key} if options.operator_key else {})
        self._check_place = check_place
        self._body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        head = scope["method"] == "HEAD"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif head:
                message = {**message, "body": b""}
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
        if head:
            scope = {**scope, "method": "GET"}
        scope.setdefault("state", {})["origin"] = origin
        body = _Body(receive, self)
        try:
            await self._app(scope, body.receive, named)
        finally:
            self._body_bytes -= body.received

    def _origin(self, scope: Scope, headers: Headers, request_id: str) -> Origin:
        """Who sends the request; raises ApiError if they may not."""
        raw = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in raw)
        if len(raw) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            message = f"there are more than {MAX_HEADERS} headers, or {MAX_HEAD_BYTES} bytes with the path"
            raise ApiError(431, message, "invalid_request_error")
        if "host" in headers:
            self._check_host(headers["host"])
        elif scope["http_version"] == "1.1":
            raise bad_request("the header Host is missing", "Host")
        client = self._client(scope, headers)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.options.max_body_bytes:
            raise ApiError(413, self.too_large(), "invalid_request_error")
        return Origin(client, request_id, _timeout_s(headers), headers.get("traceparent", ""))

    def _check_host(self, host: str) -> None:
        """Refuse unknown Host names: a web page can reach this machine by pointing its own name at it (DNS
        rebinding). Clients that send no Host (HTTP/1.0) are not browsers."""
        allowed = self.options.allowed_hosts
        if allowed is None or ANY in allowed:
            return
        found = HOST.fullmatch(host.strip().lower())
        name = found[1].rstrip(".") if found else ""
        if name not in allowed and not is_loopback(name):
            message = "this server does not serve this Host name; an operator can add it with --allowed-hosts"
            raise ApiError(403, message, "invalid_request_error", "Host")

    def _client(self, scope: Scope, headers: Headers) -> str:
        """The name of the client's key; without keys, its address or IPv6 network (see site_of)."""
        path, address = scope["path"], scope["client"][0] if scope.get("client") else ""
        site = site_of(address)
        if path in OPEN_PATHS:
            return site
        if not path.startswith(CLIENT_PATHS):
            self._check_operator(headers, address)
            if self._operator:
                return OPERATOR
            if scope["method"] in ("GET", "HEAD"):
                return site
        if not self._keys:
            return site
        name = self._keys.name_of(_bearer(headers))
        if name is None:
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, "invalid_request_error", code="invalid_api_key")
        return name

    def _check_operator(self, headers: Headers, address: str) -> None:
        if self._operator:
            if self._operator.name_of(_bearer(headers)) is None:
                message = "this needs the operator's key; send it as Authorization: Bearer KEY"
                raise ApiError(401, message, "invalid_request_error", code="invalid_api_key")
            return
        elsewhere = not is_loopback(address) or any(name in headers for name in FORWARDED)
        if self._keys and elsewhere:
            message = "only the server's own machine may use this unless it was started with --operator-key"
            raise ApiError(403, message, "invalid_request_error")

    def take(self, size: int) -> None:
        """Count bytes of a body; raises ApiError if they exceed the limit for all bodies."""
        self._body_bytes += size
        most = self.options.max_total_body_bytes
        if self._body_bytes > most:
            full = f"the bodies of the in-flight requests already take {most} bytes (--max-total-body-bytes)"
            raise ApiError(503, full, "service_unavailable", None, "overloaded", 1)

    def too_slow(self) -> str:
        """The message for such a body."""
        return f"the body took longer than {self.options.read_timeout_s:g} s (--read-timeout-s)"

    def too_large(self) -> str:
        """The message for such a body."""
        return f"the body is larger than {self.options.max_body_bytes} bytes (--max-body-bytes)"


class _Body:
    """The body of a request while it arrives, limited in size and time."""

    def __init__(self, receive: Receive, access: AccessControl) -> None:
        self._receive, self._access = receive, access
        self.received, self._reading = 0, True
        self._ends_s = asyncio.get_running_loop().time() + access.options.read_timeout_s

    async def receive(self) -> Message:
        """The next message; raises HTTPException once the body is too slow or too large."""
        if not self._reading:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._ends_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, self._access.too_slow()) from None
        self._reading = message.get("more_body", False)
        size = len(message.get("body", b""))
        self.received += size
        self._access.take(size)
        if self.received > self._access.options.max_body_bytes:
            raise HTTPException(413, self._access.too_large())
        return message


def _bearer(headers: Headers) -> str:
    return BEARER.sub("", headers.get("authorization", "")).strip()


def is_loopback(name: str) -> bool:
    """Whether a host name or address is a loopback one."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def hosts_of(front: FrontOptions, host: str) -> tuple[str, ...] | None:
    """The Host names that a server on an address accepts; None: any. A server without keys that only this
    machine can reach must refuse other names, as they come from web pages (DNS rebinding)."""
    given = front.allowed_hosts or ()
    if given or (not front.api_keys and is_loopback(host)):
        return given
    return None


def _request_id(headers: Headers) -> str:
    """The client's own id for the request if it is safe to log, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _check_json(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON. Browsers send JSON to another site only with that site's
    consent (CORS), so no web page can post requests on behalf of its visitors."""
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

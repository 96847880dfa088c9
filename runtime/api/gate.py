"""What every request passes first: the API key and the size of its body."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.api.errors import ApiError

MAX_BODY_BYTES = 4 * 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/metrics"})


class Gate:
    """ASGI middleware: 401 without the key (health and metrics are open), 413 for a body too large."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, _limited(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._api_key is not None and path not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), self._api_key.encode()):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                return ApiError(401, message, "invalid_request_error", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
            return ApiError(413, message, "invalid_request_error")
        return None


def _limited(receive: Receive) -> Receive:
    """A receive that ends a body without a length once it is too large."""
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return message

    return counted

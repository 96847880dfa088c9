"""Turns every error of the API into OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cost_model.errors import HexGen2Error
from cost_model.printable import printable
from runtime.routing.refusals import Broken, Overloaded, TimedOut, TooLong, TooMany, Unavailable

SHOWN = 64
RESTART_S = 1
"""Retry-After when a replica is lost: by then it, or another one, may serve again."""


class ApiError(Exception):
    """An error response in OpenAI's terms."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = None if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers)


def shown(name: object) -> str:
    """A name that a client sent, made printable and short enough to repeat in an error."""
    text = printable(str(name)[: SHOWN + 1])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the client's request is wrong."""
    return ApiError(400, message, "invalid_request_error", param, code)


def from_serving(error: HexGen2Error) -> ApiError:
    """The response to an error of the coordinator."""
    if isinstance(error, TooLong):
        return bad_request(str(error), code="context_length_exceeded")
    if isinstance(error, TooMany):
        return ApiError(429, str(error), "rate_limit_error", None, "too_many_requests", error.retry_after_s)
    if isinstance(error, Overloaded):
        message = f"the server is overloaded: {error}"
        return ApiError(503, message, "service_unavailable", None, "overloaded", error.retry_after_s)
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), "service_unavailable", None, "unavailable", RESTART_S)
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), "timeout", code="timeout")
    code = "request_failed" if isinstance(error, Broken) else None
    return ApiError(500, str(error), "server_error", code=code)


def install(app: FastAPI) -> None:
    """Answer every exception of the app in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HexGen2Error)
    async def on_serving_error(_: Request, error: HexGen2Error) -> JSONResponse:
        return from_serving(error).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{error.detail}: {request.method} {request.url.path}"
        return ApiError(error.status_code, where, "invalid_request_error").response()

    @app.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> JSONResponse:
        return ApiError(
            500, "internal server error; the server's log has the details", "server_error"
        ).response()

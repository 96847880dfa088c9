"""Every error of the API in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cost_model.errors import HexGen2Error
from runtime.refusals import Overloaded, TooLong, Unavailable

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 200, in OpenAI's terms."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else None
        return JSONResponse(self.body(), self.status, headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the client's request is wrong."""
    return ApiError(400, message, "invalid_request_error", param, code)


def from_serving(error: HexGen2Error) -> ApiError:
    """The answer to an error of the coordinator."""
    if isinstance(error, TooLong):
        return bad_request(str(error), code="context_length_exceeded")
    if isinstance(error, Overloaded):
        return ApiError(503, f"the server is overloaded: {error}", "service_unavailable", code="overloaded")
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), "service_unavailable", code="unavailable")
    return ApiError(500, str(error), "server_error")


def install(app: FastAPI) -> None:
    """Answer every exception of the app in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HexGen2Error)
    async def on_serving_error(_: Request, error: HexGen2Error) -> JSONResponse:
        return from_serving(error).response()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = next((str(part) for part in first["loc"] if part != "body"), None)
        if first["type"] == "json_invalid":
            return bad_request(f"the body is not valid JSON: {first['ctx']['error']}").response()
        return bad_request(f"{param or 'body'}: {first['msg']}", param).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{error.detail}: {request.method} {request.url.path}"
        return ApiError(error.status_code, where, "invalid_request_error").response()

    @app.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> JSONResponse:
        return ApiError(500, "the server made an error; its log has the details", "server_error").response()

"""The HTTP application: OpenAI's routes and those that show the placement at work."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from runtime.api import errors
from runtime.api.chat import chat_router
from runtime.api.completions import completions_router
from runtime.api.gate import Gate
from runtime.api.service import Service
from runtime.api.streaming import ClientGone

CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service, api_key: str | None) -> FastAPI:
    """The application that serves a placement.

    Parameters
    ----------
    api_key : what clients must send as bearer token, or None for an open server
    """
    app = FastAPI(title="HexGen-2", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    app.add_middleware(Gate, api_key=api_key)
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))

    @app.exception_handler(ClientGone)
    async def on_client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    def model_card() -> dict[str, Any]:
        card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "hexgen2"}
        return {**card, "max_model_len": service.context_tokens}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card()

    @app.get("/health")
    async def health() -> JSONResponse:
        state = service.health()
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/placement")
    async def placement() -> Response:
        return Response(service.live_placement().to_json(), media_type="application/json")

    @app.get("/requests")
    async def requests() -> dict[str, Any]:
        """The last requests that ended, oldest first."""
        return {"requests": [asdict(record) for record in service.coordinator.records]}

    return app

"""The HTTP application: OpenAI's routes and those that show the placement at work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from runtime.api import errors
from runtime.api.access import AccessControl
from runtime.api.chat import chat_router
from runtime.api.completions import completions_router
from runtime.api.description import ERRORS, Health, ModelCard, ModelList, answers, describe
from runtime.api.service import Service
from runtime.api.streaming import ClientGone

CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> FastAPI:
    """The application that serves a placement."""
    options = service.options
    app = FastAPI(title="HexGen-2", docs_url=None, redoc_url=None, responses=ERRORS)
    describe(app, with_keys=bool(options.api_keys))
    errors.install(app)
    app.add_middleware(AccessControl, options=options, check_place=service.check_place)
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))

    @app.exception_handler(ClientGone)
    async def on_client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    def model_card() -> dict[str, Any]:
        card = {"id": service.model, "object": "model", "created": service.created, "owned_by": "hexgen2"}
        return {**card, "max_model_len": service.context_tokens}

    @app.get("/v1/models", responses=answers(ModelList))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}", responses=answers(ModelCard))
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card()

    @app.get("/health", responses={**answers(Health), 503: {"model": Health}})
    async def health() -> JSONResponse:
        state = service.health()
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    @app.get("/live")
    async def live() -> dict[str, str]:
        """200 as long as the server answers, whatever becomes of its replicas."""
        return {"status": "live"}

    @app.get("/metrics", response_class=PlainTextResponse)
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


def add_views(app: FastAPI, views: Mapping[str, Callable[[], Any]]) -> None:
    """Let clients read what else there is to show: values for JSON, by path."""

    def endpoint(view: Callable[[], Any]) -> Callable[[], Awaitable[JSONResponse]]:
        async def show() -> JSONResponse:
            return JSONResponse(view())

        return show

    for path, view in views.items():
        app.add_api_route(path, endpoint(view), response_model=None)

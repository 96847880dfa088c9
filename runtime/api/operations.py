"""What an operator may ask of a fleet that serves."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from runtime.api.errors import ApiError


def operations_router(replan: Callable[[], bool], guarded: bool) -> APIRouter:
    """`POST /replan`: another placement without what is lost, and with what is back.

    Parameters
    ----------
    replan : begins; False if there is no reason to, or it is being done
    guarded : whether a key must be shown, the operator's or, without that, a client's; else nobody may ask
    """
    router = APIRouter()

    @router.post("/replan")
    async def on_replan() -> JSONResponse:
        if not guarded:
            message = "this takes a key; start the server with --operator-key"
            raise ApiError(403, message, "invalid_request_error")
        if not replan():
            message = "no replica is lost and no lost machine is back, or a new placement is on its way"
            raise ApiError(409, message, "invalid_request_error")
        return JSONResponse({"status": "replanning"}, 202)

    return router

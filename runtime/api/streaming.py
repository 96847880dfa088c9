"""Sends answers, whole or as server-sent events, and stops the work when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cost_model.errors import HexGen2Error
from runtime.api.answer import Answer, Piece
from runtime.api.errors import from_serving
from runtime.routing.refusals import Broken

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")
_json = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client disconnected; nobody will read the answer."""


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _json.encode(chunk) + b"\n\n"


def whole_json(content: dict[str, Any], headers: dict[str, str]) -> Response:
    """An answer that does not stream."""
    return Response(_json.encode(content), headers=headers, media_type="application/json")


class EventStream(StreamingResponse):
    """Streams the chunks of an answer, then [DONE]; the answer is closed however the stream ends.

    Chunks that are ready at the same time are sent in one write. An error after the first chunk becomes an
    event with OpenAI's error object.
    """

    def __init__(self, answer: Answer, chunks: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(_events(answer, chunks), media_type="text/event-stream", headers=answer.headers())
        self.headers["cache-control"] = "no-cache"
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _events(answer: Answer, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    events: list[bytes] = []
    try:
        async for chunk in chunks:
            events.append(event(chunk))
            if answer.must_wait:
                yield b"".join(events)
                events.clear()
    except Exception as error:
        if not isinstance(error, HexGen2Error):
            log.exception("streaming request %s failed", answer.request_id)
            error = Broken(answer.request_id)
        events.append(event(from_serving(error).body()))
    yield b"".join([*events, DONE])


async def respond(
    request: Request,
    answer: Answer,
    stream: Callable[[AsyncIterator[Piece]], AsyncIterator[dict[str, Any]]] | None,
    whole: Callable[[], Coroutine[Any, Any, Response]],
) -> Response:
    """The response: a stream of chunks made from the answer's pieces, or all at once if stream is None.

    Closes the answer if the client disconnects, or anything fails, before there is something to send."""
    try:
        if stream is None:
            return await unless_gone(request, whole())
        return EventStream(answer, stream(await unless_gone(request, first_of(answer))))
    except BaseException:
        answer.close()
        raise


async def first_of(answer: Answer) -> AsyncIterator[Piece]:
    """An answer's pieces, once the first one is there: errors before it can still set the HTTP status."""
    pieces = answer.pieces()
    first = await anext(pieces)

    async def all_pieces() -> AsyncIterator[Piece]:
        yield first
        async for piece in pieces:
            yield piece

    return all_pieces()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    Raises
    ------
    ClientGone
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

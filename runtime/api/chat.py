"""The endpoint /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from runtime.api.answer import Answer, Piece
from runtime.api.description import ChatCompletion, answers, takes
from runtime.api.errors import bad_request
from runtime.api.logprobs import Joined, chat_logprobs
from runtime.api.schemas import ChatRequest
from runtime.api.service import Service
from runtime.api.streaming import respond, whole_json
from runtime.api.tokenizer import BadChat, NoChatTemplate


def chat_router(service: Service) -> APIRouter:
    """The /v1/chat/completions endpoint of a service."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        responses=answers(ChatCompletion, streamed=True),
        openapi_extra=takes(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        body = await service.bodies.read(request, ChatRequest)
        service.check_model(body.model)
        service.check_choices(1, body.n)
        prompt = await _prompt(service, body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        max_tokens = body.max_completion_tokens or body.max_tokens
        answer = service.answer(body, [prompt], max_tokens, logprobs, request.state.origin)
        stream = partial(_chunks, service, body, answer) if body.stream else None
        return await respond(request, answer, stream, partial(_whole, service, body, answer))

    return router


async def _prompt(service: Service, body: ChatRequest) -> list[int]:
    try:
        return await service.encode_chat([message.plain() for message in body.messages])
    except NoChatTemplate:
        message = f"{service.model} has no chat template; use /v1/completions"
        raise bad_request(message, "messages") from None
    except BadChat as error:
        raise bad_request(f"the model's chat template rejects these messages: {error}", "messages") from None


async def _whole(service: Service, body: ChatRequest, answer: Answer) -> Response:
    texts = [""] * len(answer.requests)
    reasons = [""] * len(answer.requests)
    logprobs = [Joined() for _ in answer.requests]
    async for piece in answer.pieces():
        texts[piece.choice] += piece.text
        reasons[piece.choice] = piece.finish_reason
        if body.logprobs:
            logprobs[piece.choice].extend(
                {"content": chat_logprobs(service.tokenizer.token_text, piece.output)}
            )
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": logprobs[index].json() if body.logprobs else None,
            "finish_reason": reasons[index],
        }
        for index, text in enumerate(texts)
    ]
    content = {
        **answer.opening("chatcmpl", "chat.completion", service.model),
        "choices": choices,
        **answer.closing(),
    }
    return whole_json(content, answer.headers())


async def _chunks(
    service: Service, body: ChatRequest, answer: Answer, pieces: AsyncIterator[Piece]
) -> AsyncIterator[dict[str, Any]]:
    envelope = answer.opening("chatcmpl", "chat.completion.chunk", service.model)

    def chunk(index: int, delta: dict[str, str], details: Any = None, reason: str = "") -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": details, "finish_reason": reason or None}
        made = {**envelope, "choices": [choice]}
        return {**made, "usage": answer.usage()} if body.usage_in_chunks else made

    for index in range(len(answer.requests)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for piece in pieces:
        details = None
        if body.logprobs:
            details = {"content": chat_logprobs(service.tokenizer.token_text, piece.output)}
        if piece.text or piece.finish_reason or details:
            delta = {"content": piece.text} if piece.text else {}
            yield chunk(piece.choice, delta, details, piece.finish_reason)
    if body.usage_at_end:
        yield {**envelope, "choices": [], **answer.closing()}

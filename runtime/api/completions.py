"""The endpoint /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from runtime.api.answer import Answer, Piece
from runtime.api.description import Completion, answers, takes
from runtime.api.logprobs import CompletionLogprobs, Joined
from runtime.api.schemas import CompletionRequest
from runtime.api.service import Service
from runtime.api.streaming import respond, whole_json

DEFAULT_MAX_TOKENS = 16


def completions_router(service: Service) -> APIRouter:
    """The /v1/completions endpoint of a service."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        responses=answers(Completion, streamed=True),
        openapi_extra=takes(CompletionRequest),
    )
    async def complete(request: Request) -> Response:
        body = await service.bodies.read(request, CompletionRequest)
        service.check_model(body.model)
        service.check_choices(len(body.prompt), body.n)
        prompts = [
            await service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        logprobs = -1 if body.logprobs is None else body.logprobs
        answer = service.answer(
            body, prompts, body.max_tokens or DEFAULT_MAX_TOKENS, logprobs, request.state.origin
        )
        echoes = _echoes(service, body, prompts)
        stream = partial(_chunks, service, body, answer, echoes) if body.stream else None
        return await respond(request, answer, stream, partial(_whole, service, body, answer, echoes))

    return router


def _echoes(service: Service, body: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
    """The prompt that each choice's text starts with if the client asks for echo, else ""."""
    if not body.echo:
        return [""] * (len(prompts) * (body.n or 1))
    texts = [
        given if isinstance(given, str) else service.tokenizer.decode(given, body.skip_special_tokens)
        for given in body.prompt
    ]
    return [text for text in texts for _ in range(body.n or 1)]


def _choice(index: int, text: str, logprobs: Any, finish_reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason or None}


async def _whole(
    service: Service, body: CompletionRequest, answer: Answer, echoes: Sequence[str]
) -> Response:
    texts = list(echoes)
    reasons = [""] * len(answer.requests)
    logprobs = [CompletionLogprobs(service.tokenizer.token_text) for _ in answer.requests]
    joined = [Joined() for _ in answer.requests]
    async for piece in answer.pieces():
        texts[piece.choice] += piece.text
        reasons[piece.choice] = piece.finish_reason
        if body.logprobs is not None:
            logprobs[piece.choice].add(piece.output)
            joined[piece.choice].extend(logprobs[piece.choice].take())
    wanted = body.logprobs is not None
    choices = [
        _choice(index, texts[index], joined[index].json() if wanted else None, reasons[index])
        for index in range(len(texts))
    ]
    content = {
        **answer.opening("cmpl", "text_completion", service.model),
        "choices": choices,
        **answer.closing(),
    }
    return whole_json(content, answer.headers())


async def _chunks(
    service: Service,
    body: CompletionRequest,
    answer: Answer,
    echoes: Sequence[str],
    pieces: AsyncIterator[Piece],
) -> AsyncIterator[dict[str, Any]]:
    """One chunk per token, so that clients can measure latency; some have no text, as in vLLM."""
    envelope = answer.opening("cmpl", "text_completion", service.model)
    logprobs = [CompletionLogprobs(service.tokenizer.token_text) for _ in answer.requests]
    async for piece in pieces:
        details = None
        if body.logprobs is not None:
            logprobs[piece.choice].add(piece.output)
            details = logprobs[piece.choice].take()
        text = piece.text if piece.output.index else echoes[piece.choice] + piece.text
        chunk = {**envelope, "choices": [_choice(piece.choice, text, details, piece.finish_reason)]}
        yield {**chunk, "usage": answer.usage()} if body.usage_in_chunks else chunk
    if body.usage_at_end:
        yield {**envelope, "choices": [], **answer.closing()}

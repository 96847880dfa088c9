"""The bare web stack: the front end's framework and server, answering from a loop.

    python -m benchmarks.serving.web_stack PORT

It sends as many events, or as long a text, as a front end of scripted_fleet.py would, and makes each one on
the way. It omits everything that serves a model: request checks, queue, router, workers, tokenizer and
metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

TEXT = " replica"
"""The text of each token."""
app = FastAPI()


@app.post("/v1/completions")
async def complete(body: dict[str, Any]) -> Response:
    tokens = body["max_tokens"]
    if body["stream"]:
        return StreamingResponse(_events(tokens), media_type="text/event-stream")
    return JSONResponse(_completion(TEXT * tokens, "length"))


def _completion(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "model", "choices": [choice]}


async def _events(tokens: int) -> AsyncIterator[str]:
    for index in range(tokens):
        event = _completion(TEXT, "length" if index + 1 == tokens else None)
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws="none")

"""Translates requests to vLLM's completions API, and its streams to tokens (vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hexgen2.export.vllm_command import TO_PREFILL
from runtime.protocol.from_workers import TokenOutput
from runtime.protocol.message import Sampling, TokenLogprobs

_ID = "token_id:"


class EngineError(Exception):
    """vLLM failed a request. `fault`: another attempt may succeed."""

    def __init__(self, text: str, fault: bool) -> None:
        super().__init__(text)
        self.fault = fault


def completion(
    model: str, prompt: Sequence[int], sampling: Sampling, index: int, kv: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of a request for the output tokens from `index` on; `prompt` includes the earlier ones.

    kv : the prefill server's `kv_transfer_params`, which say where the prompt's KV cache is; None: nowhere
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "stream": True,
        "max_tokens": sampling.max_tokens - index,
        "min_tokens": max(sampling.min_tokens - index, 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed % 2**63,
        "ignore_eos": True,  # the output ends at these tokens instead:
        "stop_token_ids": list(sampling.end_token_ids),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs >= 0:
        body["logprobs"] = sampling.logprobs
    if kv is not None:
        body["kv_transfer_params"] = kv
    return body


def prefill(model: str, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """The body of a request that only prefills, for a decode on another server.

    Its one token is thrown away: the decode server chooses it again, with the request's sampling options.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "kv_transfer_params": TO_PREFILL,
    }


def probe(model: str) -> dict[str, Any]:
    """The body of a one-token request, which a working engine answers soon even under load."""
    return {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0.0}


def outputs_of(chunk: dict[str, Any], request_id: str, index: int, top: int) -> list[TokenOutput]:
    """The tokens in one chunk of a stream, the first of which is output `index`; top : as Sampling.logprobs.

    Raises
    ------
    EngineError : the chunk is an error, or ends the output for an unexpected reason
    """
    if "error" in chunk:
        error = chunk["error"]
        raise EngineError(str(error.get("message", error)), fault=int(error.get("code") or 500) >= 500)
    outputs: list[TokenOutput] = []
    for choice in chunk.get("choices", []):
        reason = choice.get("finish_reason") or ""
        if reason not in ("", "stop", "length"):
            raise EngineError(f"the output ended with {reason}", fault=True)
        tokens, logprobs = choice.get("token_ids") or [], choice.get("logprobs")
        for k, token in enumerate(tokens):
            last = k == len(tokens) - 1
            outputs.append(
                TokenOutput(
                    request_id=request_id,
                    index=index + len(outputs),
                    token=token,
                    finish_reason=reason if last else "",
                    logprobs=None if top < 0 or not logprobs else _logprobs(logprobs, k, top),
                )
            )
        if reason and not tokens:
            raise EngineError(f"the output ended with {reason} but without a token", fault=True)
    return outputs


def _logprobs(logprobs: dict[str, Any], k: int, top: int) -> TokenLogprobs:
    likely = (logprobs.get("top_logprobs") or [{}] * (k + 1))[k] or {}
    ranked = sorted(((int(name.removeprefix(_ID)), value) for name, value in likely.items()), key=_best)
    return TokenLogprobs(chosen=logprobs["token_logprobs"][k], top=tuple(ranked[:top]))


def _best(pair: tuple[int, float]) -> float:
    return -pair[1]

"""Logits to tokens. A token depends on (logits, seed, output index) alone."""

from __future__ import annotations

import hashlib

import torch

from runtime.messages import Sampling, TokenLogprobs


def sample(
    logits: torch.Tensor, samplings: list[Sampling], indices: list[int]
) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
    """Choose one token per row.

    Parameters
    ----------
    logits : [sequences, vocab], any float type
    samplings, indices : each sequence's rule and the output index of the token to choose

    Returns
    -------
    tokens, and log probabilities where a sequence asks for them; the latter are of the raw
    distribution, before temperature, top_k and top_p
    """
    logits = logits.float()
    tokens = logits.argmax(dim=-1).tolist()
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0:
            tokens[row] = _draw(logits[row].cpu().double(), sampling, indices[row])
    details = tuple(
        _logprobs(logits[row], token, sampling.logprobs) if sampling.logprobs >= 0 else None
        for row, (token, sampling) in enumerate(zip(tokens, samplings, strict=True))
    )
    return tuple(tokens), details


def _draw(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    """Gumbel's trick: the largest of log probability plus noise is a draw. The noise belongs to the
    token id, so that last-digit differences between replica shapes hardly ever change the draw."""
    scaled = _keep_top(logits / sampling.temperature, sampling)
    uniform = torch.rand(len(scaled), generator=_generator(sampling.seed, index), dtype=torch.float64)
    return int((scaled - torch.log(-torch.log(uniform))).argmax())


def _keep_top(scaled: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Rule out all but the top_k most likely tokens, then all but the fewest that hold top_p."""
    if 0 < sampling.top_k < len(scaled):
        smallest = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scaled.sort(descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        out = before >= sampling.top_p
        out[0] = False
        scaled = scaled.masked_fill(torch.zeros_like(out).scatter(0, order, out), -torch.inf)
    return scaled


def _generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


def _logprobs(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    values = logits.log_softmax(dim=-1)
    best, ids = values.topk(min(count, len(values)))
    return TokenLogprobs(
        chosen=float(values[token]), top=tuple(zip(ids.tolist(), best.tolist(), strict=True))
    )

"""Batching policies: how replicas mix prompts and decodes in their steps.

- "mixed": the runtime's policy. A step holds all decodes and chunks of prompts; the chunks are smaller while
  requests decode (runtime/worker/scheduler.py).
- "prefill-first": a prompt that fits runs first and whole, while decodes wait (vLLM before chunked prefill).
- "chunked": all decodes, filled up with chunks of prompts (vLLM's default; Agrawal and others, Sarathi-Serve,
  OSDI 2024).
"""

from __future__ import annotations

from typing import Literal, get_args

from cost_model.base import CHUNK_TOKENS, PREFILL_TOKENS

Policy = Literal["mixed", "prefill-first", "chunked"]
POLICIES: tuple[str, ...] = get_args(Policy)


def step_prompt_tokens(policy: Policy, decodes: int, in_flight: int) -> int:
    """Most prompt tokens in one step while `decodes` requests decode, spread over `in_flight` steps. In vLLM
    the decoded tokens count towards the limit."""
    if policy == "mixed":
        return CHUNK_TOKENS if decodes else PREFILL_TOKENS
    return PREFILL_TOKENS - (-(-decodes // in_flight) if policy == "chunked" else 0)

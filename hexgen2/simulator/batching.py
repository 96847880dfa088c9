"""How the replicas that decode mix prompts into their steps.

- "mixed": what the runtime does. A step has all decodes and chunks of prompts, fewer tokens of them while
  requests decode (runtime/worker/scheduler.py).
- "prefill-first": a prompt that fits goes first, whole, and decodes wait (vLLM before chunked prefill).
- "chunked": all decodes, filled up with chunks of prompts (vLLM's default; Agrawal and others, Sarathi-Serve,
  OSDI 2024).
"""

from __future__ import annotations

from typing import Literal, get_args

from cost_model.base import CHUNK_TOKENS, PREFILL_TOKENS

Policy = Literal["mixed", "prefill-first", "chunked"]
POLICIES: tuple[str, ...] = get_args(Policy)


def step_prompt_tokens(policy: Policy, decodes: int, in_flight: int) -> int:
    """Prompt tokens that go into one step at most, where so many requests decode in as many steps as
    `in_flight`. In vLLM the tokens of decodes count, too."""
    if policy == "mixed":
        return CHUNK_TOKENS if decodes else PREFILL_TOKENS
    return PREFILL_TOKENS - (-(-decodes // in_flight) if policy == "chunked" else 0)

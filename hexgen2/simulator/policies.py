"""How the replicas that decode mix prompts into their steps.

- "mixed": what the runtime does. A step has all decodes and chunks of prompts, fewer tokens of them while
  requests decode (runtime/engine/scheduler.py).
- "prefill-first": a prompt that fits goes first, whole, and decodes wait (vLLM before chunked prefill).
- "chunked": all decodes, filled up with chunks of prompts (vLLM's default; Agrawal and others, Sarathi-Serve,
  OSDI 2024).
"""

from __future__ import annotations

from typing import Literal, get_args

from cost_model.base import PREFILL_TOKENS
from runtime.options import CHUNK_TOKENS

Policy = Literal["mixed", "prefill-first", "chunked"]
POLICIES: tuple[str, ...] = get_args(Policy)


def step_prompt_tokens(policy: Policy, decodes: int) -> int:
    """Prompt tokens that go into one step at most, where so many requests decode."""
    return CHUNK_TOKENS if policy == "mixed" and decodes else PREFILL_TOKENS


def turn_prompt_tokens(policy: Policy, decodes: int, in_flight: int) -> int:
    """The same of as many steps as are under way at once; vLLM's chunks leave room for the decodes."""
    limit = step_prompt_tokens(policy, decodes) * in_flight
    return limit - decodes if policy == "chunked" else limit

"""Batching policies: how a replica mixes prompts and decodes in its steps, of at most `step_tokens` tokens.

Prompts are first come, first served in all of them, and a prompt starts only when its KV cache fits and the
batch has a place.

- "mixed": this runtime. A step holds all decodes and chunks of prompts; the chunks are smaller while requests
  decode (runtime/worker/scheduler.py).
- "chunked": vLLM V1 (vllm/v1/core/sched/scheduler.py; Agrawal and others, Sarathi-Serve, OSDI 2024). All
  decodes, then chunks of as many prompts as there are tokens left; step_tokens is max_num_batched_tokens.
- "chunked-prefill-first": SGLang without --enable-mixed-chunk. As long as a prompt can run, steps hold only
  prompts, divided into chunks, and decodes wait; step_tokens is --chunked-prefill-size.
- "inflight": TensorRT-LLM without chunked context. All decodes, and whole prompts as long as they fit beside
  them; step_tokens is max_num_tokens. The engine refuses a prompt longer than that; here it waits until
  nothing decodes, and has a step of its own. A request starts when the KV cache of its prompt and its whole
  answer is free, so that none is ever preempted (GUARANTEED_NO_EVICT, the engine's default).
- "prefill-first": vLLM before chunked prefill. Prompts run first and whole, while decodes wait; one longer
  than step_tokens has a step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cost_model.base import CHUNK_TOKENS, PREFILL_TOKENS

Policy = Literal["mixed", "chunked", "chunked-prefill-first", "inflight", "prefill-first"]
POLICIES: tuple[str, ...] = get_args(Policy)

ENGINE_POLICIES: dict[str, Policy] = {
    "vllm": "chunked",
    "sglang": "chunked-prefill-first",
    "trtllm": "inflight",
}
"""The policy of each engine in its usual configuration."""
ENGINE_STEP_TOKENS = 8192
"""Most tokens in a step with prompts that are divided: the default of vLLM and of SGLang on large GPUs."""
_WHOLE_PROMPT_SPARE = 64
"""Tokens of a step beside the longest prompt and the decodes where prompts are not divided, as in the public
benchmark recipes for TensorRT-LLM (InferenceMAX: concurrency + isl + 64)."""

PATIENCE_STEPS = 60
"""Steps with decodes only that a prompt waits for others to start with, as in the same recipes
(attention_dp_config: timeout_iters)."""


@dataclass(frozen=True)
class Batching:
    """A policy with its limits.

    Attributes
    ----------
    step_tokens : most tokens in a step with prompts
    max_batch : most requests of a replica that decodes, in all its steps in flight together (vLLM's
        max_num_seqs); None: as planned
    chunk_tokens : most prompt tokens in a step that also decodes, under "mixed"
    gathered : prompts that replicas which decode start together, each on GPUs of its own (attention data
        parallelism; enable_balance of TensorRT-LLM), unless nothing decodes or one has waited for
        PATIENCE_STEPS
    look_steps : steps with decodes only from one look for new prompts to the next (SGLang's
        scheduler_recv_interval)
    """

    policy: Policy = "mixed"
    step_tokens: int = PREFILL_TOKENS
    max_batch: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    gathered: int = 1
    look_steps: int = 1

    @classmethod
    def of_engine(
        cls, name: str, attention_dp: int = 1, longest_prompt: int = 0, max_batch: int | None = None
    ) -> Batching:
        """How an engine fills its steps as it is usually configured.

        The limit is of each part of the replica that runs attention for requests of its own. Where prompts
        are not divided, it has room for the longest one beside a token of each other request, and they start
        on all of these parts together.

        Parameters
        ----------
        name : one of ENGINE_POLICIES (KeyError otherwise)
        attention_dp : parts of a replica that run attention for requests of their own
        longest_prompt : tokens
        """
        policy = ENGINE_POLICIES[name]
        tokens = ENGINE_STEP_TOKENS
        if policy == "inflight":
            tokens = longest_prompt + (max_batch or 0) + _WHOLE_PROMPT_SPARE
        gathered = attention_dp if policy == "inflight" else 1
        return cls(policy, tokens * attention_dp, max_batch, gathered=gathered)

    @property
    def prefill_first(self) -> bool:
        """Whether decodes wait while prompts run."""
        return self.policy in ("chunked-prefill-first", "prefill-first")

    @property
    def whole(self) -> bool:
        """Whether prompts run undivided."""
        return self.policy in ("inflight", "prefill-first")

    @property
    def preempts(self) -> bool:
        """Whether requests may start without room for their whole answer, and be preempted."""
        return self.policy != "inflight"

    def prompt_tokens(self, decodes: int) -> int:
        """Most prompt tokens in one step beside `decodes` tokens of decodes."""
        if self.policy == "mixed":
            return min(self.chunk_tokens, self.step_tokens) if decodes else self.step_tokens
        return self.step_tokens if self.prefill_first else self.step_tokens - decodes

    def any_length(self, decodes: int) -> bool:
        """Whether an undivided prompt longer than `prompt_tokens` may have a step of its own beside `decodes`
        decodes."""
        return self.prefill_first or not decodes

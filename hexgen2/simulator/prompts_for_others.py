"""The prompts that a mixed replica computes for others, as of a prefill replica."""

from __future__ import annotations

from typing import Any

from hexgen2.simulator.decode_replica import DecodeReplica
from hexgen2.simulator.pipelined_replica import PipelinedReplica


class PromptsForOthers:
    """What a mixed replica has in common with a prefill replica."""

    def __init__(self, replica: DecodeReplica | PipelinedReplica) -> None:
        self.replica = replica

    def submit(self, request: Any, tokens: int, now: float) -> None:
        """Append a prompt to the queue."""
        self.replica.submit_for_another(request, tokens, now)

    def withdraw(self, request: Any, now: float) -> bool:
        """Stop computing a prompt; returns False if none of it is left to compute."""
        return self.replica.withdraw(request, now)

    def release(self, request: Any, tokens: int, now: float) -> None:
        """Free the KV cache of a prompt: it has been sent, or is no longer needed."""
        self.replica.release(request, tokens, now)

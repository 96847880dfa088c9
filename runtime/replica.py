"""A replica as the front end sees it: its workers' links and the KV cache that is accounted to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.launcher.link import Link
from runtime.messages import Message

BATCHES_PER_REPLICA = 2


@dataclass(slots=True)
class Replica:
    """Links by worker, and what requests hold here.

    `held` has the tokens of KV cache per request. `refused` is set when the lead had no room although
    the accounting saw some; it lasts until the replica releases something.
    """

    replica_id: str
    role: str
    lead: str
    links: Mapping[str, Link]
    kv_budget_tokens: int
    max_batch: int
    held: dict[str, int] = field(default_factory=dict)
    held_tokens: int = 0
    refused: bool = False

    def send(self, message: Message) -> None:
        """Send to the lead worker."""
        self.links[self.lead].send(message)

    def has_room(self, tokens: int, prefill_only: bool) -> bool:
        """Whether a request of that many KV tokens may be sent here now.

        Where requests decode: within the KV budget, and one batch in work with one on its way. Where
        they are only prefilled, prompts queue for one another, so a second budget's worth may wait.
        """
        if self.refused:
            return False
        if prefill_only:
            return self.held_tokens + tokens <= BATCHES_PER_REPLICA * self.kv_budget_tokens
        fits = self.held_tokens + tokens <= self.kv_budget_tokens
        return fits and len(self.held) < BATCHES_PER_REPLICA * self.max_batch

    def hold(self, request_id: str, tokens: int) -> None:
        self.held[request_id] = tokens
        self.held_tokens += tokens

    def release(self, request_id: str) -> None:
        """Free what a request holds here; nothing if it holds nothing."""
        self.held_tokens -= self.held.pop(request_id, 0)
        self.refused = False

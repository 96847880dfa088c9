"""A replica as the front end sees it: its workers' links, and its room for KV cache."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.launcher.link import Link
from runtime.messages import Message
from runtime.room import Room


class Replica(Room):
    """Links by worker, one of whom leads, and what requests hold here."""

    __slots__ = ("lead", "links", "replica_id", "role")

    def __init__(
        self,
        replica_id: str,
        role: str,
        lead: str,
        links: Mapping[str, Link],
        kv_budget_tokens: int,
        max_batch: int,
    ) -> None:
        super().__init__(kv_budget_tokens, max_batch)
        self.replica_id, self.role, self.lead, self.links = replica_id, role, lead, links

    def send(self, message: Message) -> None:
        """Send to the lead worker."""
        self.links[self.lead].send(message)

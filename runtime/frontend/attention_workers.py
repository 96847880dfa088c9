"""The attention workers of one replica, as the front end sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hexgen2.placement import Placement
from runtime.headwise.room import budget_tokens, largest_tokens
from runtime.launcher.worker_link import WorkerLink
from runtime.protocol.from_workers import HeadCounts
from runtime.protocol.to_workers import Configure, HeadLane


@dataclass(slots=True)
class AttentionWorkers:
    """Links to attention workers, and what the replica's KV cache holds with those that are there.

    Attributes
    ----------
    links : by name; those that are lost have the old one
    away, given_up : those that are lost, and of these the ones that nobody starts again
    restarts : times that each was started again
    counts : what the replica's driver reported last
    """

    lanes: tuple[HeadLane, ...]
    block_tokens: int
    links: dict[str, WorkerLink]
    away: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    restarts: dict[str, int] = field(default_factory=dict)
    counts: HeadCounts | None = None

    @classmethod
    def of(
        cls,
        placement: Placement,
        replica_id: str,
        configurations: Mapping[str, Configure],
        links: Mapping[str, WorkerLink],
    ) -> AttentionWorkers | None:
        """Those of a replica; None if it has none."""
        names = [worker.gpu for worker in placement.workers_of(replica_id)]
        if not names:
            return None
        config = configurations[names[0]]
        return cls(config.lanes, config.block_tokens, {name: links[name] for name in names if name in links})

    @property
    def budget_tokens(self) -> int:
        """Tokens of KV cache for all requests together, with the attention workers that are there."""
        return budget_tokens(self.lanes, self.block_tokens, self.away)

    @property
    def largest_tokens(self) -> int:
        """Tokens of the longest request; it may wait for attention workers that are to come back."""
        return largest_tokens(self.lanes, self.block_tokens, self.given_up)

    def lose(self, name: str) -> None:
        """Count on an attention worker no more, for now."""
        self.away.add(name)

    def give_up(self, name: str) -> None:
        """Count on a lost attention worker never again."""
        self.given_up.add(name)

    def regain(self, name: str, link: WorkerLink) -> None:
        """Use an attention worker that has started again."""
        self.away.discard(name)
        self.links[name] = link
        self.restarts[name] = self.restarts.get(name, 0) + 1

"""Requests of a pipelined replica, and those among them that decode together.

Requests that had a token from the same step mostly have their next one from the same step, too. What each has
is then known from what it had when it joined and from the steps that they have taken together, so that a step
is no work for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Request:
    """One request. While it is in a cohort, its figures are those of when it joined.

    Attributes
    ----------
    arrival : its number in the order of arrival
    tokens, prompt : all tokens so far, and those of the client
    since_s : when it began to wait
    held : tokens of KV cache that it holds
    place : its place in the order in which requests are looked at
    steps : steps in flight that it takes part in
    decoding : whether its latest token came from this batch
    outgoing : the simulation's request, if it goes on elsewhere
    """

    index: int
    arrival: int
    tokens: int
    prompt: int
    since_s: float
    computed: int = 0
    held: int = 0
    place: int = 0
    steps: int = 0
    decoding: bool = False
    outgoing: Any = None

    @property
    def to_run(self) -> int:
        """Tokens that have not been computed."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """Whether a long prompt in the same step would delay its next token."""
        return self.tokens > self.prompt and self.tokens - self.computed <= 1

    def has(self, tokens: int, in_flight: bool) -> None:
        """It has left its cohort with so many tokens; in_flight: the latest is being computed."""
        self.held += tokens - self.tokens + in_flight
        self.tokens, self.computed, self.steps = tokens, tokens - 1 + in_flight, int(in_flight)


@dataclass(slots=True, eq=False)
class Cohort:
    """Requests that all had their latest token at last_s, in the order of their places.

    Attributes
    ----------
    place : of the first; the others have the next ones
    totals : [n] tokens that each has when it ends
    ends : [n] the value of `made` at which each ends
    made : steps that they have taken together
    context : tokens of all of them by now
    first_end : the least of `ends`
    """

    requests: list[Request]
    totals: list[int]
    ends: list[int]
    last_s: float
    made: int = 0
    place: int = 0
    context: int = 0
    first_end: int = 0

    def __post_init__(self) -> None:
        self.context = sum(self.totals) - sum(self.ends) + self.made * len(self.ends)
        self.first_end = min(self.ends)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def tokens(self) -> Iterator[int]:
        """The tokens of each by now."""
        return (total - end + self.made for total, end in zip(self.totals, self.ends, strict=True))

    def step(self, now: float) -> None:
        """Each has one more token."""
        self.made += 1
        self.context += len(self.requests)
        self.last_s = now

    def split(self, count: int) -> Cohort:
        """Take off the first `count`, not all, as a cohort of their own."""
        first = Cohort(
            self.requests[:count], self.totals[:count], self.ends[:count], self.last_s, self.made, self.place
        )
        del self.requests[:count], self.totals[:count], self.ends[:count]
        self.place += count
        self.context -= first.context
        self.first_end = min(self.ends)
        return first

    def take_ended(self) -> list[Request]:
        """Take out those that have all their tokens, as `totals` says."""
        if self.made < self.first_end:
            return []
        staying = [k for k, end in enumerate(self.ends) if end > self.made]
        ended = [request for request, end in zip(self.requests, self.ends, strict=True) if end <= self.made]
        self.requests = [self.requests[k] for k in staying]
        self.totals, self.ends = [self.totals[k] for k in staying], [self.ends[k] for k in staying]
        self.context = sum(self.tokens)
        self.first_end = min(self.ends, default=0)
        return ended


def joined(parts: Sequence[Cohort]) -> Cohort:
    """One cohort of several, at least one, in this order, whose latest tokens came from the same step."""
    first, *others = parts
    if others:
        base = max(parts, key=len)
        for part in parts:
            if part is not base:
                part.ends = [end + base.made - part.made for end in part.ends]
        for part in others:
            first.requests += part.requests
            first.totals += part.totals
            first.ends += part.ends
            first.context += part.context
        first.made, first.first_end = base.made, min(first.ends)
    return first

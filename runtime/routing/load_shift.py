"""Moves the shares of routes when requests wait and have become longer or shorter than planned.

A placement's flows suit the lengths that it was planned for. With longer outputs, for example, mixed replicas
should compute fewer prompts. So the mean lengths of the latest requests are watched, and when they have
clearly changed and requests have to wait for room (pressure.py), the flow is solved again for these lengths
(reflow.py), and taken if it carries clearly more: replicas and plans stay, and shares move no further than
they must. While nobody waits, the planned shares serve sooner: those that carry most fill up replicas that
the plan keeps free. The front end and the simulator share this file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hexgen2.placement import Placement
from hexgen2.prediction.other_lengths import with_lengths
from runtime.routing.router import Route, routes_of

if TYPE_CHECKING:
    from runtime.routing.reflow import Reflow

WINDOW = 600
"""Requests over which lengths are averaged."""
FEWEST = 400
"""Requests that must have been seen before anything is concluded."""
EVERY = 200
"""Requests that arrive from one change to the next, at least."""
CHANGED = 0.15
"""Mean lengths have changed if they differ from those that the flow suits by more than this share..."""
SIGNIFICANT = 4.0
"""... and by more than so many standard errors, so that a few very long requests move nothing."""
BACK = 0.05
"""The planned flow returns once both means are within this share of the planned ones."""
WORTHWHILE = 0.035
"""Shares move only if the flow that suits the lengths can carry more than the planned one by this share."""
OVERTAKEN = 2000
"""Of outputs, those of requests that began earlier are waited for, since the shortest end first; but no
longer than until so many have ended that began later."""
SHOWN = 0.01
"""Changes of a replica's share that are worth a word."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt, those found in a prefix cache left out, and of an output."""

    prompt: float
    output: float

    def differ(self, other: Lengths) -> float:
        """The larger of the two relative differences."""
        return max(abs(self.prompt / other.prompt - 1), abs(self.output / other.output - 1))


class _Average:
    """Exponentially weighted mean of the latest values, over about WINDOW of them."""

    def __init__(self) -> None:
        self._least = 2 / (WINDOW + 1)
        self.seen, self.mean, self._variance = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.seen += 1
        part = max(1 / self.seen, self._least)
        off = value - self.mean
        self.mean += part * off
        self._variance = (1 - part) * (self._variance + part * off * off)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(self._variance * max(1 / self.seen, self._least))

    def changed(self, since: float, factor: float) -> bool:
        """Whether the mean, times a factor, is clearly different now."""
        if self.seen < FEWEST:
            return False
        off = abs(self.mean * factor - since)
        return off > CHANGED * since and off > SIGNIFICANT * self.error * factor


class _OutputsInOrder:
    """Hands on the output tokens of requests in the order in which these began: in the order in which they
    end, the first ones would be the shortest of many."""

    def __init__(self, watched: _Average) -> None:
        self._watched = watched
        self._order: deque[Hashable] = deque()
        self._tokens: dict[Hashable, int | None] = {}
        self._ended = 0

    def began(self, request: Hashable) -> None:
        """A request has begun, perhaps not for the first time."""
        if request not in self._tokens:
            self._tokens[request] = None
            self._order.append(request)

    def ended(self, request: Hashable, tokens: int) -> bool:
        """A request has ended with so many output tokens; whether it had begun."""
        if request not in self._tokens:
            return False
        self._tokens[request] = tokens
        self._ended += 1
        while self._order:
            first = self._tokens[self._order[0]]
            if first is None and self._ended <= OVERTAKEN:
                break
            del self._tokens[self._order.popleft()]
            if first is not None:
                self._ended -= 1
                self._watched.add(first)
        return True


class LoadShift:
    """The routes of a placement, with the flow that suits the lengths of the latest requests while these
    have to wait, and else the planned one.

    Parameters
    ----------
    placement : without more than one route there is nothing to move
    plan : computes its flow; None: made once it is needed

    Attributes
    ----------
    lengths : those for which the flow is good enough; at first the planned ones
    moves : how often the flow has changed
    """

    def __init__(self, placement: Placement, plan: Reflow | None = None) -> None:
        self._placement, self._plan, workload = placement, plan, placement.workload
        self.planned = Lengths(workload.isl, workload.osl)
        self.lengths, self.moves = self.planned, 0
        self._current: Reflow | None = None
        self._has_choice = len(routes_of(placement)) > 1
        self._prompts, self._outputs = _Average(), _Average()
        self._looked_up, self._found = _Average(), _Average()
        self._in_order = _OutputsInOrder(self._outputs)
        self._since_move = EVERY
        self._known: dict[frozenset[str], list[Route]] = {}

    @classmethod
    def of(cls, plan: Reflow) -> LoadShift:
        """That of a plan's placement."""
        return cls(plan.placement(()), plan)

    @property
    def plan(self) -> Reflow:
        """For the planned lengths."""
        if self._plan is None:
            from runtime.routing.reflow import Reflow  # Slow to import: scipy comes with it.

            self._plan = Reflow(self._placement)
        return self._plan

    def routes(self, lost: Collection[str]) -> list[Route]:
        """The routes without the lost replicas, with the flow in requests/s as weight."""
        if self._current is None:
            return self.plan.routes(lost)
        absent = frozenset(lost)
        if absent not in self._known:
            self._known[absent] = self.plan.moved(absent, self._current)
        return list(self._known[absent])

    def arrived(self, prompt_tokens: int) -> None:
        """A request arrives."""
        if self._has_choice:
            self._prompts.add(prompt_tokens)
            self._since_move += 1

    def began(self, request: Hashable) -> None:
        """A request begins on a route."""
        if self._has_choice:
            self._in_order.began(request)

    def ended(self, request: Hashable, output_tokens: int, prompt_tokens: int = 0, cached: int = 0) -> None:
        """A request ends; so many tokens of its prompt were found in a prefix cache, and took no work."""
        if self._has_choice and self._in_order.ended(request, output_tokens):
            self._looked_up.add(prompt_tokens)
            self._found.add(cached)

    def move(self, lost: Collection[str], pressed: bool) -> str:
        """Change the flow if requests wait and lengths have clearly changed, or back if none has to wait.

        Parameters
        ----------
        pressed : whether requests have to wait for room

        Returns
        -------
        why and what, for an operator to read; "" if nothing changes
        """
        if not self._has_choice or self._since_move < EVERY:
            return ""
        lengths = self._due() if pressed else self.planned
        if lengths is None or lengths == self.lengths:
            return ""
        before = self.routes(lost)
        self.lengths, self._since_move = lengths, 0
        current = None
        if lengths != self.planned:
            from runtime.routing.reflow import Reflow

            current = Reflow(with_lengths(self._placement, lengths.prompt, lengths.output))
            if self.plan.gain(lost, current) < WORTHWHILE:
                current = None
        if current is self._current:
            return ""
        self._current = current
        self._known.clear()
        self.moves += 1
        why = self._in_words() if pressed else "requests hardly wait any more"
        return f"{why}, so shares move: {_differences(before, self.routes(lost))}"

    def _due(self) -> Lengths | None:
        """The lengths that the flow should suit now, if not those that it does."""
        planned, suited = self.planned, self.lengths
        computed = self._computed_share
        if suited != planned:
            means = Lengths(
                self._prompts.mean * computed if self._prompts.seen else planned.prompt,
                self._outputs.mean if self._outputs.seen >= FEWEST else planned.output,
            )
            if means.differ(planned) <= BACK:
                return planned
        prompts = self._prompts.changed(suited.prompt, computed)
        outputs = self._outputs.changed(suited.output, 1.0)
        if not prompts and not outputs:
            return None
        return Lengths(
            max(1.0, self._prompts.mean * computed) if prompts else suited.prompt,
            max(1.0, self._outputs.mean) if outputs else suited.output,
        )

    @property
    def _computed_share(self) -> float:
        """The share of the prompts' tokens that no prefix cache has."""
        if self._looked_up.seen < FEWEST or self._looked_up.mean <= 0:
            return 1.0
        return max(0.0, 1 - self._found.mean / self._looked_up.mean)

    def _in_words(self) -> str:
        found, planned = self.lengths, self.planned
        return (
            f"requests have about {found.prompt:.0f} prompt tokens to compute and {found.output:.0f} output "
            f"tokens (planned: {planned.prompt:.0f} and {planned.output:.0f})"
        )


def _differences(before: Iterable[Route], after: Iterable[Route]) -> str:
    """The shares of replicas that differ by enough to be worth a word."""
    was, now = _shares(before), _shares(after)
    changed = [
        f"{name} {phase} {100 * now.get(key, 0.0):.0f} % (was {100 * was.get(key, 0.0):.0f} %)"
        for key in was | now
        if abs(now.get(key, 0.0) - was.get(key, 0.0)) >= SHOWN
        for name, phase in [key]
    ]
    return ", ".join(changed) or "none by 1 % or more"


def _shares(routes: Iterable[Route]) -> dict[tuple[str, str], float]:
    """The share of all requests that each replica prefills, and decodes."""
    routes = list(routes)
    total = math.fsum(route.weight for route in routes) or 1.0
    shares: dict[tuple[str, str], float] = {}
    for route in routes:
        for key in ((route.prefill, "prefills"), (route.decode, "decodes")):
            shares[key] = shares.get(key, 0.0) + route.weight / total
    return shares

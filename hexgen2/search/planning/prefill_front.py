"""Ways to run a prefill replica, of which each may be the best one under some target.

A search for the least latency asks for the best plan of the same groups within many pairs of targets. What a
way of running a replica serves within a target follows from its requests/s at full load and the time that a
prompt of each class takes (see PrefillQueue), so that one is never better than another that is ahead in all
of these."""

from __future__ import annotations

from typing import Generic, TypeVar

from cost_model.queueing import PrefillQueue
from hexgen2.search.ties import exceeds

Way = TypeVar("Way")


class PrefillFront(Generic[Way]):
    """The ways that no other one dominates, with their queues."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[float, ...], PrefillQueue, Way]] = []

    def offer(self, queue: PrefillQueue, way: Way) -> None:
        """Keep a way unless a kept one is as good in everything."""
        if not self.dominates(queue):
            costs = _costs(queue)
            self._kept = [entry for entry in self._kept if not _as_good(costs, entry[0])]
            self._kept.append((costs, queue, way))

    def dominates(self, queue: PrefillQueue) -> bool:
        """Whether a kept way is at least as good as that queue in everything."""
        costs = _costs(queue)
        return any(_as_good(kept, costs) for kept, _, _ in self._kept)

    def best(self, ttft_s: float, share: float) -> Way | None:
        """The way that serves most requests/s, that share of them with the first token in time; None if none
        serves any. Ties go to the one that was offered first."""
        best_req_s, best = 0.0, None
        for _, queue, way in self._kept:
            # Finding the rate takes longer than asking whether the best one so far can be beaten.
            if queue.capacity_req_s <= best_req_s:
                continue
            if best_req_s and queue.attained(best_req_s, ttft_s) < share:
                continue
            req_s = queue.largest_rate(ttft_s, share)
            if exceeds(req_s, best_req_s):
                best_req_s, best = req_s, way
        return best


def _costs(queue: PrefillQueue) -> tuple[float, ...]:
    """What should be small: the time of each request at full load, and that of a prompt of each class."""
    return (1 / queue.capacity_req_s, *(service_s for _, service_s in queue.services))


def _as_good(costs: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(costs, other, strict=True))

"""Sends each request where the work that waits, with its own, is least.

'High-throughput LLM inference on heterogeneous clusters', section 4 (Algorithm 2). The workload of a request
on an instance is w = t exp(theta u): t seconds per request in the largest batch of copies of it (equations 5
and 6), from the instance's own eight constants, and u the share of its KV cache that its requests will hold
at their predicted ends (equation 8). The paper's text does not fix the form of the second factor; this one
has all that it says of it.

What the paper leaves open: a route of two replicas has the larger of their two sums, since they work at the
same time, and each counts the phase that it does.

What is changed, unless `as_printed`: an instance may run out of places before memory (engines limit the
requests of a batch), so u is the scarcer of both; and u counts up to 1, since beyond it, exp(theta u) makes
the last of many waiting requests outweigh all before them, and the speed of instances no longer matters
(`benchmarks/serving/workload_aware.py` shows both).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cost_model.portable import exp
from runtime.routing.kv_budget import KvBudget
from runtime.routing.output_lengths import OutputLengths
from runtime.routing.router import Routable, Route, Router

THETA = 2.0
"""How much a full KV cache adds to the workload of a request, as in section 5.2."""

MOST = 200.0
"""Largest exponent theta u, so that no sum overflows."""


class _Load(NamedTuple):
    """What a request adds to a replica, and the tokens that it will hold there."""

    work: float
    tokens: float


class WorkloadRouter(Router):
    """Picks the route of least work among those with room; spares (weight 0) only while no other has any.

    Work is added when a request begins and taken away when its replica releases it, however it ends
    (KvBudget.release), so a lost replica loses its backlog, too.

    Parameters
    ----------
    lengths : predicts the output of a request
    by_time : whether the seconds of a request count; otherwise only the use of memory does (section 5.2's
        memory-based scheduling)
    as_printed : u is the use of memory alone, and may exceed 1
    """

    weighs = True

    def __init__(
        self,
        routes: Iterable[Route],
        lengths: OutputLengths,
        by_time: bool = True,
        as_printed: bool = False,
        theta: float = THETA,
        replicas: Mapping[str, KvBudget] | None = None,
    ) -> None:
        super().__init__(routes)
        self._lengths, self._by_time, self._as_printed, self._theta = lengths, by_time, as_printed, theta
        self._replicas = {} if replicas is None else replicas

    def among(self, replicas: Mapping[str, KvBudget]) -> Router:
        return self._like(self.routes, replicas)

    def _over(self, routes: Iterable[Route]) -> Router:
        return self._like(routes, self._replicas)

    def _like(self, routes: Iterable[Route], replicas: Mapping[str, KvBudget]) -> Router:
        settings = self._lengths, self._by_time, self._as_printed, self._theta
        return WorkloadRouter(routes, *settings, replicas)

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        self._lengths.learn(prompt_tokens, output_limit, output_tokens)

    def choose(self, request: Routable, admissible: Callable[[Route], bool]) -> Route | None:
        candidates = self._candidates(admissible, request.prompt_tokens)
        if not candidates:
            return None
        prompt = request.prompt_tokens
        output = 1.0 if request.one_token else self._lengths.predict(request)
        loads: dict[tuple[str, str], _Load] = {}
        best, least = candidates[0], (math.inf, math.inf)
        for route in candidates:
            parts = _parts(route, request.one_token)
            for part in parts:
                if part not in loads:
                    loads[part] = self._load(*part, prompt, output)
            sums = [self._replicas[part[0]].backlog.work + loads[part].work for part in parts]
            order = max(sums), math.fsum(sums)
            if order < least:
                best, least = route, order
        for part in _parts(best, request.one_token):
            self._replicas[part[0]].backlog.add(request.request_id, *loads[part])
        return best

    def _candidates(self, admissible: Callable[[Route], bool], prompt_tokens: float) -> list[Route]:
        """The routes with room that are for such requests, or else any with room; or else spares."""
        with_room = [route for route in self.routes if route.weight > 0 and admissible(route)]
        if self.limited:
            with_room = [each for each in with_room if self.takes(each, prompt_tokens)] or with_room
        return with_room or [route for route in self.routes if route.weight <= 0 and admissible(route)]

    def _load(self, replica: str, phase: str, prompt: int, output: float) -> _Load:
        """What a request adds to a replica that does its prompt, the rest of it, or all of it."""
        budget = self._replicas[replica]
        tokens = prompt + (0.0 if phase == "prompt" else output)
        used = budget.backlog.tokens / max(1, budget.kv_budget_tokens)
        if not self._as_printed:
            places = 0.0 if phase == "prompt" else len(budget.backlog) / budget.max_batch
            used = min(1.0, max(used, places))
        pressed = exp(min(MOST, self._theta * used))
        if not self._by_time:
            return _Load(pressed, tokens)
        assert budget.instance is not None, "a scheduler by time needs profiled replicas"
        times = budget.instance.times
        seconds = {"prompt": times.prompt_s, "answer": times.answer_s, "all": times.request_s}[phase]
        return _Load(seconds(prompt, output) * pressed, tokens)


def _parts(route: Route, one_token: bool) -> tuple[tuple[str, str], ...]:
    """The replicas of a route with what each does for a request."""
    if route.colocated:
        return ((route.prefill, "all"),)
    if one_token:
        return ((route.prefill, "prompt"),)
    return (route.prefill, "prompt"), (route.decode, "answer")

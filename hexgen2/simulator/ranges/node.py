"""One replica that holds a range of layers, in a simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.base import CostModel, TensorGroup, Work
from cost_model.lengths import attended_tokens, context_tokens
from hexgen2.prediction.range_times import StepScale, lone_s
from hexgen2.simulator.records import ReplicaRecord
from runtime.routing.paths.range_graph import RangePath

_FAR = 1e6


@dataclass(eq=False, slots=True)
class Run:
    """A request on its path, from its start to its end or until it is put back.

    Attributes
    ----------
    index : of the request
    path : its hops; hop: of them, the one that it is at
    tokens : prompt and answer so far
    to_run : of these, those that have not passed all layers yet
    left_s : when the last replica sent it on, or the front end did
    at : the replica where it waits or is computed; "" on the way between two
    alive : False once it was put back; what is on its way then is dropped
    """

    index: int
    path: RangePath
    tokens: int
    to_run: int
    left_s: float
    hop: int = 0
    alive: bool = True
    at: str = ""


class RangeNode:
    """Computes whatever has arrived, in steps: tokens to decode, and whole prompts, at most `step_tokens` of
    these unless one alone is longer. No step waits for more.

    Without `shares`, a step takes all tokens that wait to be decoded (Helix, section 5.1). Those that met
    once stay together from then on, so that in the end all go round in a few steps, and most replicas idle.
    With it, a step takes one of as many equal shares of the replica's requests as their paths have hops.

    Parameters
    ----------
    held : its layers [first, end)
    scale : corrects the cost model's times
    last_layer : whether it holds the model's last one
    step_tokens : see above
    schedule : the simulation's schedule(time_s, call, argument)
    passed : called with (self, runs, now) when a step has ended
    requests_on : how many requests have the replica on their paths
    """

    def __init__(
        self,
        name: str,
        held: tuple[int, int],
        last_layer: bool,
        costs: CostModel,
        group: TensorGroup,
        scale: StepScale,
        step_tokens: int,
        record: ReplicaRecord,
        schedule: Callable,
        passed: Callable[[RangeNode, list[Run], float], None],
        requests_on: Callable[[], int],
        shares: bool,
    ) -> None:
        self._requests_on, self._shares = requests_on, shares
        self.name, self._held, self._last, self._scale = name, held, last_layer, scale
        self._costs, self._group, self._step_tokens = costs, group, step_tokens
        self.record, self._schedule, self._passed = record, schedule, passed
        self._decodes: list[Run] = []
        self._prompts: deque[Run] = deque()
        self._busy, self.alive = False, True
        self.requests = 0
        self._edges_s: dict[int, float] = {}
        self._lone_s: dict[int, float] = {}
        self._decode_s: dict[tuple[float, int], tuple[float, float]] = {}

    def take(self, runs: list[Run], now: float) -> None:
        """Requests arrive."""
        for run in runs:
            if run.to_run > 1:
                self._prompts.append(run)
            else:
                self._decodes.append(run)
        if not self._busy:
            self._step(now)

    def lose(self) -> None:
        """It does nothing from now on."""
        self.alive = False

    def _step(self, now: float) -> None:
        waiting = [run for run in self._decodes if run.alive]
        most = len(waiting)
        if waiting and self._shares:
            most = -(-self._requests_on() // len(waiting[0].path))
        runs, self._decodes, left = waiting[:most], waiting[most:], self._step_tokens
        while self._prompts and (not self._prompts[0].alive or self._prompts[0].to_run <= left or not runs):
            run = self._prompts.popleft()
            if run.alive:
                runs.append(run)
                left -= run.to_run
        if not runs or not self.alive:
            return
        seconds = self._seconds(runs)
        self._busy = True
        self.record.busy_s += seconds
        self._schedule(now + seconds, self._ended, runs)

    def _ended(self, now: float, runs: list[Run]) -> None:
        self._busy = False
        if not self.alive:
            return
        self._passed(self, [run for run in runs if run.alive], now)
        if not self._busy:
            self._step(now)

    def _seconds(self, runs: list[Run]) -> float:
        """Layers from each request's first one on, with the work of all that have begun by then."""
        window = self._costs.model.window
        by_first: dict[int, list[float]] = {}
        for run in runs:
            first = run.path[run.hop].first
            own = by_first.get(first)
            if own is None:
                own = by_first[first] = [0.0, 0.0, 0.0, 0.0]
            if run.to_run > 1:
                own[0] += run.to_run
                own[1] += attended_tokens(run.to_run, window, run.tokens - run.to_run)
            else:
                own[2] += 1
                own[3] += run.tokens if window is None else context_tokens(run.tokens, window)
        requests, seconds = len(runs), 0.0
        prompt = attended = decodes = context = 0.0
        firsts = sorted(by_first)
        for first, until in zip(firsts, [*firsts[1:], self._held[1]], strict=True):
            more = by_first[first]
            prompt, attended = prompt + more[0], attended + more[1]
            decodes, context = decodes + more[2], context + more[3]
            seconds += (until - first) * self._layer_s(prompt, attended, decodes, context, requests)
        if requests not in self._edges_s:
            self._edges_s[requests] = self._costs.edge_work_s(self._group, requests, self._last)
        computed = self._held[1] - firsts[0]
        if computed not in self._lone_s:
            self._lone_s[computed] = lone_s(self._costs, self._group, computed, self._last)
        return self._scale(seconds + self._edges_s[requests], self._lone_s[computed])

    def _layer_s(
        self, prompt: float, attended: float, decodes: float, context: float, requests: int
    ) -> float:
        """Seconds of one layer. Of steps that only decode, those of as many requests are remembered: times
        are affine in the context (see Work)."""
        costs, group = self._costs, self._group
        if prompt:
            return costs.layer_work_s(group, Work(prompt, attended, decodes, context, requests))
        key = decodes, requests
        if key not in self._decode_s:
            none, far = (
                costs.layer_work_s(group, Work(0.0, 0.0, decodes, at, requests)) for at in (0.0, _FAR)
            )
            self._decode_s[key] = none, (far - none) / _FAR
        none, slope = self._decode_s[key]
        return none + slope * context

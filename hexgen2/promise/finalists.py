"""The best of a search's finalists by simulation, and its goodput.

Formulas rank the thousands of solutions that a search looks at; they leave out how queues, batches and links
disturb each other. So the finalists challenge one another in the simulator: the one that the formulas rank
first is simulated at the rates around its goodput, and each other one at a rate just above the best goodput
so far. A challenger that keeps more than the share asked for in time at that rate takes over. Then the best
one is tried with larger and smaller prefill steps, and with long prompts for its remote routes
(length_split.py); and its goodput is found with more requests. Runs that do not depend on each other go on at
the same time where cores are free; what counts, and so the answer, is the same on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from cost_model.base import PREFILL_TOKENS
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.prediction.step_times import StepTimes
from hexgen2.promise.goodput import Found, find_goodput
from hexgen2.promise.length_split import split_by_length
from hexgen2.promise.precise_goodput import HARDLY, STEP, precise_goodput
from hexgen2.promise.trial import OutOfTimeError, Trial, Trials, deviation
from hexgen2.replica import Replica
from hexgen2.search.background import Ahead, Background, Report, free_cores
from hexgen2.search.ties import greatest
from hexgen2.simulator.run import TURNS

AHEAD = 1.01
"""A challenger is tried at this multiple of the best goodput so far: a smaller gain is noise."""
SPLIT_AHEAD = 1.03
"""The same for routes that are limited by prompt length: the same gain with other requests may be a loss (see
benchmarks/search/length_split.py), and fewer routes take what comes."""
BEFORE = 0.97
"""Longer runs begin at this multiple of what shorter ones found, in which queues have less time to grow,
unless hardly any request was late in any of them."""
ROUGH, ROUGH_RUNS = 2, 3
"""The runs around a goodput have so many times the requests of a challenger's first one; and there are so
many at most."""
CLEAR = 2.0
"""A share is clearly above or below what is asked for from so many standard errors on."""
FEW_TURNS = 6
"""A run beyond the capacity has at least so many times the requests that are decoded at a time: with fewer,
it would be over before the fleet is full."""
SMALLEST_STEP, LARGEST_STEP = 128, PREFILL_TOKENS
"""Tokens of prefill steps: memory is planned for the largest (see CostModel.stage_memory)."""


@dataclass(frozen=True)
class Effort:
    """How many requests are simulated: better promises against time.

    Attributes
    ----------
    first, final : of a challenger's first run, and of each run that the promise rests on, at least
    first_residents, residents : and at least so many times the requests that are in the fleet at a time: a
        run that ends before the fleet is full shows nothing
    first_targets, targets : and at least those that arrive in so many times the target for the first token:
        until then, few are late even where more arrive than can be served
    most, longest : of a single run, and of one that is to show that queues do not grow slowly
    final_runs, enough : runs that the promise rests on, at most; none begins after so many requests
    challengers : requests of all challengers together, beside challengers_per_gpu for each GPU, but at most
        challenged_gpus of them: requests take longer to simulate in large fleets, too
    """

    first: int = 400
    final: int = 4000
    first_residents: float = 2.0
    residents: float = 6.0
    first_targets: float = 8.0
    targets: float = 30.0
    most: int = 12_000
    longest: int = 24_000
    final_runs: int = 5
    enough: int = 60_000
    challengers: int = 4000
    challengers_per_gpu: int = 100
    challenged_gpus: int = 64


@dataclass(frozen=True)
class Chosen:
    """The best placement, its goodput and how many were simulated."""

    placement: Placement
    goodput: Found
    simulated: int


def choose(
    placements: Sequence[Placement],
    cluster: Cluster,
    goal: Goal,
    seed: int,
    stop: Callable[[], bool],
    effort: Effort,
) -> Chosen | None:
    """The best of these placements, the first of which ranks highest by formulas, and its goodput; None if
    there was no time for a single run.

    Parameters
    ----------
    goal : with at least one target; no rate above its request_rate is of interest
    stop : whether to end with what is known
    """
    return _Tournament(placements, cluster, goal, seed, stop, effort).run()


class _Tournament:
    def __init__(
        self,
        placements: Sequence[Placement],
        cluster: Cluster,
        goal: Goal,
        seed: int,
        stop: Callable[[], bool],
        effort: Effort,
    ) -> None:
        self._placements, self._cluster, self._goal, self._seed = placements, cluster, goal, seed
        self._stop, self._effort = stop, effort
        self._most = goal.request_rate or float("inf")
        gpus = min(len(cluster.gpu_ids), effort.challenged_gpus)
        self._left = effort.challengers + effort.challengers_per_gpu * gpus
        # Whether runs are so long that not even the rough ones of the first placement can be afforded.
        start_req_s = placements[0].throughput.req_s
        self._large = self._left < ROUGH_RUNS * ROUGH * self._first_count(placements[0], start_req_s)
        self._simulated = 0
        # All were made under one cost model.
        self._costs, self._times = placements[0].costs(), dict[Hashable, StepTimes]()
        self._seen_closely = False

    def run(self) -> Chosen | None:
        """Challenge, retune, and look closely at the winner; what is known when time is over counts."""
        try:
            goodput = self._first_roughly(self._placements[0], self._placements[0].throughput.req_s)
        except OutOfTimeError:
            return None
        self._leader = self._placements[0], goodput
        with suppress(OutOfTimeError):
            self._compare()
        best, goodput = self._leader
        return Chosen(best, self._cautious(best, goodput), self._simulated)

    def _cautious(self, placement: Placement, found: Found) -> Found:
        """What may be promised without a close look: no more than formulas plan, where all runs were over
        before the fleet can have been full."""
        longest = max((len(trial.in_time) for trial in found.trials), default=0)
        if self._seen_closely or longest >= FEW_TURNS * placement.places:
            return found
        planned = placement.throughput.req_s
        return replace(found, req_s=min(found.req_s, planned), low_req_s=min(found.low_req_s, planned))

    def _compare(self) -> None:
        """Challenge the leader, retune it and look at it closely."""
        led = [self._leader]
        kinds, unlike = {_roles(self._leader[0])}, list[bool]()
        for challenger in self._placements[1:]:
            # Formulas are not equally kind to all phases: one of each kind is tried, whatever it takes.
            unlike.append(_roles(challenger) not in kinds)
            kinds.add(_roles(challenger))
        led += self._challenge(self._placements[1:], unlike)
        while not self._over() and self._challenge(list(_other_steps(self._leader[0]))):
            pass
        best, goodput = self._leader
        divided = split_by_length(best) if goodput.req_s > 0 else None
        if divided is not None:
            led += self._challenge([divided], [True], SPLIT_AHEAD)
        best, goodput = self._leader
        if goodput.req_s > 0 and not self._stop():
            self._leader = self._not_by_luck(best, goodput, led)

    def _not_by_luck(
        self, best: Placement, goodput: Found, led: Sequence[tuple[Placement, Found]]
    ) -> tuple[Placement, Found]:
        """The winner, looked at closely, or one that led before, if that finds less than short runs did of
        that one, and a close look finds more: the winner may have led by luck. It is the last one that led;
        where each had a single run, which may have ended before the fleet was full, the formulas' first."""
        before = [each for each in reversed(led) if each[0] is not best]
        if self._large:
            before = greatest(before, lambda each: each[0].throughput.req_s)
        rival = before[0] if before else None
        begun = Background(partial(self._reported_closely, *rival)) if rival and free_cores() else None
        try:
            found = self._closely(best, goodput)
            self._seen_closely = found is not None
            if rival and found and found.req_s * AHEAD < rival[1].req_s and not self._stop():
                other = self._second_look(*rival, found.req_s, begun)
                if other is not None and other.req_s > found.req_s:
                    return rival[0], other
        finally:
            if begun is not None:
                begun.cancel()
        return best, found or goodput

    def _second_look(
        self, placement: Placement, roughly: Found, to_beat: float, begun: Background[Found | None] | None
    ) -> Found | None:
        """A close look, which may have begun elsewhere; it ends early if the capacity shows that no more than
        `to_beat` can come of it."""
        if begun is None:
            return self._closely(placement, roughly, lambda most: most > to_beat)
        most = begun.first_report(self._stop)
        if most is None or most <= to_beat:
            return None
        begun.wait(self._stop)
        return begun.result() if begun.done else None

    def _reported_closely(self, placement: Placement, roughly: Found, report: Report) -> Found | None:
        """A close look that reports the most that may come of it once that is known."""

        def worthwhile(most: float) -> bool:
            report(most)
            return True

        return self._closely(placement, roughly, worthwhile)

    def _over(self) -> bool:
        return self._left <= 0 or self._stop()

    def _challenge(
        self, challengers: Sequence[Placement], in_any_case: Sequence[bool] = (), ahead: float = AHEAD
    ) -> list[tuple[Placement, Found]]:
        """Let them challenge the leader one after the other; returns those that took over, with their
        goodputs. While one runs, the next ones do, on cores that are free, as if it did not take over.

        Parameters
        ----------
        in_any_case : whether each is tried also beyond the requests of challengers
        """
        led = list[tuple[Placement, Found]]()
        left = list(zip(challengers, in_any_case or [False] * len(challengers), strict=True))
        while left and (rate := self._leader[1].req_s * ahead) <= self._most:
            left, tried = [each for each in left if self._may_run(each[1])], 0
            with Ahead([partial(self._first_run, each, rate) for each, _ in left], self._stop) as first_runs:
                for tried, (each, always) in enumerate(left, 1):
                    first_run = partial(first_runs.result, tried - 1)
                    found = self._better(each, rate, first_run) if self._may_run(always) else None
                    if found is not None:
                        self._leader = each, found
                        led.append(self._leader)
                        break
            left = left[tried:]
        return led

    def _may_run(self, in_any_case: bool) -> bool:
        """Whether a challenger is to be tried now: in any case as long as none has kept the targets."""
        in_any_case = in_any_case or self._leader[1].req_s <= 0
        return not (self._stop() if in_any_case else self._over())

    def _better(self, challenger: Placement, rate: float, first_run: Callable[[], Trial]) -> Found | None:
        """The goodput of a challenger, if it exceeds the leader's.

        Parameters
        ----------
        rate : just above that of the leader; 0 where nothing has kept the targets so far
        first_run : of the challenger at that rate
        """
        if rate <= 0:
            found = self._first_roughly(challenger, challenger.throughput.req_s)
            return found if found.req_s > 0 else None
        self._simulated += 1
        runs, goal = [first_run()], self._goal
        if abs(runs[0].share - goal.attainment) < CLEAR * deviation(runs):
            trials = self._trials(challenger)
            runs.append(trials.run(rate, self._first_count(challenger, rate), 1))
        self._left -= sum(len(run.in_time) for run in runs)
        if math.fsum(run.share for run in runs) / len(runs) < goal.attainment:
            return None
        if self._large and challenger.throughput.req_s <= rate * (1 + STEP):
            # Its run was a long one. By how much it is better, a close look shows from so near.
            return Found(rate, rate, rate, tuple(runs))
        found = self._roughly(challenger, rate)
        return found if found.req_s > self._leader[1].req_s else None

    def _first_run(self, challenger: Placement, rate: float) -> Trial:
        return self._trials(challenger).run(rate, self._first_count(challenger, rate), 0)

    def _first_roughly(self, placement: Placement, start: float) -> Found:
        """The goodput of a placement that has none to exceed: where no more is affordable, a single run that
        is in time shows where to look closely."""
        if self._large:
            self._left = 0
            return self._roughly(placement, start, times=1, one_in_time=True)
        return self._roughly(placement, start)

    def _roughly(
        self, placement: Placement, start: float, times: int = ROUGH, one_in_time: bool = False
    ) -> Found:
        """The goodput by a few short runs, of so many times the requests of a challenger's first one; or only
        until one is in time."""
        trials = self._trials(placement)
        found = find_goodput(
            trials,
            self._goal.attainment,
            start,
            lambda rate: times * self._first_count(placement, rate),
            runs=ROUGH_RUNS,
            most_req_s=self._most,
            stop=self._stop,
            one_in_time=one_in_time,
        )
        self._simulated += 1
        self._left -= trials.requests
        return found

    def _closely(
        self,
        placement: Placement,
        roughly: Found,
        worthwhile: Callable[[float], bool] = lambda most_req_s: True,
    ) -> Found | None:
        """The goodput with the requests that a promise needs: more where the rough runs had more in the fleet
        than formulas say. None if there was no time for it."""
        inside = max((trial.inside for trial in roughly.trials if trial.whole and trial.kept_up), default=0)
        hardly = HARDLY * (1 - self._goal.attainment)
        easy = all(1 - trial.share < hardly for trial in roughly.trials)
        trials = self._trials(placement, seed_offset=1)
        found = precise_goodput(
            trials,
            placement.workload,
            self._goal,
            roughly.req_s * BEFORE,
            lambda rate, length: self._final_count(placement, rate, inside, length),
            self._overload_count(placement),
            runs=self._effort.final_runs,
            most_req_s=self._most,
            stop=lambda: trials.requests >= self._effort.enough or self._stop(),
            easy_req_s=roughly.req_s if easy else 0.0,
            worthwhile=worthwhile,
        )
        return None if found.req_s <= 0 and self._stop() else found

    def _trials(self, placement: Placement, seed_offset: int = 0) -> Trials:
        seed = 2 * self._seed + seed_offset
        return Trials(placement, self._cluster, self._goal, seed, self._costs, self._times, self._stop)

    def _first_count(self, placement: Placement, rate: float) -> int:
        """Requests of a first run at that rate."""
        effort = self._effort
        inside = effort.first_residents * residents(placement, rate)
        return self._count(effort.first, max(inside, effort.first_targets * self._within(rate)))

    def _final_count(self, placement: Placement, rate: float, inside: int, length: int) -> int:
        """Requests of a run that a promise rests on, so many times as long as needed, where that many were
        seen in the fleet at a time."""
        effort = self._effort
        turns = effort.residents * max(residents(placement, rate), inside)
        count = length * max(effort.final, turns, effort.targets * self._within(rate))
        return int(min(effort.most if length == 1 else effort.longest, count))

    def _overload_count(self, placement: Placement) -> int:
        """Requests of the run that shows what the fleet serves once it is full."""
        effort, places = self._effort, placement.places
        return max(effort.final, min(effort.longest, TURNS * places), FEW_TURNS * places)

    def _within(self, rate: float) -> float:
        """Requests that arrive within the target for the first token."""
        return rate * (self._goal.ttft_ms or 0.0) / 1e3

    def _count(self, least: int, wanted: float) -> int:
        return int(min(self._effort.most, max(least, wanted)))


def _roles(placement: Placement) -> frozenset[str]:
    return frozenset(replica.role for replica in placement.replicas)


def residents(placement: Placement, rate: float) -> float:
    """Requests that are in the fleet at a time, by Little's law."""
    latency = placement.latency
    return rate * (latency.ttft_ms + latency.tpot_ms * placement.workload.osl) / 1e3


def _other_steps(placement: Placement) -> Iterator[Placement]:
    """The placement with steps of half and of twice as many prompt tokens, on all replicas that have prompts
    together and, where there are several, on each."""
    isl = placement.workload.isl
    prompts = [replica.id for replica in placement.replicas if replica.role != "decode"]
    groups = [prompts] if len(prompts) == 1 else [prompts, *([one] for one in prompts)]
    for names in groups:
        for factor in (0.5, 2.0):
            changed = [_with_step(r, factor, isl) if r.id in names else r for r in placement.replicas]
            if changed != placement.replicas:
                yield placement.model_copy(update={"replicas": changed})


def _with_step(replica: Replica, factor: float, isl: float) -> Replica:
    """The replica with so many times the prompt tokens in a step: of a colocated one, beside decodes."""
    key = "step_tokens" if replica.role == "prefill" else "chunk_tokens"
    now = getattr(replica.engine, key)
    tokens = min(max(int(now * factor), SMALLEST_STEP), max(LARGEST_STEP, now))
    update: dict[str, object] = {"engine": replica.engine.model_copy(update={key: tokens})}
    if replica.role == "prefill":
        update["max_batch"] = math.ceil(tokens / isl)
    return replica.model_copy(update=update)

"""HexGen-2's search on a large cluster, instead of all groups at once: the groups of each part by themselves,
then by turns one neighbourhood after the other (search/neighbourhoods.py) and what the linear program fills
up where groups were taken out (search/ruin_and_recreate.py). Beyond the paper."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hexgen2.search.background import POLL_S, Background, Report, free_cores
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import refine
from hexgen2.search.neighbourhoods import Neighbourhoods
from hexgen2.search.partition.by_parts import groups_by_parts
from hexgen2.search.partition.whole_nodes import first_look, whole_nodes
from hexgen2.search.planning.classes import LARGE
from hexgen2.search.problem import ROLES, Phases, Solution
from hexgen2.search.ruin_and_recreate import RuinAndRecreate
from hexgen2.search.state import SearchState
from hexgen2.search.stopping import Stopping

STARTS, ROUNDED = 0.8, 0.3
"""The share of the time left that there is for starts at least, and that of it after which the linear program
is rounded no more; the parts by themselves get the rest."""
NEAR_BOUND = 0.05
"""With a time limit, parts are not looked at by themselves where the linear program's start comes this close
to the bound: where KV caches need not stay near, it is the better one."""
STARTS_UNTIL, FIRST_UNTIL = 0.6, 0.8
"""Shares of the time limit after which a flexible search does with the starts so far, and turns to pure
phases for comparison."""
PURE_UNTIL: dict[Phases, tuple[float, float]] = {"disaggregated": (0.83, 0.86), "colocated": (0.88, 0.9)}
"""The same for pure phases; the rest of the time is for the best of all."""
NO_PURE_FROM = 0.55
"""Once this share of the time limit has passed, there is none to compare with pure phases."""
MOST_BESIDE = 400
"""Of so many GPUs, pure phases are searched in the background, where a core is free. Beside a process of more
of them, this one would take longer, too."""
FIRST_BESIDE, BOUND_BESIDE = 0.82, 0.95
"""The shares of the time limit after which a search with that in the background turns to what it found with
pure phases, and waits for the bound."""
PURE_BESIDE: dict[Phases, tuple[float, float]] = {"disaggregated": (0.48, 0.54), "colocated": (0.7, 0.79)}
"""What PURE_UNTIL says, in the background; then the bound is tightened there."""
TURN = 60.0
"""Effort without an improvement after which another way to improve the best has its turn."""
AT_ONCE, MOST_AT_ONCE = 0.35, 400
"""The share of the time left in which the best start is refined as a whole, before neighbourhoods are; not on
more GPUs."""
START_MIXED = 0.8
"""The share of the time left in which the best start is mixed, if it was not."""
ALL_BUT_OUTPUT = 0.9
"""The share of the time limit after which a search of one kind of phases alone does with the parts so far."""
TIGHTENED, ALL_BUT_LAST = 0.92, 0.98
"""Shares of the time limit between which the bound is tightened."""


def has_parts(evaluator: Evaluator) -> bool:
    """Whether a cluster is searched part by part."""
    return len(evaluator.problem.usable) > LARGE and len(evaluator.parts) > 1


def explore_parts(state: SearchState, seed: int) -> None:
    """Offer the best solution of a large cluster."""
    flexible = state.evaluator.problem.phases == "flexible"
    limited = state.stopping.time_limit_s is not None
    few = len(state.evaluator.problem.usable) <= MOST_BESIDE
    late = state.stopping.spent(NO_PURE_FROM)
    if flexible and few and not late and (free_cores() or not limited):
        _improve_beside_pure(state, seed)
    else:
        if flexible and not late:
            _improve(state, seed, STARTS_UNTIL, FIRST_UNTIL)
            for phases, (starts, ends) in PURE_UNTIL.items():
                if not state.finished():
                    _improve_pure(state, phases, seed, starts, ends)
        _improve(state, seed + 1, ALL_BUT_OUTPUT, TIGHTENED)
        _tighten_bound(state, ALL_BUT_LAST)
    best = state.incumbent.best
    if best is None or state.finished() or state.slow_to_mix(best.solution):
        return
    # To evaluate a thousand replicas anew takes seconds.
    if len(state.evaluator.problem.usable) <= MOST_AT_ONCE or not state.stopping.spent(ALL_BUT_OUTPUT):
        refine(state, best.solution, "all at once")


class Beside(NamedTuple):
    """What the background found: the best solutions with pure phases, whether these are the last, whether
    there was too little time for them, and the bound."""

    pure: dict[Phases, Evaluation]
    all_pure: bool = False
    hurried: bool = True
    bound: UpperBound | None = None


def _improve_beside_pure(state: SearchState, seed: int) -> None:
    """Offer the best of all phases, while those of pure ones are searched in the background, and the bound is
    tightened there."""
    beside = Background(partial(_search_beside, state, seed))
    try:
        _improve(state, seed, STARTS_UNTIL, FIRST_BESIDE)
        if not state.finished():
            found = _pure_of(beside, partial(state.stopping.spent, FIRST_BESIDE))
            state.stopping.hurried |= found.hurried
            for phases, best in found.pure.items():
                state.take_pure(phases, best)
        _improve(state, seed + 1, ALL_BUT_OUTPUT, BOUND_BESIDE)
        if not state.finished():
            beside.wait(partial(state.stopping.spent, ALL_BUT_LAST))
            found = beside.result() if beside.done else beside.latest()
            if found is not None and found.bound is not None:
                state.bounded_by(found.bound)
    finally:
        beside.cancel()


def _pure_of(beside: Background[Beside], stop: Callable[[], bool]) -> Beside:
    """What was found with pure phases, once that is all, or it is time to stop."""
    if not beside.elsewhere:
        return beside.result()
    while not stop():
        found = beside.latest()
        if beside.done:
            return beside.result()
        if found is not None and found.all_pure:
            return found
        time.sleep(POLL_S)
    return beside.latest() or Beside({})


def _search_beside(state: SearchState, seed: int, report: Report) -> Beside:
    """The best solutions found with pure phases, and a tighter bound. Every improvement is reported."""
    found = Beside({}, hurried=False)

    def keep(phases: Phases, now: SearchState) -> None:
        if now.incumbent.best is not None:
            found.pure[phases] = now.incumbent.best
            report(found._replace(hurried=True))

    for phases, (starts, ends) in PURE_BESIDE.items():
        pure = state.restricted_to(phases, starts, ends)
        pure.progress = partial(keep, phases)
        pure.spend(state.evaluator.params.effort)
        _improve(pure, seed, starts / ends, 1.0)
        found = found._replace(hurried=found.hurried or pure.stopping.cut_anywhere is not None)
    found = found._replace(all_pure=True)
    report(found)
    quiet = replace(state, progress=None)
    _tighten_bound(quiet, BOUND_BESIDE)
    return found._replace(bound=quiet.incumbent.bound)


def _improve_pure(state: SearchState, phases: Phases, seed: int, starts: float, ends: float) -> None:
    """Offer the best solution found with these phases only, until these shares of the time limit."""
    pure = state.restricted_to(phases, starts, ends)
    pure.spend(state.evaluator.params.effort)
    try:
        _improve(pure, seed, starts / ends, 1.0)
    finally:
        state.stopping.after(pure.stopping)
        state.take_pure(phases, pure.incumbent.best)


def _tighten_bound(state: SearchState, until: float) -> None:
    """Tighten the bound until this share of the time limit, if there is one: it has left that for later."""
    relaxed, stopping = state.evaluator.relaxed, state.stopping
    if stopping.time_limit_s is not None and relaxed.list_columns() and not state.finished():
        relaxed.stop, relaxed.patient = partial(stopping.spent, until), True
        state.bounded_by(relaxed.tighten())


def _improve(state: SearchState, seed: int, starts_until: float, until: float) -> None:
    """Offer the groups of each part by themselves, and the linear program's; then improve the best, within
    these shares of the time limit."""
    whole = state.stopping
    starts_until = max(starts_until, whole.spent_share + (until - whole.spent_share) * STARTS)
    state.stopping = whole.only_until(until)
    try:
        if not state.started_by_parts:
            _offer_starts(state, whole, starts_until)
        _alternate(state, seed)
    finally:
        whole.after(state.stopping)
        state.stopping = whole


def _alternate(state: SearchState, seed: int) -> None:
    """Improve the best solution in two ways by turns, until the state is finished or neither helps any more.
    One that brought nothing in its turn gets half the effort in the next. After the first turn, the best is
    refined as a whole."""
    if state.incumbent.best is None or state.finished():
        return
    state.offer_mixed(START_MIXED)
    ways: list[RuinAndRecreate | Neighbourhoods] = [Neighbourhoods(state, seed)]
    if state.evaluator.relaxed.list_columns():
        # What the linear program knows helps most where KV caches need not stay near.
        ways.insert(not state.incumbent.within(NEAR_BOUND), RuinAndRecreate(state, seed))
    turn, refined = [TURN] * len(ways), False
    for k in itertools.cycle(range(len(ways))):
        if state.finished() or all(way.exhausted for way in ways) or state.first_mixture_is_late():
            break
        if not ways[k].exhausted:
            gained = ways[k].improve(turn[k])
            turn[k] = TURN if gained else turn[k] / 2
            for way in ways if gained else ():
                way.begin_again()
        if not refined:
            _refine_at_once(state)
            refined = True


def _refine_at_once(state: SearchState) -> None:
    """Refine the best with all its groups to look at, within a part of the time left, if a step takes little
    of that."""
    best, whole = state.incumbent.best, state.stopping
    large = len(state.evaluator.problem.usable) > MOST_AT_ONCE
    if best is None or large or state.finished() or state.slow_to_mix(best.solution):
        return
    spent = whole.spent_share
    state.stopping = whole.only_until(spent + AT_ONCE * (1 - spent))
    try:
        refine(state, best.solution, "all at once")
    finally:
        whole.after(state.stopping)
        state.stopping = whole


def _offer_starts(state: SearchState, stopping: Stopping, until: float) -> None:
    """Offer whole nodes, the groups of each part by themselves, and the linear program's, until this share of
    the time limit has passed."""
    evaluator, state.started_by_parts = state.evaluator, True
    if state.incumbent.best is None:
        first = whole_nodes(evaluator, stop=partial(stopping.spent, until))
        state.offer(evaluator.evaluate(first), "start with whole nodes")
    phases, began = evaluator.problem.phases, stopping.spent_share
    large = len(evaluator.problem.usable) > MOST_AT_ONCE
    if phases == "flexible" and large and evaluator.relaxed.list_columns():
        evaluator.relaxed.stop = partial(stopping.spent, until)
        found = evaluator.relaxed.start(roles=ROLES["colocated"])
        state.offer(evaluator.with_phases("colocated").evaluate(found), "start from the linear program")
    rounded_until = began + ROUNDED * (until - began) if large else until
    evaluator.relaxed.stop = partial(stopping.spent, rounded_until)
    _offer_rounded(state, partial(stopping.spent, until))
    if stopping.time_limit_s is not None and state.incumbent.within(NEAR_BOUND):
        return
    known = state.incumbent.best.solution if state.incumbent.best else Solution()
    found = groups_by_parts(
        evaluator, partial(stopping.spent, until), partial(_left_s, stopping, until), known
    )
    _offer_in_time(state, found, "start by parts")


def _offer_rounded(state: SearchState, stop: Callable[[], bool]) -> None:
    """Offer the linear program's groups: of pure phases, too, in a flexible search; until it is time to
    stop."""
    evaluator, relaxed, phases = state.evaluator, state.evaluator.relaxed, state.evaluator.problem.phases
    kinds: list[Phases] = [phases]
    if phases == "flexible":  # Disaggregated ones are quicker, since no colocated group has to be planned.
        large = len(evaluator.problem.usable) > MOST_AT_ONCE
        listed: list[Phases] = ["flexible"] if large else ["colocated", "flexible"]
        kinds = ["disaggregated", *(listed if relaxed.list_columns() else [])]
    for pair_roles, kind in itertools.product((True, False), kinds):
        if (pair_roles or kind != "colocated") and not (relaxed.stop() or stop()):
            found = relaxed.start(pair_roles=pair_roles, roles=ROLES[kind])
            _offer_in_time(state, found, "start from the linear program")


def _offer_in_time(state: SearchState, start: Solution, label: str) -> None:
    """Offer a start. Where it would take too long to find out what its replicas could do for one another,
    offer what colocated ones do for themselves, or nothing if there is an answer."""
    late = state.slow_to_mix(start)
    if late and all(group.role == "colocated" for group in start.groups):
        state.offer(first_look(state.evaluator, start), label)
    elif not late or state.incumbent.best is None:
        state.offer(state.evaluator.evaluate(start), label)


def _left_s(stopping: Stopping, until: float) -> float | None:
    limit_s = stopping.time_limit_s
    return None if limit_s is None else max(0.0, until * limit_s - stopping.elapsed_s)

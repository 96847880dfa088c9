"""HexGen-2's two-phase search (section 3): partition, coarsen, assign phases, plan, flow, refine.

The number of groups is not trusted to one estimate: a linear program gives the first start, the paper's
K (total memory over the memory of one replica) the second, smaller numbers the others, and each is
refined on its own. Beyond the paper, small clusters are then settled by enumeration, and elsewhere the
best is perturbed and refined again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from hexgen2.goal import OBJECTIVES
from hexgen2.placement import Placement
from hexgen2.search.background import Background, Report, free_cores, gather
from hexgen2.search.bounds.relaxations import Relaxations
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.enumeration import MAX_GPUS, enumerate_all
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.local_search import refine
from hexgen2.search.partition.initial import initial_solution, spectral_and_swaps, start_sizes
from hexgen2.search.partition.metis import metis_partition
from hexgen2.search.partition.whole_nodes import first_look, whole_nodes
from hexgen2.search.perturbation import perturb_and_refine
from hexgen2.search.problem import Phases, Problem, Solution
from hexgen2.search.ruin_and_recreate import RuinAndRecreate
from hexgen2.search.state import SearchState
from hexgen2.search.stopping import Stopping
from hexgen2.search.ties import greatest, greatest_first
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.latency import explore_latency
from hexgen2.strategies.partitions import (
    PartitionsFound,
    partitions_matter,
    search_partitions,
)
from hexgen2.strategies.parts import explore_parts, has_parts

NAME = "hexgen2"

PARTITIONERS = (spectral_and_swaps, metis_partition)
"""They take turns over the numbers of groups, the paper's first: neither is better everywhere."""


PURE: tuple[Phases, ...] = ("disaggregated", "colocated")
"""A flexible search also looks for the best solutions of these, beside the rest."""
OPEN_GAP = 0.02
"""With a larger gap to the bound, the rest of a time limit goes to the integer program and more search."""
CERTIFIED_FROM = 0.9
"""Not once this share of it has passed: such a program takes longer."""
REFINED = 0.08
"""On few GPUs, the bound is refined until the gap is this small: a tighter bound against time."""
BOUND_REFINED, BOUND_TAKEN = 0.94, 0.97
"""Until these shares of the time limit the bound is refined beside the search, and waited for."""
LISTED, PARTS_LISTED = 0.42, 0.82
"""Once this share of the time limit has passed, the linear program does with the columns listed so far; the
second where the search goes part by part, which needs less time afterwards, if all can be listed by then."""
BOUNDED, PARTS_BOUNDED, BOUND_AT_LEAST = 0.25, 0.4, 0.05
"""The share of the time limit after which the search leaves planning groups for the bound to its end, the
second part by part; it has the third for that in any case."""
FIRST, AFTER_JOINING = 0.15, 0.35
"""Share of the time limit for joining nodes for a first answer of colocated replicas, and for one of the
others, from when start-up is over; and how much more for nodes in which the model fits."""
FOR_MIXING = 0.35
"""The share of the time left in which a first answer is mixed."""
LOOK_S_PER_PLACE, MOST_FOR_A_LOOK = 0.01, 0.2
"""Seconds that simulations at full load may take for each request that the first fleet found decodes at a
time (later ones decode more), and the share of the time limit that they get at most; none if they take longer
than all of it."""
REFINED_BOUND, CERTIFICATE, PARTITIONS = "bound", "certificate", "partitions"
"""Names of what else runs beside the search, where cores are free."""
LINEAR_TURN = 60.0
"""Effort in vain after which the linear program does not fill up its start any more."""
LINEAR_UNTIL = 0.4
"""Share of the time limit after which the linear program's start is taken as far as it has come."""
PURE_UNTIL: dict[Phases, tuple[float, float]] = {"disaggregated": (0.4, 0.5), "colocated": (0.6, 0.7)}
"""The same for pure phases, and the share of the time limit after which these searches end."""
MANY_UNLIKE, UNLIKE = 8, 2.0
"""With more classes of nodes, most groups of a candidate have to be planned: a search among colocated
replicas gets so many times the effort, and the linear program's start is first filled up."""
PROMISING = 0.95
"""A search among pure phases takes its time if it finds this share of the best."""
NEAR = 0.7
"""A mixture is not looked for near the best of pure phases that serves less than this share of the best: it
would take longest there, and end behind."""
PATIENCE = 10.0
"""A time limit allows so many times the effort."""


class PureFound(NamedTuple):
    """What a search among solutions of pure phases found, if anything, and how it ended."""

    best: Evaluation | None
    stopping: Stopping


class Certificate(NamedTuple):
    """What the integer program gives: a solution, if it knows a better one, and a bound; and the bound of the
    linear program."""

    relaxed: UpperBound
    solution: Solution
    bound: UpperBound


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best placement found; see SearchOptions and run_search for limits and errors."""
    if problem.goal.objective == "cost" and problem.targets.given and options.simulated:
        from hexgen2.strategies.within_targets import cheapest_within_targets

        return cheapest_within_targets(problem, options, _search)
    return _search(problem, options)


def _search(problem: Problem, options: SearchOptions) -> Placement:
    def explore_all(state: SearchState) -> None:
        goal = problem.goal
        if goal.objective == "latency":
            explore_latency(state, options.seed, explore)
        elif goal.rents:
            _explore_rentals(state, options.seed)
        else:
            explore(state, options.seed, options.certify, options.simulated)
            rest = options.time_limit_s is not None and not state.incumbent.within(OPEN_GAP)
            if rest and not options.certify and _open(state) and not state.stopping.spent(CERTIFIED_FROM):
                _certify(state, options.seed)

    return run_search(NAME, problem, options, explore_all, rents=True, objectives=OBJECTIVES)


def _explore_rentals(state: SearchState, seed: int) -> None:
    """Offer the best rental; only such searches import what looks for it, which takes time."""
    goal = state.evaluator.problem.goal
    if goal.objective == "cost":
        from hexgen2.rent.cheapest import explore_cost

        explore_cost(state, seed)
    elif goal.frontier is not None:
        from hexgen2.rent.frontier import explore_frontier

        explore_frontier(state, seed, explore)
    else:
        from hexgen2.rent.within_budget import explore_budget

        explore_budget(state, seed, explore)


def explore(state: SearchState, seed: int, certified: bool = False, simulated: bool = False) -> None:
    """Offer the best solution of a cluster whose GPUs are all there to use, and a bound.

    Parameters
    ----------
    certified : whether to solve the integer program, too
    simulated : whether the best will be simulated afterwards, within the same time limit
    """
    evaluator = state.evaluator
    _offer_whole_nodes(state)
    if simulated:
        _keep_time_for_a_look(state)
    by_parts = has_parts(evaluator) and state.budget is None
    evaluator.relaxed.stop = partial(state.stopping.spent, PARTS_LISTED if by_parts else LISTED)
    evaluator.relaxed.over = state.stopping.out_of_time
    evaluator.relaxed.hopeless = _Hopeless(state.stopping, PARTS_LISTED if by_parts else LISTED)
    if not by_parts:
        state.offer_mixed(FOR_MIXING)
    if evaluator.relaxed.list_columns():
        until = max(PARTS_BOUNDED if by_parts else BOUNDED, state.stopping.spent_share + BOUND_AT_LEAST)
        evaluator.relaxed.stop = partial(state.stopping.spent, until)
        evaluator.relaxed.patient = not by_parts or state.stopping.time_limit_s is None
    elif by_parts:
        state.offer_mixed(FOR_MIXING)
    params, began = evaluator.params, max(BOUNDED, state.stopping.spent_share)
    large = len(evaluator.problem.usable) > params.large_gpus
    bound_last = not large and state.stopping.time_limit_s is None
    if bound_last:
        evaluator.relaxed.enough = math.inf
    others: dict[str, Background] = {}
    flexible = evaluator.problem.phases == "flexible" and not by_parts
    limited = state.stopping.time_limit_s is not None
    if not by_parts and (certified or (limited and free_cores())) and partitions_matter(state):
        others[PARTITIONS] = Background(partial(search_partitions, state))
    if flexible:
        known = state.best_req_s, began
        others |= {phases: Background(partial(_search_pure, state, phases, seed, *known)) for phases in PURE}
    try:
        state.bounded_by(evaluator.relaxed.upper_bound())
        state.spend(params.effort * _patience(state), params.close_gap if large else 0.0)
        if by_parts:
            explore_parts(state, seed)
        elif flexible:
            beside = _refine_bound if bound_last or limited else None
            _mix(state, others, began, _begin_certificate if certified else beside)
            settle(state, seed)
        else:
            climb_from_linear(state)
            if limited and not certified:
                _refine_bound(state, others)
            climb_from_other_starts(state)
            if bound_last and not certified:
                _refine_bound(state, others)
            settle(state, seed)
        if REFINED_BOUND in others and not state.incumbent.proved:
            _take_bound(state, others[REFINED_BOUND])
        if PARTITIONS in others and not state.incumbent.proved:
            _take_partitions(state, others[PARTITIONS])
        if certified and _open(state):
            _certify(state, seed, others.get(CERTIFICATE))
    finally:
        for search in others.values():
            search.cancel()


def _offer_whole_nodes(state: SearchState) -> None:
    """Offer a first answer of colocated replicas, and one of the others."""
    evaluator, stopping, began = state.evaluator, state.stopping, state.stopping.spent_share
    for k, role in enumerate(("colocated", "decode"), 1):
        stop_joining = partial(stopping.spent, began + k * FIRST)
        stop = partial(stopping.spent, began + k * FIRST + AFTER_JOINING)
        if role in evaluator.problem.roles and not (state.incumbent.best and stop()):
            divide = stopping.time_limit_s is not None
            first = whole_nodes(evaluator, role, stop, stopping.too_late, stop_joining, divide)
            state.offer(first_look(evaluator, first), "start with whole nodes")


def _keep_time_for_a_look(state: SearchState) -> None:
    """Leave some of the time limit for a simulation at full load, where the first answer tells that it will
    not take too long: colocated replicas do not all do as well as formulas say."""
    best, stopping = state.incumbent.best, state.stopping
    if best is None or stopping.time_limit_s is None or state.evaluator.problem.targets.given:
        return
    seconds = LOOK_S_PER_PLACE * sum(replica.plan.batch for replica in best.colocated)
    if seconds <= stopping.time_limit_s:
        stopping.time_limit_s -= min(seconds, MOST_FOR_A_LOOK * stopping.time_limit_s)


def _refine_bound(state: SearchState, others: dict[str, Background]) -> None:
    """Refine the bound beside the search, as far as the best so far asks for; with a time limit, on another
    core, if one is free, and as far as time allows."""
    limited = state.stopping.time_limit_s is not None
    if state.incumbent.best and not state.incumbent.proved and (free_cores() or not limited):
        relaxed = state.evaluator.relaxed.apart()
        if limited:
            relaxed.stop = partial(state.stopping.spent, BOUND_REFINED)
        gap = OPEN_GAP if limited else REFINED
        others[REFINED_BOUND] = Background(partial(_refined_bound, relaxed, state.best_req_s, gap))


def _take_bound(state: SearchState, refined: Background[UpperBound]) -> None:
    """Take a bound that was refined beside the search, if it is there in time."""
    refined.wait(partial(state.stopping.spent, BOUND_TAKEN))
    if refined.done:
        state.bounded_by(refined.result())


def _begin_certificate(state: SearchState, others: dict[str, Background]) -> None:
    """Solve the integer program beside the search."""
    if _open(state):
        others[CERTIFICATE] = Background(_certificate_of(state, state.evaluator.relaxed.apart()))


def _certificate_of(state: SearchState, relaxed: Relaxations) -> Callable[[Report], Certificate]:
    """What solves the integer program for something better than the best so far, within the time limit."""
    branches = state.evaluator.params.certify_branches
    return partial(_solve_whole, relaxed, state.best_req_s, branches, state.stopping)


def _mix(
    state: SearchState,
    others: dict[str, Background],
    began: float,
    begin: Callable[[SearchState, dict[str, Background]], None] | None,
) -> None:
    """Offer what is near the linear program's start and the best solutions of pure phases. Once these are
    known, something else may begin beside that. It began once this share of the time limit had passed."""
    params, patience, whole = state.evaluator.params, _patience(state), state.stopping
    state.stopping = whole.only_until(_later(began, LINEAR_UNTIL))
    state.spend(params.effort * patience, stale_effort=params.linear_effort * patience)
    try:
        climb_from_linear(state)
    finally:
        whole.after(state.stopping)
        state.stopping = whole
    state.spend(params.effort * patience, stale_effort=math.inf)
    wanted = set(PURE)
    if state.finished():
        # Where formulas prove a split to be best, colocated replicas may still serve more when simulated.
        wanted = {"colocated"} if state.incumbent.proved and _in_time(state) else set()
    try:
        gather([others[name] for name in others if name in wanted], state.stopping.out_of_time)
    finally:
        for phases in PURE:
            if phases in wanted:
                _take_pure(state, phases, others[phases])
    if begin is not None:
        begin(state, others)
    for kind, best in greatest_first(state.pure.items(), lambda each: each[1].req_s):
        if best.req_s >= NEAR * state.best_req_s:
            refine(state, best.solution, f"start all {kind}")
    state.spend(params.effort * patience, stale_effort=params.stale_effort * patience)
    if len(state.evaluator.problem.usable) > 1:
        climb_from_partitions(state)


def _open(state: SearchState) -> bool:
    """Whether there is something to find or to prove, and time."""
    return not (state.incumbent.proved or state.stopping.out_of_time())


def _in_time(state: SearchState) -> bool:
    return not (state.stopping.out_of_time() or state.reached())


def _refined_bound(relaxed: Relaxations, best_req_s: float, gap: float, report: Report) -> UpperBound:
    """The bound, refined until the best is this close to it."""
    relaxed.enough = best_req_s / (1 - gap)
    return relaxed.upper_bound()


class _Hopeless:
    """Whether not all columns will be listed by this share of the time limit, at the pace since this was
    first asked: what comes before takes longer."""

    def __init__(self, stopping: Stopping, listed: float) -> None:
        self._stopping, self._listed = stopping, listed
        self._first: tuple[float, float] | None = None

    def __call__(self, listed: float) -> bool:
        """The same, now that this share of them is listed."""
        spent = self._stopping.spent_share
        if self._first is None:
            self._first = spent, listed
        began, before = self._first
        if listed <= before:
            return False
        over = spent + (1 - listed) * (spent - began) / (listed - before)
        return spent > BOUNDED and over > self._listed and self._stopping.spent(0.0)


def _later(began: float, share: float) -> float:
    """This share of the time limit, where the columns are listed once BOUNDED has passed; later, if they were
    listed later."""
    return began + (share - BOUNDED) / (1 - BOUNDED) * (1 - began)


def _patience(state: SearchState) -> float:
    return 1.0 if state.stopping.time_limit_s is None else PATIENCE


def _unlike(state: SearchState) -> bool:
    """Whether few nodes are alike."""
    return len(state.evaluator.planner.classes.nodes) > MANY_UNLIKE


def _search_pure(
    state: SearchState, phases: Phases, seed: int, known_req_s: float, began: float, report: Report
) -> PureFound:
    """The best found among solutions with these phases only. Every improvement is reported. Where it is far
    less than what is known otherwise, it is only looked for near two starts."""
    params, patience = state.evaluator.params, _patience(state)
    if phases == "disaggregated" and len(state.evaluator.problem.usable) < 2:
        return PureFound(None, state.stopping.again())
    listed, until = (_later(began, share) for share in PURE_UNTIL[phases])
    pure = state.restricted_to(phases, listed, until)
    pure.progress = lambda now: report(now.incumbent.best)
    stale = params.disaggregated_effort if phases == "disaggregated" else params.colocated_effort
    if phases == "colocated" and _unlike(state):
        stale *= UNLIKE
    pure.spend(params.effort * patience, stale_effort=stale * patience)
    climb_from_linear(pure)
    climb_from_other_starts(pure, pure.best_req_s < PROMISING * known_req_s)
    if pure.best_req_s >= PROMISING * known_req_s:
        settle(pure, seed)
    return PureFound(pure.incumbent.best, pure.stopping)


def _take_pure(state: SearchState, phases: Phases, search: Background[PureFound]) -> None:
    """Offer what a search with these phases found; if it was not let to its end, what it reported last."""
    if search.done:
        found = search.result()
        state.stopping.after(found.stopping)
        state.take_pure(phases, found.best)
    else:
        state.stopping.hurried = True
        state.take_pure(phases, search.latest())


def _take_partitions(state: SearchState, search: Background[PartitionsFound]) -> None:
    """Take the bound and the best solution of a search over partitions."""
    search.wait(state.stopping.out_of_time)
    found: PartitionsFound | None = search.result() if search.done else search.latest()
    if found is not None:
        if found.best is not None:
            again = state.evaluator.evaluate(found.best.solution, found.best)
            state.offer(again, "best partition")
        if found.bound is not None:
            state.bounded_by(found.bound)


def climb_from_starts(state: SearchState) -> None:
    """Refine the linear program's start and others, each on its own."""
    climb_from_linear(state)
    climb_from_other_starts(state)


def climb_from_other_starts(state: SearchState, only_best: bool = False) -> None:
    """Refine the paper's starts, or only the best; among colocated replicas, that with whole nodes."""
    evaluator = state.evaluator
    if evaluator.problem.phases == "colocated" or len(evaluator.problem.usable) < 2:
        first = whole_nodes(evaluator, stop=state.stopping.out_of_time)
        refine(state, first, "start with whole nodes")
        return
    climb_from_partitions(state, only_best)


def climb_from_partitions(state: SearchState, only_best: bool = False) -> None:
    """Refine the paper's starts, or only the best of them."""
    evaluator, sizes = state.evaluator, start_sizes(state.evaluator.problem)
    starts: Iterator[tuple[int, Solution]] = (
        (groups, initial_solution(evaluator, groups, partitioner))
        for groups, partitioner in zip(sizes, itertools.cycle(PARTITIONERS), strict=False)
    )
    if only_best:
        starts = iter(greatest_first(starts, lambda start: evaluator.evaluate(start[1]).score)[:1])
    while not state.finished() and (start := next(starts, None)) is not None:
        refine(state, start[1], f"start with {start[0]} groups")


def climb_from_linear(state: SearchState) -> None:
    """Refine the linear program's start."""
    evaluator = state.evaluator
    with state.uncounted():
        laid_out = [evaluator.relaxed.start()]
        if not state.stopping.out_of_time():
            laid_out.append(evaluator.relaxed.start(pair_roles=True))
    linear = greatest(laid_out, lambda solution: evaluator.evaluate(solution).score)[0]
    if linear.groups:
        label = "start from the linear program"
        if (state.stopping.time_limit_s is not None or _unlike(state)) and state.budget is None:
            # To refine a poor start takes longer than to find a better one.
            state.offer(evaluator.evaluate(linear), label)
            RuinAndRecreate(state, 0).improve(LINEAR_TURN)
            linear = state.incumbent.best.solution if state.incumbent.best else linear
        refine(state, linear, label)


def settle(state: SearchState, seed: int) -> None:
    """Enumerate a small cluster; else, or if that is too much, perturb the best and refine it again."""
    if len(state.evaluator.problem.usable) <= MAX_GPUS and not state.finished():
        enumerate_all(state, state.evaluator.params.enumeration_branches)
    perturb_and_refine(state, seed, state.evaluator.params.perturbations)


def _certify(state: SearchState, seed: int, begun: Background[Certificate] | None = None) -> None:
    """The integer program, which proves a tighter bound and may know a better start; then more of the
    same search."""
    params = state.evaluator.params
    best = state.incumbent.best
    if best is not None:  # By simulation, it may still be the better one.
        state.earlier.append(best)
    if begun is None:
        found = _certificate_of(state, state.evaluator.relaxed)(state.bounded_by)
    else:
        try:
            begun.wait(state.stopping.out_of_time)
        finally:  # After Ctrl-C, too.
            if (bound := begun.latest()) is not None:
                state.bounded_by(bound)
        if not begun.done:
            return
        found = begun.result()
    state.bounded_by(found.relaxed)
    state.bounded_by(found.bound)
    # A flexible search still ends when it stops to improve.
    state.spend(params.certify_effort, close_gap=0.0, stale_effort=state.stopping.stale_effort)
    if found.solution.groups and not state.slow_to_mix(found.solution):
        refine(state, found.solution, "start from the integer program")
    if not state.first_mixture_is_late():
        settle(state, seed + 1)


def _solve_whole(
    relaxed: Relaxations, known_req_s: float, branches: int, stopping: Stopping, report: Report
) -> Certificate:
    """The integer program, for something better than known_req_s; the linear program's bound is reported."""
    relaxed.enough = known_req_s
    bound = relaxed.upper_bound()
    report(bound)
    if stopping.out_of_time():
        return Certificate(bound, Solution(()), bound)
    solution, limit = relaxed.whole(branches=branches, time_s=stopping.time_left_s, known=known_req_s)
    return Certificate(bound, solution, limit)

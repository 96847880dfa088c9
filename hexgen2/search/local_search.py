"""Flow-guided refinement: the max flow says which replicas starve and which idle.

HexGen-2, section 3.4. Replicas at capacity are bottlenecks, the others have GPUs to give; where a KV
route is full, the replicas at its ends are tried against all others. The guided steps come first; if none
of them improves the solution, the whole neighbourhood is tried; if that fails too, the search stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from hexgen2.search.budget import Budget, trades
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.flow.duals import Duals
from hexgen2.search.operators import exchanges, flips, idle_gpus, merges, moves, recruits, splits, swaps
from hexgen2.search.problem import Solution
from hexgen2.search.state import SearchState
from hexgen2.search.steps import Neighbour, Step
from hexgen2.search.ties import exceeds, greatest_first

MANY_GROUPS, STEPS_AT_A_TIME = 40, 200
"""With more groups than these, so many steps are compared before the best is taken."""
FULL = 1 - 1e-6
"""Share of a capacity from which it counts as full."""


def refine(state: SearchState, start: Solution, label: Step | str) -> Evaluation:
    """Climb from `start` until no step improves the score; the state keeps the best seen."""
    evaluator = state.evaluator
    current = evaluator.reordered(evaluator.evaluate(start), state.stopping.out_of_time)
    state.offer(current, label)
    while not state.finished():
        better = _best_step(state, current, guided_steps(evaluator, current, state.budget))
        if better is None:
            better = _best_step(state, current, all_steps(evaluator, current, state.budget))
        if better is None:
            break
        step, current = better[0], evaluator.reordered(better[1], state.stopping.out_of_time)
        state.offer(current, step)
    return current


def _best_step(
    state: SearchState, current: Evaluation, steps: Iterable[Neighbour]
) -> tuple[Step, Evaluation] | None:
    """The step with the highest score, if it improves the current one; of many groups, the best of the first
    steps among which one does."""
    seen, duals = set[tuple](), state.evaluator.duals(current)
    if len(current.solution.groups) <= MANY_GROUPS:
        return _best_of(state, current, steps, duals, seen)
    left = iter(steps)
    while some := list(itertools.islice(left, STEPS_AT_A_TIME)):
        found = _best_of(state, current, some, duals, seen)
        if found is not None or state.finished():
            return found
    return None


def _best_of(
    state: SearchState, current: Evaluation, steps: Iterable[Neighbour], duals: Duals | None, seen: set[tuple]
) -> tuple[Step, Evaluation] | None:
    """The step with the highest score, if it improves the current one. Steps are evaluated in the order of
    their upper limits, until no limit left exceeds the best score."""
    evaluator = state.evaluator
    threshold = current.score
    promising: list[tuple[float, Neighbour]] = []
    for step, solution in _hopeful(state, steps, threshold):
        limit = evaluator.limits.of_hopeful(solution, threshold)
        if not exceeds(limit, threshold) or solution.key in seen:
            continue
        seen.add(solution.key)
        if duals:
            limit = min(limit, evaluator.limit_by_duals(solution, current, duals))
        if exceeds(limit, threshold):
            promising.append((limit, (step, solution)))
    best: tuple[Step, Evaluation] | None = None
    for limit, (step, solution) in greatest_first(promising, lambda promise: promise[0]):
        if not exceeds(limit, threshold) or (best and state.finished()) or state.stopping.out_of_time():
            break
        if not exceeds(evaluator.limit_by_links(solution, current), threshold):
            continue
        tried = evaluator.evaluate(solution, current)
        if exceeds(tried.score, threshold):
            best, threshold = (step, tried), tried.score
    return best


def _hopeful(state: SearchState, steps: Iterable[Neighbour], threshold: float) -> Iterator[Neighbour]:
    """The steps that may pass the threshold by the GPUs' own rates, until the state is finished. The groups
    that they make are looked at for many steps together."""
    evaluator, left = state.evaluator, iter(steps)
    while some := list(itertools.islice(left, STEPS_AT_A_TIME)):
        hopeful = []
        for step, solution in some:
            state.groups_looked_at += len(solution.groups)
            if state.finished():
                return
            if state.budget and not state.budget.affordable(solution):
                continue
            if exceeds(evaluator.limits.roughly(solution, threshold), threshold):
                hopeful.append((step, solution))
        groups = dict.fromkeys(group for _, solution in hopeful for group in solution.groups)
        for role in evaluator.problem.roles:
            counts = (group.counts for group in groups if group.role == role)
            evaluator.planner.look_ahead([role], counts, lambda share: state.finished())
        for neighbour in hopeful:
            if state.finished():
                return
            yield neighbour


def guided_steps(
    evaluator: Evaluator, evaluation: Evaluation, budget: Budget | None = None
) -> Iterator[Neighbour]:
    """Steps that relieve bottlenecks: they give GPUs of idle replicas to full ones and change the ends of
    full routes. With a budget, they also rent other GPUs."""
    solution, alike, roles = evaluation.solution, evaluator.alike, evaluator.problem.roles
    full, spare = _pressure(evaluation)
    if full and spare:
        yield from moves(solution, spare, full, alike)
        yield from swaps(solution, spare, full, alike)
        yield from flips(solution, spare, alike, roles)
    if budget:
        yield from trades(budget, solution, spare, full)
    else:
        yield from recruits(solution, idle_gpus(solution, _node_sizes(evaluator)), alike, roles)
    ends = _full_route_ends(evaluation)
    if ends:
        everyone = list(range(len(solution.groups)))
        yield from exchanges(solution, ends, everyone, alike)
        yield from swaps(solution, ends, everyone, alike)
        yield from flips(solution, ends, alike, roles)


def all_steps(
    evaluator: Evaluator, evaluation: Evaluation, budget: Budget | None = None
) -> Iterator[Neighbour]:
    """The whole neighbourhood."""
    solution, alike, roles = evaluation.solution, evaluator.alike, evaluator.problem.roles
    everyone = list(range(len(solution.groups)))
    return itertools.chain(
        moves(solution, everyone, everyone, alike),
        swaps(solution, everyone, everyone, alike),
        flips(solution, everyone, alike, roles),
        merges(solution, alike, roles),
        splits(solution, alike, roles),
        trades(budget, solution, everyone, everyone) if budget else (),
    )


def _node_sizes(evaluator: Evaluator) -> tuple[int, ...]:
    return tuple(len(gpus) for gpus in evaluator.problem.node_gpus)


def _pressure(evaluation: Evaluation) -> tuple[list[int], list[int]]:
    """Indices of the groups whose replicas are at capacity, and of all other groups."""
    loads = evaluation.routes
    full = [
        replica.index
        for replicas, capacity, carried in (
            (evaluation.senders, evaluation.network.prefill, loads.sum(axis=1)),
            (evaluation.receivers, evaluation.network.decode, loads.sum(axis=0)),
        )
        for replica, limit, load in zip(replicas, capacity, carried, strict=True)
        if load >= limit * FULL
    ]
    return full, sorted(set(range(len(evaluation.solution.groups))) - set(full))


def _full_route_ends(evaluation: Evaluation) -> list[int]:
    """Indices of the groups at both ends of KV routes that are full or cross a full link."""
    network, flow = evaluation.network, evaluation.routes
    if not flow.size:
        return []
    full = (flow >= network.routes * FULL) & (flow > 0)
    if network.shared is not None:
        full |= network.shared.full_routes(flow)
    rows, columns = np.nonzero(full)
    ends = {evaluation.senders[i].index for i in rows} | {evaluation.receivers[j].index for j in columns}
    return sorted(ends)

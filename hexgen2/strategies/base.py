"""What a strategy is: one function from a problem to a placement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cost_model.errors import InfeasibleError, InputError
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import Alternative, Placement, SearchRecord
from hexgen2.rent.rental import build_rental
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.build import build_placement
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.finalists import SIMPLER_UNSEEN
from hexgen2.search.infeasible import unmet
from hexgen2.search.params import DEFAULT, Params
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Problem, counts_of
from hexgen2.search.state import SearchState
from hexgen2.search.stopping import Stopping, ctrl_c_is_noted
from hexgen2.search.ties import greatest_first

SLOWER = (1.0, 0.5)
"""By how many standard deviations costs are higher in a search for cautious placements; the second counts
where nothing meets the targets under the first."""


class SearchProgress(Protocol):
    """A search under way, as far as a user is told: requests/s of the best so far and of the bound, and how
    many solutions were evaluated."""

    @property
    def best_req_s(self) -> float: ...

    @property
    def bound_req_s(self) -> float | None: ...

    @property
    def evaluations(self) -> int: ...


@dataclass(frozen=True)
class SearchOptions:
    """How to search.

    Attributes
    ----------
    seed : the same seed gives the same placement
    time_limit_s : stop after so many seconds with the best so far
    certify : spend more time on a proof of how good the answer is
    progress : called with the state of the search at every improvement
    params : tuning constants
    simulated : whether the simulator chooses among finalists and finds what is promised; otherwise formulas
        have the last word
    robust : choose the finalist that fares best under cost errors
    """

    seed: int = 0
    time_limit_s: float | None = None
    certify: bool = False
    progress: Callable[[SearchProgress], None] | None = None
    params: Params = DEFAULT
    simulated: bool = True
    robust: bool = False


FORMULA_ERROR = 0.08
"""By so much formulas may be kinder to some phases than to others."""
FOR_THE_PROMISE = 0.4
"""Share of the time limit that is kept for simulations where a promise within targets rests on them."""
FOR_LATENCIES = 0.2
"""The same where the latencies at a rate are what is promised."""
FOR_ROBUSTNESS, OF_THE_REST = 0.6, 0.5
"""Share of the time limit that is kept for what `robust` takes; and the share of what is left then that the
search for slower costs takes, and after it the promise. The rest is for comparing under perturbed costs."""
OUTPUT_S, OUTPUT_S_PER_GPU, MOST_FOR_OUTPUT = 0.05, 0.0012, 0.3
"""Seconds kept for building, checking and printing a placement, at most this share of the time limit."""
RENTAL_S, RENTAL_S_PER_GPU, GPUS_RENTED = 0.3, 0.004, 128
"""The same for planning what is rented once more, as a cluster of its own, of at most about so many GPUs."""

Strategy = Callable[[Problem, SearchOptions], Placement]
Build = Callable[[Problem, Evaluation, str, SearchRecord, UpperBound | None], Placement]


def run_search(
    name: str,
    problem: Problem,
    options: SearchOptions,
    explore: Callable[[SearchState], None],
    fewest_gpus: int = 2,
    rents: bool = False,
    objectives: Collection[str] = ("throughput", "goodput"),
    evaluator: Callable[[Problem, Params], Evaluator] = Evaluator,
    build: Build = build_placement,
) -> Placement:
    """Run `explore` until it ends, runs out of time or is interrupted, and build its best solution.

    Parameters
    ----------
    fewest_gpus : GPUs that a placement of this strategy needs; one where replicas are colocated
    rents : whether `explore` chooses what to rent
    objectives : which objectives `explore` searches for
    evaluator : makes the evaluator of the solutions
    build : makes the placement from the best solution

    Raises
    ------
    InputError : the goal is to rent, or has an objective, and this strategy does not
    InfeasibleError : no solution carries a single request; the message says why
    KeyboardInterrupt : interrupted before anything was found
    """
    if problem.goal.rents and not rents:
        raise InputError(
            "--strategy", name, "does not choose what to rent", "use hexgen2, or give no --budget"
        )
    if problem.goal.objective not in (*objectives, "cost"):
        problem_text = f"does not search for --objective {problem.goal.objective}"
        raise InputError("--strategy", name, problem_text, "use hexgen2")
    if "colocated" in problem.roles:
        fewest_gpus = 1
    if len(problem.usable) < fewest_gpus:
        count = "one GPU" if len(problem.usable) else "no GPU"
        raise InfeasibleError(
            f"no feasible placement: {problem.cluster.name} has {count}, and a prefill and a decode replica "
            "need one each; add GPUs"
        )
    stopping = Stopping(before_output_s(problem, options))
    state = SearchState(
        evaluator(problem, options.params),
        stopping.of_which(_for_the_promise(problem, options)),
        progress=options.progress,
        keeps_finalists=options.robust,
    )
    incumbent = state.incumbent
    try:
        explore(state)
    except KeyboardInterrupt:
        if incumbent.best is None or incumbent.best.req_s <= 0:
            raise
        stopping.interrupt()
    except InfeasibleError:
        state.stopping.raise_if_interrupted()
        raise
    if incumbent.best is None or incumbent.best.req_s <= 0:
        state.stopping.raise_if_interrupted()
        raise InfeasibleError(_why_infeasible(problem, state))
    record = SearchRecord(
        seconds=stopping.elapsed_s,
        seed=options.seed,
        evaluations=state.evaluator.evaluations,
        trace=incumbent.trace,
        cut=stopping.cut or state.stopping.cut_anywhere,
        alternatives=[] if problem.goal.objective == "latency" else _alternatives(state, incumbent.best),
    )
    kept = [_unseen(state)] if stopping.out_of_time() else _finalists(state, options)
    if problem.goal.rents:
        finalists = [build_rental(problem, state, each, name, record) for each in kept]
    else:
        finalists = [build(problem, each, name, record, incumbent.bound) for each in kept]
    found = finalists[0]
    cluster = Cluster.from_spec(found.cluster)
    if options.robust:
        from hexgen2.promise.robust import with_robust_promise

        slower = _for_slower_costs(state, options, explore, evaluator)
        cautious = [build(problem, each, name, record, incumbent.bound) for each in slower]
        part = stopping.of_what_is_left(OF_THE_REST)
        found = with_robust_promise(
            finalists, cluster, options.seed, stopping, part.out_of_time, cautious=cautious
        )
        stopping.after(part)
    elif options.simulated:
        try:
            found = promised(finalists, cluster, options.seed, stopping)
        except KeyboardInterrupt:  # The formulas' first choice, without a promise.
            stopping.interrupt()
    cut = stopping.cut or state.stopping.cut_anywhere
    ended = record.model_copy(update={"seconds": stopping.elapsed_s, "cut": cut})
    return found.model_copy(update={"search": ended})


def promised(finalists: Sequence[Placement], cluster: Cluster, seed: int, stopping: Stopping) -> Placement:
    """The best of the finalists by simulation, with its promise (see with_promise); the first without one, if
    no time is left. Ctrl-C leaves what simulations have shown by then."""
    if stopping.out_of_time():
        return finalists[0]
    from hexgen2.promise.keep import with_promise  # Slow to import: the simulator comes with it.

    with ctrl_c_is_noted():
        return with_promise(finalists, cluster, seed, stopping.out_of_time)


def _for_the_promise(problem: Problem, options: SearchOptions) -> float:
    """The share of the time limit that is kept for the promise."""
    if options.robust:
        return FOR_ROBUSTNESS
    if not options.simulated:
        return 0.0
    if problem.targets.given:
        return FOR_THE_PROMISE
    return FOR_LATENCIES if problem.goal.request_rate is not None else 0.0


def before_output_s(problem: Problem, options: SearchOptions) -> float | None:
    """Seconds of the time limit within which the search has to end."""
    if options.time_limit_s is None:
        return None
    output_s = OUTPUT_S + OUTPUT_S_PER_GPU * len(problem.usable)
    if problem.goal.rents:
        output_s += RENTAL_S + RENTAL_S_PER_GPU * min(len(problem.usable), GPUS_RENTED)
    return options.time_limit_s - min(output_s, MOST_FOR_OUTPUT * options.time_limit_s)


def _alternatives(state: SearchState, best: Evaluation) -> list[Alternative]:
    """What a flexible search found with either kind of phases alone, and in all; nothing of another search.
    A mixture of phases may turn out to be none."""
    of_kind = {
        "disaggregated": not best.colocated,
        "colocated": not (best.prefill or best.decode or best.mixed),
    }
    found = {
        phases: best if of_kind[phases] and best.better_than(pure) else pure
        for phases, pure in state.pure.items()
    }
    return [
        Alternative(phases=phases, req_s=each.req_s, kv_limited=each.kv_limited)  # type: ignore[arg-type]
        for phases, each in [*found.items(), ("flexible", best)]
        if found
    ]


def _unseen(state: SearchState) -> Evaluation:
    """The solution to answer with where there is no time for simulations."""
    best, simple = state.incumbent.best, state.unmixed
    assert best is not None
    if state.evaluator.problem.goal.objective != "throughput" or simple is None:
        return best
    return simple if simple.req_s >= SIMPLER_UNSEEN * best.req_s else best


def _finalists(state: SearchState, options: SearchOptions) -> list[Evaluation]:
    """The solutions that are worth a simulation, the best by formulas first."""
    best, problem = state.incumbent.best, state.evaluator.problem
    assert best is not None
    objective = problem.goal.objective
    kept = [best]
    if problem.phases == "flexible" and objective in ("throughput", "goodput"):
        # Formulas are not equally kind to all, and a fleet in which nobody works for others is simpler.
        least = best.req_s * (1 - FORMULA_ERROR) if objective == "throughput" else 0.0
        simpler = (state.evaluator.each_alone(best), state.unmixed, *state.pure.values())
        kept += [each for each in simpler if each is not None and not each.mixed and each.req_s >= least]
        kept += [each for each in state.earlier if each.req_s >= least]
    if not problem.goal.rents and (options.robust or objective in ("goodput", "latency")):
        kept += state.finalists.best()
    unlike: dict[tuple, Evaluation] = {}
    for each in kept:
        unlike.setdefault((each.solution.key, bool(each.mixed)), each)
    return list(unlike.values())


def _for_slower_costs(
    state: SearchState,
    options: SearchOptions,
    explore: Callable[[SearchState], None],
    evaluator: Callable[[Problem, Params], Evaluator],
) -> list[Evaluation]:
    """The best solutions of the same search where all costs are higher by as much as they are off, under the
    costs as predicted: they leave room where the others are at the edge of the targets."""
    from hexgen2.promise.cost_errors import CostErrors
    from hexgen2.promise.planned import under_costs_of

    problem, stopping = state.evaluator.problem, state.stopping
    errors = CostErrors.of(problem.costs, problem.cluster)
    for deviations in SLOWER:
        if stopping.out_of_time():
            break
        costs = errors.slower(problem.cluster, deviations)
        slower = replace(problem, costs=costs.costs(problem.costs), cluster=costs.cluster(problem.cluster))
        part = stopping.of_what_is_left(OF_THE_REST)
        tried = SearchState(evaluator(slower, options.params), part, keeps_finalists=True)
        try:
            explore(tried)
        except KeyboardInterrupt:
            stopping.interrupt()
        except InfeasibleError:
            continue
        stopping.after(tried.stopping)
        found = (under_costs_of(state.evaluator, each) for each in tried.finalists.best())
        kept = [each for each in found if each is not None and each.req_s > 0]
        if kept:
            return kept
    return []


def _fits_once(problem: Problem) -> bool:
    """Whether the nodes with the most memory hold the model; each has a stage at least, and each stage a
    layer."""
    memory = problem.cluster.memory_bytes
    roomiest = greatest_first(enumerate(problem.node_gpus), lambda each: float(memory[list(each[1])].sum()))
    planner = Planner(replace(problem, goal=Goal()))
    planner.span = min(len(roomiest), problem.model.layers)
    most = {node: len(gpus) for node, gpus in roomiest[: planner.span] if gpus}
    return planner.plan("decode", counts_of(most)) is not None


def _why_infeasible(problem: Problem, state: SearchState) -> str:
    model, cluster = problem.model, problem.cluster
    weights = model.total_bytes / 2**30
    memory = float(cluster.memory_bytes[problem.usable].sum()) / 2**30
    cut = state.stopping.out_of_time() or state.stopping.hurried
    if memory < weights or not (cut or _fits_once(problem)):
        return (
            f"no feasible placement: {model.name} needs {weights:.3g} GiB for weights and more for its KV "
            f"cache, and all {len(problem.usable)} GPUs of {cluster.name} have {memory:.3g} GiB; "
            "add GPUs or choose a smaller model"
        )
    if problem.targets.given and not cut:
        return unmet(problem)
    if cut:
        return f"no feasible placement found within the time limit on {cluster.name}; raise --time-limit"
    if not state.incumbent.proved and memory > 2 * weights:
        return (
            f"no feasible placement found: {cluster.name} ({memory:.3g} GiB) is tight for two of "
            f"{model.name} ({weights:.3g} GiB each, and KV caches); add GPUs or choose a smaller model"
        )
    return (
        f"no feasible placement: {cluster.name} ({memory:.3g} GiB) holds {model.name} ({weights:.3g} GiB) "
        "once, but a prefill and a decode replica need it twice; add GPUs or choose a smaller model"
    )

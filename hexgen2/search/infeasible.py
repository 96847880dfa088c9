"""Why no placement meets the targets: how soon the best replica of a cluster could answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from cost_model.pipeline import Pace
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.targets import Targets
from hexgen2.search.problem import NodeCounts, Problem


def soonest_s(problem: Problem, stop: Callable[[], bool] = lambda: False) -> tuple[float, float]:
    """The tightest targets that any replica could meet.

    Returns seconds to the first token (for the goal's share of the prompts) and seconds per output token, of
    a request that is alone on the best group of one node, of two whole nodes or of all nodes; infinite if
    the model fits in none of them. Once it is time to stop, of the first groups in which it fits.
    """
    planner, targets = Planner(problem), Targets.of(problem.goal, problem.costs)
    groups = list(_groups(problem))

    def quickest_s(role: str) -> float:
        least = float("inf")
        for counts in groups:
            if least < float("inf") and stop():
                break
            least = min(least, planner.quickest_s(role, counts))
        return least

    first = quickest_s("prefill")
    if first == float("inf"):
        return first, first
    alone = targets.prefill_queue(Pace(1 / first, first), batch=1)
    return alone.soonest_s(targets.share), quickest_s("decode")


def _groups(problem: Problem) -> Iterator[NodeCounts]:
    """Every number of GPUs of one node of each kind, each two nodes of any kinds, and all nodes."""
    sizes = {node: len(gpus) for node, gpus in enumerate(problem.node_gpus) if gpus}
    first_of: dict[tuple[int, int], int] = {}
    for node, size in sizes.items():
        if first_of.setdefault((problem.node_kind[node], size), node) == node:
            yield from (((node, count),) for count in range(1, size + 1))
    seen = set()
    for a, b in itertools.combinations(sizes, 2):
        kinds = (*sorted((problem.node_kind[a], problem.node_kind[b])), problem.node_links[a][b])
        if kinds not in seen:
            seen.add(kinds)
            yield ((a, sizes[a]), (b, sizes[b]))
    yield tuple(sizes.items())


def unmet(problem: Problem) -> str:
    """Why no placement meets the targets, for the user."""
    targets, cluster = problem.targets, problem.cluster.name
    first, token = soonest_s(problem)
    wanted = (("--ttft", targets.ttft_s, first, "first token"), ("--tpot", targets.tpot_s, token, "token"))
    missed = [
        f"{option} {target * 1e3:g} ms (a {what} takes {best * 1e3:.4g} ms at best, without any queue)"
        for option, target, best, what in wanted
        if target is not None and target < best
    ]
    if missed:
        return f"no feasible placement: no replica on {cluster} meets {' or '.join(missed)}; raise it"
    return (
        f"no feasible placement found: no prefill and decode replicas side by side on {cluster} meet the "
        f"targets, though one alone takes {first * 1e3:.4g} ms to the first token or {token * 1e3:.4g} ms "
        "per token; raise --ttft or --tpot, or add GPUs"
    )

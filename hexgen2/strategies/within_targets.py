"""The cheapest rental that also keeps the targets in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cost_model.errors import InfeasibleError
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.search.problem import Problem
from hexgen2.search.stopping import Stopping
from hexgen2.strategies.base import SearchOptions, promised

CHEAPEST_TRIES = 4
"""How often a rental is looked for that also keeps the targets in the simulator."""
HEADROOM = 1.01
"""So much more load is planned for than the simulator asks for, so that the next rental is not short too."""


def cheapest_within_targets(
    problem: Problem, options: SearchOptions, search: Callable[[Problem, SearchOptions], Placement]
) -> Placement:
    """The cheapest rental found that serves the load within the targets in the simulator: formulas plan for a
    larger load until it does. After CHEAPEST_TRIES, the one that comes closest.

    Parameters
    ----------
    search : looks for the cheapest rental by formulas
    """
    goal, stopping = problem.goal, Stopping(options.time_limit_s)
    assert goal.request_rate is not None
    planned, most, best, least_per_hour = goal.request_rate, -1.0, None, None
    for _ in range(CHEAPEST_TRIES):
        asked = replace(problem, goal=goal.model_copy(update={"request_rate": planned}))
        left = replace(options, simulated=False, time_limit_s=stopping.time_left_s)
        try:
            found = search(asked, left)
        except (InfeasibleError, KeyboardInterrupt) as error:
            if best is None:
                raise
            if isinstance(error, KeyboardInterrupt):
                stopping.interrupt()
            break
        if best is None:
            least_per_hour = found.bound.price_per_hour
        found = found.model_copy(
            update={
                "goal": goal,
                "bound": found.bound.model_copy(update={"price_per_hour": least_per_hour}),
            }
        )
        cluster = Cluster.from_spec(found.cluster)
        try:
            found = promised([found], cluster, options.seed, stopping)
        except KeyboardInterrupt:  # The rental by formulas, without a promise.
            stopping.interrupt()
        kept = found.goodput.goodput_req_s if found.goodput and found.goodput.goodput_req_s else 0.0
        if kept > most:
            best, most = found, kept
        if kept >= goal.request_rate or found.search.cut or stopping.out_of_time():
            break
        planned *= HEADROOM * min(2.0, goal.request_rate / max(kept, goal.request_rate / 2))
    assert best is not None
    cut = best.search.cut or stopping.cut
    record = best.search.model_copy(update={"seconds": stopping.elapsed_s, "cut": cut})
    return best.model_copy(update={"search": record})

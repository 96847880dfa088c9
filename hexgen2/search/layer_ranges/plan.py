"""The search for layer ranges: bounds, rules, the stage programme, annealing, and the integer program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hexgen2.search.layer_ranges.bounds import Bound, upper_bound
from hexgen2.search.layer_ranges.heuristics import one_chain, petals, separate_pipelines, swarm
from hexgen2.search.layer_ranges.instance import Instance, Ranges
from hexgen2.search.layer_ranges.local_search import anneal
from hexgen2.search.layer_ranges.max_flow import Flow, FlowValue
from hexgen2.search.layer_ranges.milp import solve_milp
from hexgen2.search.layer_ranges.stages import best_stages
from hexgen2.search.stopping import Stopping

BOUNDED = 0.4
"""Share of the time limit after which no tighter bound is looked for: what is left is for better ranges."""
CLOSE = 1e-8
"""Relative gap to the bound at which the search ends."""
ROUNDS, STEPS, STEPS_PER_NODE = 8, 150_000, 6000
"""Annealings, and steps of each: at most, and in small clusters."""
KEPT_UP_ROUNDS, KEPT_UP_STEPS = 4, 8000
"""The same by what is kept up, which takes ten times as long to compute."""
ROUND_S = 6.0
"""Seconds of an annealing at least, if time is limited: fewer but slower ones find more."""
STEPS_AT_MOST = 30_000_000
"""Nodes times steps of one annealing: in large clusters a step takes longer."""
MILP_NODES, CERTIFY_NODES = 300, 100_000
"""Branches of the integer program by default, and to certify."""
MILP_LARGEST = 12
"""Nodes of the largest cluster for which the integer program is worth its time by default."""


@dataclass
class RangeSearch:
    """The best ranges so far, as a search goes on.

    Attributes
    ----------
    ranges, tok_s : the best found, and their flow
    bound : that no placement exceeds
    evaluations : max flows that were solved
    trace : one entry for each improvement
    """

    instance: Instance
    stopping: Stopping
    tok_per_req: float
    improved: Callable[[RangeSearch], None] = lambda search: None
    ranges: Ranges | None = None
    tok_s: float = 0.0
    bound: Bound | None = None
    evaluations: int = 0
    trace: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value = FlowValue(self.instance)

    @property
    def best_req_s(self) -> float:
        """Requests/s of the best; 0 if there is none."""
        return self.tok_s / self.tok_per_req

    @property
    def bound_req_s(self) -> float | None:
        """The same of the bound."""
        return None if self.bound is None else self.bound.tok_s / self.tok_per_req

    @property
    def done(self) -> bool:
        """Whether nothing better exists, or the search has to stop."""
        proved = self.bound is not None and self.tok_s >= self.bound.tok_s * (1 - CLOSE)
        return proved or self.stopping.out_of_time()

    def offer(self, ranges: Ranges | None, step: str) -> None:
        """Keep the ranges if they are better than the best."""
        if ranges is None or not self.instance.fits(ranges):
            return
        self.evaluations += 1
        tok_s = self.value(ranges)
        if tok_s > self.tok_s * (1 + 1e-12):
            self.ranges, self.tok_s = ranges, tok_s
            entry = {"step": step, "evaluations": self.evaluations, "req_s": self.best_req_s, "tok_s": tok_s}
            self.trace.append(entry)
            self.improved(self)

    def flow(self) -> Flow:
        """The max flow of the best; without partial inference if that passes as much."""
        assert self.ranges is not None
        simple = FlowValue(self.instance.entered_at_first_layers).flow(self.ranges)
        in_part = self.value.flow(self.ranges)
        return simple if simple.tok_s >= in_part.tok_s * (1 - 1e-12) else in_part


def search_ranges(
    search: RangeSearch, seed: int, certify: bool = False, kept_up: FlowValue | None = None
) -> None:
    """Leave the best ranges found in `search`; its `stopping` says how it ended.

    Ctrl-C ends it with the best so far, and is raised if there is none.

    Parameters
    ----------
    kept_up : counts in place of the flow, which then is an upper bound
    """
    try:
        _search(search, seed, certify, kept_up)
    except KeyboardInterrupt:
        if search.ranges is None:
            raise
        search.stopping.interrupt()


def _search(search: RangeSearch, seed: int, certify: bool, kept_up: FlowValue | None) -> None:
    instance, stop = search.instance, search.stopping.out_of_time
    starts: list[tuple[str, Ranges]] = []
    if sum(instance.most_layers) < instance.layers:
        return

    def start(name: str, ranges: Ranges | None) -> None:
        search.offer(ranges, f"start from {name}")
        if ranges is not None and instance.fits(ranges):
            starts.append((name, ranges))

    start("one chain", one_chain(instance))
    start("swarm", swarm(instance))
    search.bound = upper_bound(instance, search.tok_s, partial(search.stopping.spent, BOUNDED))
    if search.done and kept_up is None:
        return
    start("separate pipelines", separate_pipelines(instance))
    if instance.partial:
        start("petals", petals(instance))
    start("stages", best_stages(instance, 0.0, search.bound.tok_s, stop))
    if kept_up is not None:
        _anneal_kept_up(search, [ranges for _, ranges in starts], seed, kept_up)
        return
    if search.done or not starts:
        return
    starts.sort(key=lambda named: -search.value(named[1]))
    _anneal_all(search, starts[:3], seed)
    found = search.ranges is not None
    if found and not search.done and (certify or instance.nodes <= MILP_LARGEST):
        _improve_by_milp(search, CERTIFY_NODES if certify else MILP_NODES)


def _anneal_all(search: RangeSearch, starts: list[tuple[str, Ranges]], seed: int) -> None:
    """Anneal from each start in turn, then from the best, a little cooler. Every second time without partial
    inference: its flows are quicker to solve, and are flows with it, too."""
    instance, assured = search.instance, search.bound
    assert assured is not None
    simple = FlowValue(instance.entered_at_first_layers)
    steps = max(1000, min(STEPS, STEPS_PER_NODE * instance.nodes, STEPS_AT_MOST // instance.nodes))
    for number in range(ROUNDS):
        if search.done:
            return
        again = number >= ROUNDS - 2 and search.ranges is not None
        name, start = ("the best", search.ranges) if again else starts[number % len(starts)]
        assert start is not None
        value = search.value if number % 2 and instance.partial else simple
        found = anneal(
            value,
            instance,
            start,
            seed * ROUNDS + number,
            steps,
            assured.tok_s * (1 - CLOSE),
            spent=_share_of_round(search.stopping, ROUNDS - number),
            hottest_share=0.3 if again else 1.0,
        )
        search.evaluations += found.evaluations
        search.offer(found.ranges, f"anneal from {name}")
    search.stopping.out_of_time()


def _anneal_kept_up(search: RangeSearch, starts: list[Ranges], seed: int, kept_up: FlowValue) -> None:
    """Anneal by what is kept up: from the starts that keep up most, then from the best."""
    bound = search.bound
    assert bound is not None
    search.value, search.ranges, search.tok_s, search.trace = kept_up, None, 0.0, []
    for ranges in starts:
        search.offer(ranges, "start, by what is kept up")
    starts.sort(key=lambda ranges: -kept_up(ranges))
    for number in range(KEPT_UP_ROUNDS):
        if search.stopping.out_of_time() or not starts:
            return
        again = number >= KEPT_UP_ROUNDS - 2 and search.ranges is not None
        start = search.ranges if again and search.ranges is not None else starts[number % len(starts)]
        found = anneal(
            kept_up,
            search.instance,
            start,
            seed * KEPT_UP_ROUNDS + number,
            KEPT_UP_STEPS,
            bound.tok_s,
            spent=_share_of_round(search.stopping, KEPT_UP_ROUNDS - number),
            hottest_share=0.3 if again else 1.0,
        )
        search.evaluations += found.evaluations
        search.offer(found.ranges, "anneal what is kept up")


def _share_of_round(stopping: Stopping, rounds: int) -> Callable[[], float]:
    """The share of one round's time that has passed, of so many that are left; 0 without a time limit."""
    left_s, began_s = stopping.time_left_s, stopping.elapsed_s
    if left_s is None:
        return lambda: 0.0
    mine_s = max(left_s / rounds, min(ROUND_S, left_s), 1e-6)

    def share() -> float:
        if stopping.out_of_time():
            return 1.0
        passed = (stopping.elapsed_s - began_s) / mine_s
        stopping.hurried = stopping.hurried or passed >= 1
        return passed

    return share


def _improve_by_milp(search: RangeSearch, node_limit: int) -> None:
    """Let the integer program improve the best, or the bound."""
    assert search.ranges is not None and search.bound is not None
    result = solve_milp(
        search.instance,
        search.ranges,
        search.flow(),
        search.bound.tok_s,
        node_limit,
        search.stopping.time_left_s,
    )
    search.offer(result.ranges, "integer program")
    if not result.pruned and result.bound_tok_s < search.bound.tok_s * (1 - CLOSE):
        search.bound = Bound(max(result.bound_tok_s, search.tok_s), "integer program")
    search.stopping.out_of_time()

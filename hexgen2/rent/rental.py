"""A part of the universe as a problem of its own: a single GPU type, or the GPUs that are finally rented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster_specs.offers import rented_part
from hexgen2.cluster import Cluster
from hexgen2.placement import BoundRecord, FrontierPoint, Placement, Rented, SearchRecord
from hexgen2.search.budget import ROUNDING, Budget, spendable
from hexgen2.search.build import build_placement
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, Problem, Solution
from hexgen2.search.state import SearchState


@dataclass(frozen=True)
class Part:
    """Some GPUs of a universe as a problem. nodes[k] is the index in the universe of the problem's node k."""

    problem: Problem
    nodes: tuple[int, ...]

    def outside(self, solution: Solution) -> Solution:
        """Translate a solution of the part into one of the universe."""
        return _renamed(solution, dict(enumerate(self.nodes)))

    def inside(self, solution: Solution) -> Solution:
        """Translate a solution of the universe that uses only this part into one of the part."""
        return _renamed(solution, {node: k for k, node in enumerate(self.nodes)})


def part_of(universe: Problem, counts: Sequence[int]) -> Part:
    """The part with the first counts[n] GPUs of each node n."""
    nodes = tuple(n for n, count in enumerate(counts) if count)
    cluster = Cluster.from_spec(rented_part(universe.spec, counts))
    # A node keeps the network card speed that was derived from a link to a node outside the part.
    cards = universe.cluster.card_bytes_s[list(nodes)]
    known = [
        node.model_copy(update={"network_gbit_s": float(card) * 8e-9}) if here < card else node
        for node, card, here in zip(cluster.spec.nodes, cards, cluster.card_bytes_s, strict=True)
    ]
    if known != cluster.spec.nodes:
        cluster = Cluster.from_spec(cluster.spec.model_copy(update={"nodes": known}))
    return Part(replace(universe, spec=cluster.spec, cluster=cluster), nodes)


def build_rental(
    universe: Problem, state: SearchState, found: Evaluation, strategy: str, search: SearchRecord
) -> Placement:
    """The placement of a solution on a cluster of just the rented GPUs, with the frontier."""
    used = _used(found)
    part = part_of(universe, in_use(universe, used))
    evaluator = Evaluator(part.problem, state.evaluator.params)
    evaluation = evaluator.reordered(evaluator.evaluate(part.inside(used)))
    if not found.mixed:
        evaluation = evaluator.each_alone(evaluation)
    placement = build_placement(part.problem, evaluation, strategy, search)
    return placement.model_copy(
        update={
            "rented": rented_list(universe, used),
            "frontier": [_point(universe, budget, found) for budget, found in state.incumbent.frontier],
            "bound": rental_bound(state, used, placement.throughput.req_s),
        }
    )


def _used(evaluation: Evaluation) -> Solution:
    """The groups that serve the model; the others are not rented."""
    replicas = (*evaluation.prefill, *evaluation.decode, *evaluation.colocated)
    return Solution(tuple(replica.group for replica in replicas))


def _point(universe: Problem, budget: float, found: Evaluation) -> FrontierPoint:
    used = _used(found)
    price, tokens_s = Budget(universe, budget).price(used), found.req_s * universe.costs.osl
    return FrontierPoint(
        budget_per_hour=budget,
        price_per_hour=price,
        req_s=found.req_s,
        output_tok_s=tokens_s,
        usd_per_million_output_tokens=price / (tokens_s * 3600 / 1e6),
        rented=rented_list(universe, used),
    )


def in_use(universe: Problem, solution: Solution) -> list[int]:
    """Number of GPUs of each node that are in a group."""
    counts = [0] * len(universe.node_gpus)
    for group in solution.groups:
        for node, count in group.counts:
            counts[node] += count
    return counts


def rented_list(universe: Problem, solution: Solution) -> list[Rented]:
    """What the solution rents, grouped by type and price, fastest type first."""
    found: Counter[tuple[str, float]] = Counter()
    for node, count in enumerate(in_use(universe, solution)):
        found[universe.node_accelerator[node].name, universe.node_price[node]] += count
    order = [card.name for card in universe.cluster.types]
    ranked = sorted(found, key=lambda key: (order.index(key[0]), key[1]))
    return [
        Rented(accelerators=name, count=found[name, price], price_per_gpu_hour=price)
        for name, price in ranked
        if found[name, price]
    ]


def rental_bound(state: SearchState, solution: Solution, req_s: float) -> BoundRecord:
    """The upper bound for the budget. For the objective "cost": the bound for the price of the solution, and
    the lower bound on the price of any rental that carries the load (its own price, if that is proved
    optimal)."""
    universe, relaxed = state.evaluator.problem, state.evaluator.relaxed
    goal = universe.goal
    price = Budget(universe, spendable(universe)).price(solution)
    if goal.objective == "cost" and goal.request_rate is not None:
        branches, left_s = state.evaluator.params.certify_branches, state.stopping.time_left_s
        known, _ = relaxed.cheapest(goal.request_rate, branches, left_s)
        least = price if state.incumbent.proved else min(price, known)
        most = price * (1 + ROUNDING)
        if state.stopping.out_of_time() or state.stopping.cut:
            bound = relaxed.upper_bound(most)
        else:
            bound = relaxed.whole(most, branches, left_s, req_s)[1]
        return bound.record(req_s).model_copy(update={"price_per_hour": least})
    return (state.incumbent.bound or relaxed.upper_bound(spendable(universe))).record(req_s)


def _renamed(solution: Solution, names: Mapping[int, int]) -> Solution:
    return Solution(
        tuple(
            Group(group.role, tuple(sorted((names[node], count) for node, count in group.counts)))
            for group in solution.groups
        )
    )

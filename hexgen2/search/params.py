"""Every tuning constant of HexGen-2's search, with what it trades.

Effort is counted, not timed, so that the same seed gives the same placement on every machine: one evaluation
is one unit, and other work counts in proportion to the time that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cost_model.errors import InputError


@dataclass(frozen=True)
class Params:
    """Constants of the search; the defaults are those that all published figures were made with.

    Attributes
    ----------
    effort : of one search: better placements against time
    close_gap, large_gpus : on clusters of more than large_gpus GPUs, the search ends at this gap to the upper
        bound: a little throughput against much time
    certify_effort, certify_branches : effort and branches of the integer program that --certify adds; so
        many branches also look for the least price of a rental
    enumeration_branches : branches of the exhaustive search on small clusters before the perturbations begin:
        enough to settle most of them
    perturbations : perturb-and-refine rounds at most
    perturbation_steps : random steps of one perturbation at most (two at least): how far it leaves the best

    disaggregated_effort, colocated_effort : effort without an improvement after which the searches end from
        which a flexible one starts; to plan a colocated group takes longer than its effort says
    linear_effort : the same of its climb from the linear program's start
    stale_effort : and after which it ends itself
    rental_effort : of the search over all that could be rented, beside the searches of single GPU types
    rental_attempt_effort : for one of many budgets
    rental_branches, rental_perturbations : as above, for rentals
    rental_climbs : how many of the linear program's starts are refined
    budget_growth : factor from one budget to the next until one carries the load: fewer searches against a
        wider interval to halve
    budget_halvings : budgets tried halfway between what failed and what carried; then small steps down

    replan_effort, replan_few_nodes : effort of a re-plan, for clusters of at most so many nodes; with more
        nodes, less in proportion, since there are more steps to look at for each evaluation
    polish_rounds : rounds over all replicas in which each tries its other plans

    latency_effort, latency_perturbations : for one pair of latency targets
    latency_step : ratio of neighbouring targets on the grid: precision against searches
    latency_loosest : the loosest targets are latency_step to this power above what the best replica reaches
    latency_coarse : points of the grid from one step of the first, coarse walk to the next

    finalists : solutions that are simulated, where the goal has latency targets
    link_share, goodput_link_share : with latency targets, the share of the time for which traffic may keep a
        link busy: throughput against waiting; the second where the objective is goodput

    transfer_part : share of a target per output token that may go to the transfer, at least

    plateau_share : weight of the replicas' summed capacity in the score; it leads across plateaus of the flow
    transfer_share : weight of a transfer's seconds beside the price of the full links that it crosses, where
        orders of stages are compared
    stage_orders : orders of its stages tried per replica when the KV routes limit the flow
    reorder_rounds : rounds of reordering all replicas
    capacity_kept : an order of stages must keep this share of a replica's capacity
    effort_per_plan, effort_per_route, effort_per_group : effort of planning a group, of a route's use, and of
        looking at a group of a candidate
    """

    effort: float = 4000
    close_gap: float = 0.01
    large_gpus: int = 32
    certify_effort: float = 10_000
    certify_branches: int = 1000
    enumeration_branches: int = 20_000
    perturbations: int = 100
    perturbation_steps: int = 3

    disaggregated_effort: float = 1000
    colocated_effort: float = 350
    linear_effort: float = 100
    stale_effort: float = 350

    rental_effort: float = 8000
    rental_attempt_effort: float = 2500
    rental_branches: int = 40_000
    rental_perturbations: int = 200
    rental_climbs: int = 4
    budget_growth: float = 1.2
    budget_halvings: int = 4

    replan_effort: float = 1500
    replan_few_nodes: int = 10
    polish_rounds: int = 3

    latency_effort: float = 500
    latency_perturbations: int = 100
    latency_step: float = 1.2
    latency_loosest: int = 20
    latency_coarse: int = 4

    finalists: int = 12
    link_share: float = 0.75
    goodput_link_share: float = 0.9
    transfer_part: float = 0.1

    plateau_share: float = 1e-3
    transfer_share: float = 1e-2
    stage_orders: int = 120
    reorder_rounds: int = 3
    capacity_kept: float = 0.98
    effort_per_plan: float = 3
    effort_per_route: float = 1 / 50
    effort_per_group: float = 1 / 60

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.type == "int"
            if not value > 0 or (whole and value != int(value)):
                kind = "a positive whole number" if whole else "positive"
                raise InputError("search parameters", field.name, f"is {value}", f"make it {kind}")
        floors = {"perturbation_steps": 2, "budget_growth": 1.01, "latency_step": 1.01}
        for name, floor in floors.items():
            if getattr(self, name) < floor:
                raise InputError("search parameters", name, "is too small", f"make it at least {floor:g}")
        for name in ("close_gap", "capacity_kept", "link_share", "goodput_link_share", "transfer_part"):
            if getattr(self, name) > 1:
                raise InputError("search parameters", name, "is a share", "make it at most 1")


DEFAULT = Params()

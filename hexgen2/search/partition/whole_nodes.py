"""A first solution within milliseconds: replicas on whole nodes, or on several where one is too small.

No partition and no program stands behind it: it is there so that a search which has to stop early has an
answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution, counts_of
from hexgen2.search.ties import exceeds, first_greatest, greatest_first

MANY_REPLICAS = 4
"""Of more, a first answer is one in which nobody works for others: that is found out much sooner."""
ROOM = 2.5
"""Memory of nodes that are joined, at most, before the last one: a multiple of the weights."""
WORTH_DIVIDING = 1.03
"""So many times the requests/s of a node its parts have to serve: more replicas take longer to look at."""


def whole_nodes(
    evaluator: Evaluator,
    role: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    over: Callable[[], bool] = lambda: False,
    stop_joining: Callable[[], bool] | None = None,
    divide: bool = False,
) -> Solution:
    """A group on each node in which the model fits; nodes that are too small are joined, the nearest first,
    until it fits. They all have the role "colocated" (the default where they may have it), or those of them
    that are best at prefill, beside what they decode, prefill for the others ("decode").

    Parameters
    ----------
    stop : whether the nodes left stay idle, now that there is an answer: nodes that are alike are taken or
        left together, those with the most memory in all first
    over : whether they do so in any case
    stop_joining : whether those left that have to be joined do so; the same as stop unless given
    divide : whether nodes are divided in several groups where these serve more, until it is time to stop
    """
    problem = evaluator.problem
    role = role or problem.roles[-1]
    sizes = [len(gpus) for gpus in problem.node_gpus]
    found: list[NodeCounts] = []

    def enough(stop: Callable[[], bool]) -> bool:
        """Whether there is an answer and it is time to stop, or it is too late for one."""
        return (len(found) >= (1 if role == "colocated" else 2) and stop()) or over()

    small: list[int] = []
    for nodes in _alike(problem, [((node, size),) for node, size in enumerate(sizes) if size]):
        if enough(stop):
            break
        if evaluator.planner.plan(role, nodes[0]):
            found += nodes
        else:
            small += [node for ((node, _),) in nodes]
    found.sort()
    small.sort()
    while small and not enough(stop_joining or stop):
        joined = [small.pop(0)]
        counts = counts_of({joined[0]: sizes[joined[0]]})
        # Where targets are missed with this much memory, more nodes are unlikely to help, and slow to plan.
        most, span = ROOM * problem.model.total_bytes, evaluator.planner.span
        while small and not over() and len(joined) < span and _memory(problem, counts) < most:
            links = problem.node_links[joined[-1]]
            joined.append(first_greatest(small, [links[node].bandwidth_bytes_s for node in small]))
            small.remove(joined[-1])
            counts = counts_of({node: sizes[node] for node in joined})
            if evaluator.planner.plan(role, counts):
                found.append(counts)
                break
    if divide:
        alike = _alike(problem, found)
        found = sorted(part for nodes in alike for part in _in_parts(evaluator, role, nodes, stop))
    if role == "colocated":
        return Solution(tuple(Group(role, counts) for counts in found))
    two = found if len(found) > 1 else [half for one in found for half in _halves(one)]
    return _divided(evaluator, two, stop)


def _alike(problem: Problem, groups: Iterable[NodeCounts]) -> list[list[NodeCounts]]:
    """Groups with the same plans together, those with the most memory in all first. Groups of one node are
    alike if their nodes are of a kind; any other is taken to be unlike all."""
    found: dict[Hashable, list[NodeCounts]] = {}
    for counts in groups:
        (node, size), *others = counts
        found.setdefault(counts if others else (problem.node_kind[node], size), []).append(counts)
    return greatest_first(found.values(), lambda like: math.fsum(_memory(problem, each) for each in like))


def _memory(problem: Problem, counts: NodeCounts) -> float:
    """Bytes of memory of these GPUs."""
    memory, gpus = problem.cluster.memory_bytes, problem.node_gpus
    return math.fsum(count * float(memory[gpus[node][0]]) for node, count in counts)


def _in_parts(
    evaluator: Evaluator, role: str, nodes: list[NodeCounts], stop: Callable[[], bool]
) -> list[NodeCounts]:
    """These groups, which are alike, in parts where these serve more: halves are looked at, their halves, and
    so on, as long as they help. Groups of several nodes stay as they are."""
    (node, size), *others = nodes[0]
    most, best, part = _capacity(evaluator, role, node, size), [size], 0 if others else size // 2
    while part and not stop():
        count, rest = divmod(size, part)
        parts = [part] * count + [rest] * bool(rest)
        served = math.fsum(_capacity(evaluator, role, node, each) for each in parts)
        if not exceeds(served, most * WORTH_DIVIDING):
            break
        most, best, part = served, parts, part // 2
    return nodes if len(best) == 1 else [((counts[0][0], each),) for counts in nodes for each in best]


def _capacity(evaluator: Evaluator, role: str, node: int, size: int) -> float:
    """Requests/s of so many GPUs of a node with this role; 0 if the model does not fit."""
    plan = evaluator.planner.plan(role, ((node, size),))
    return plan.capacity_req_s if plan else 0.0


def first_look(evaluator: Evaluator, solution: Solution) -> Evaluation:
    """The value of a first answer, perhaps without what its replicas could do for one another."""
    if worth_more_mixed(evaluator, solution):
        return evaluator.with_phases("colocated").evaluate(solution)
    return evaluator.evaluate(solution)


def worth_more_mixed(evaluator: Evaluator, solution: Solution) -> bool:
    """Whether a first look leaves out what its replicas could do for one another."""
    colocated = all(group.role == "colocated" for group in solution.groups)
    return colocated and evaluator.problem.mixes and len(solution.groups) > MANY_REPLICAS


def _halves(counts: NodeCounts) -> tuple[NodeCounts, ...]:
    """A group in two parts of about as many nodes, or of its only node's GPUs; whole if it has one GPU."""
    (node, count), *others = counts
    if others:
        middle = len(counts) // 2
        return counts[:middle], counts[middle:]
    return (((node, count - count // 2),), ((node, count // 2),)) if count > 1 else (counts,)


def _divided(evaluator: Evaluator, found: list[NodeCounts], stop: Callable[[], bool]) -> Solution:
    """These groups, the first of them for prefill in the order of what they prefill beside what they decode:
    as many as serve most. Once it is time to stop and there are two, those unlike them are left out."""
    serve: dict[NodeCounts, tuple[float, float]] = {}
    for like in _alike(evaluator.problem, found):
        if len(serve) > 1 and stop():
            break
        prefill, decode = (evaluator.planner.plan(role, like[0]) for role in ("prefill", "decode"))
        if prefill and decode:
            serve |= dict.fromkeys(like, (prefill.capacity_req_s, decode.capacity_req_s))
    able = [(*serve[counts], counts) for counts in found if counts in serve]
    order = greatest_first(able, lambda each: each[0] / each[1])
    rest, sent, best, most = math.fsum(decode for _, decode, _ in order), 0.0, 0, 0.0
    for count, (sends, takes, _) in enumerate(order, 1):
        sent, rest = sent + sends, rest - takes
        if min(sent, rest) > most:
            best, most = count, min(sent, rest)
    roles = ["prefill"] * best + ["decode"] * (len(order) - best)
    return Solution(tuple(Group(role, counts) for role, (_, _, counts) in zip(roles, order, strict=True)))
